//! Full blocks by the hash of all tokens up to their end. A hit compares the block's own tokens as well, and the chain
//! is keyed by a secret seed, so an unrelated block is never taken for another. A block filled twice keeps its first entry.
//!
//! A chained hash table with its links by block: O(1), nothing is allocated after construction.

use alloc::vec;
use alloc::vec::Vec;

use xxhash_rust::const_xxh3::const_custom_default_secret;
use xxhash_rust::xxh3::xxh3_128_with_secret;

use crate::ids::BlockId;

/// The hash of a prefix that ends with a block.
pub type BlockHash = u128;

/// Tokens hashed at once. A length known to the compiler makes a hash a straight line of some hundred instructions.
const PIECE: usize = 16;

/// Hashes prefixes, block by block.
#[derive(Clone, Debug)]
pub struct ChainHasher {
    /// Made of the seed once; from a seed alone each hash would derive what it needs of it.
    secret: [u8; 192],
}

impl ChainHasher {
    /// Another seed gives other hashes.
    pub fn new(seed: u64) -> Self {
        Self {
            secret: const_custom_default_secret(seed),
        }
    }

    /// The hash of a prefix that goes on from `parent` (a salt, for the first block) by `tokens`.
    pub fn chain(&self, parent: BlockHash, tokens: &[i32]) -> BlockHash {
        if let Ok(piece) = tokens.try_into() {
            return self.hash(parent, piece);
        }
        let (pieces, rest) = tokens.as_chunks();
        let hash = pieces
            .iter()
            .fold(parent, |hash, piece| self.hash(hash, piece));
        if rest.is_empty() {
            return hash;
        }
        let mut piece = [-1; PIECE]; // no token's id
        piece[..rest.len()].copy_from_slice(rest);
        self.hash(hash, &piece)
    }

    #[inline(never)] // inlined in a loop, it would copy the secret to the stack first
    fn hash(&self, parent: BlockHash, piece: &[i32; PIECE]) -> BlockHash {
        let mut bytes = [0; 16 + 4 * PIECE];
        bytes[..16].copy_from_slice(&parent.to_le_bytes());
        for (place, token) in bytes[16..].chunks_exact_mut(4).zip(piece) {
            place.copy_from_slice(&token.to_le_bytes());
        }
        xxh3_128_with_secret(&bytes, &self.secret)
    }
}

/// What can be found of a block.
#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Of the prefix that it ends, if it is registered.
    hash: BlockHash,
    /// The next block of the same bucket; 0 for none.
    next: u32,
    is_registered: bool,
}

/// Which block holds which prefix's end.
#[derive(Debug)]
pub struct PrefixCache {
    block_size: usize,
    /// The first block of each bucket; 0 for none.
    buckets: Vec<u32>,
    /// By block.
    entries: Vec<Entry>,
    /// What each block contains, `[num_blocks + 1, block_size]`.
    tokens: Vec<i32>,
    num_registered: u32,
}

impl PrefixCache {
    /// An empty cache over blocks 1 to `num_blocks`.
    pub fn new(num_blocks: u32, block_size: u32) -> Self {
        let len = num_blocks as usize + 1;
        Self {
            block_size: block_size as usize,
            buckets: vec![0; (len * 2).next_power_of_two()],
            entries: vec![Entry::default(); len],
            tokens: vec![0; len * block_size as usize],
            num_registered: 0,
        }
    }

    fn bucket(&self, hash: BlockHash) -> usize {
        hash as usize & (self.buckets.len() - 1)
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size as u32
    }

    /// What `block` contains, if it is registered.
    pub fn tokens(&self, block: BlockId) -> &[i32] {
        &self.tokens[block.index() * self.block_size..][..self.block_size]
    }

    /// The block that ends the prefix `hash` with `tokens`.
    pub fn find(&self, hash: BlockHash, tokens: &[i32]) -> Option<BlockId> {
        self.entry(hash)
            .filter(|&block| self.tokens(block) == tokens)
    }

    fn entry(&self, hash: BlockHash) -> Option<BlockId> {
        let mut block = self.buckets[self.bucket(hash)];
        while block != 0 {
            let entry = &self.entries[block as usize];
            if entry.hash == hash {
                return Some(BlockId(block));
            }
            block = entry.next;
        }
        None
    }

    /// Whether `block` can be found.
    pub fn is_registered(&self, block: BlockId) -> bool {
        self.entries[block.index()].is_registered
    }

    /// Blocks that can be found.
    pub fn num_registered(&self) -> u32 {
        self.num_registered
    }

    /// Makes a full block findable; `false` where its prefix has a block already.
    pub fn register(&mut self, block: BlockId, hash: BlockHash, tokens: &[i32]) -> bool {
        assert!(
            !self.is_registered(block),
            "block {} is registered twice",
            block.0
        );
        if self.entry(hash).is_some() {
            return false;
        }
        self.tokens[block.index() * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.insert(block, hash);
        true
    }

    fn insert(&mut self, block: BlockId, hash: BlockHash) {
        let bucket = self.bucket(hash);
        self.entries[block.index()] = Entry {
            hash,
            next: self.buckets[bucket],
            is_registered: true,
        };
        self.buckets[bucket] = block.0;
        self.num_registered += 1;
    }

    /// What could be found in `from` is found in `to` from now on; `false` where nothing could.
    pub(crate) fn relocate(&mut self, from: BlockId, to: BlockId) -> bool {
        if !self.unregister(from) {
            return false;
        }
        let start = from.index() * self.block_size;
        let tokens = start..start + self.block_size;
        self.tokens
            .copy_within(tokens, to.index() * self.block_size);
        self.insert(to, self.hash(from));
        true
    }

    /// Makes room for blocks up to `num_blocks`. O(blocks), where there are more than ever.
    pub(crate) fn reach(&mut self, num_blocks: u32) {
        let len = num_blocks as usize + 1;
        if len <= self.entries.len() {
            return;
        }
        self.entries.resize(len, Entry::default());
        self.tokens.resize(len * self.block_size, 0);
        self.buckets = vec![0; (len * 2).next_power_of_two()];
        self.num_registered = 0;
        for block in (1..=num_blocks).map(BlockId) {
            let entry = self.entries[block.index()];
            if entry.is_registered {
                self.insert(block, entry.hash);
            }
        }
    }

    /// Makes a registered block unfindable; `false` where it was so already.
    pub fn unregister(&mut self, block: BlockId) -> bool {
        let entry = &mut self.entries[block.index()];
        if !entry.is_registered {
            return false;
        }
        entry.is_registered = false;
        let Entry { hash, next, .. } = *entry;
        let bucket = self.bucket(hash);
        let mut at = self.buckets[bucket];
        if at == block.0 {
            self.buckets[bucket] = next;
        } else {
            while self.entries[at as usize].next != block.0 {
                at = self.entries[at as usize].next;
            }
            self.entries[at as usize].next = next;
        }
        self.num_registered -= 1;
        true
    }

    pub(crate) fn hash(&self, block: BlockId) -> BlockHash {
        self.entries[block.index()].hash
    }
}
