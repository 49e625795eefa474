//! KV memory: blocks given and taken back, and prompts looked up.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use noria_core::{BlockHash, BlockId, ChainHasher, Kv, PrefixCache, Seat};

use crate::sizes;
use crate::workload::Ids;

const BLOCK_SIZE: u32 = 16;
const SEED: u64 = 7;

/// A full block's tokens and its prefix's hash; no two are alike.
struct Content {
    tokens: Vec<i32>,
    hash: BlockHash,
}

fn contents(num_blocks: u32) -> Vec<Content> {
    let mut ids = Ids::new(u64::from(num_blocks));
    let hasher = ChainHasher::new(SEED);
    let mut parent = 0;
    (0..num_blocks)
        .map(|_| {
            let tokens: Vec<i32> = (0..BLOCK_SIZE).map(|_| ids.draw()).collect();
            parent = hasher.chain(parent, &tokens);
            Content {
                tokens,
                hash: parent,
            }
        })
        .collect()
}

/// Blocks reserved from free ones, reserved by eviction, and released.
pub(crate) fn block_pool(criterion: &mut Criterion) {
    println!(
        "block pool: the peer is vLLM 0.32's allocator (stored, AMD EPYC): 180 to 520 ns a block, 800 to 950 where \
         each allocation evicts"
    );
    let mut group = criterion.benchmark_group("block_pool");
    for &num_blocks in sizes(&[64, 4096]) {
        group.throughput(Throughput::Elements(num_blocks.into()));
        let seat = Seat(0);
        let mut kv = Kv::new(num_blocks, BLOCK_SIZE, 1, num_blocks);
        group.bench_function(
            BenchmarkId::new("reserve_free_and_release", num_blocks),
            |bencher| {
                bencher.iter(|| {
                    kv.try_reserve(seat, num_blocks).expect("the pool is free");
                    kv.release(black_box(seat));
                });
            },
        );
        let contents = contents(num_blocks);
        group.bench_function(
            BenchmarkId::new("reserve_by_eviction", num_blocks),
            |bencher| {
                bencher.iter_custom(|num_iters| evictions(&contents, num_iters));
            },
        );
    }
    group.finish();
}

/// How long `num_iters` rounds take in which every block of a pool is evicted and reserved.
fn evictions(contents: &[Content], num_iters: u64) -> Duration {
    let (seat, num_blocks) = (Seat(0), contents.len() as u32);
    let mut kv = Kv::new(num_blocks, BLOCK_SIZE, 1, num_blocks);
    let mut elapsed = Duration::ZERO;
    for _ in 0..=num_iters {
        let started = Instant::now();
        kv.try_reserve(seat, num_blocks).expect("no block is held");
        // The first round finds the pool free.
        if kv.cache().num_registered() == 0 && kv.pool().num_cached() == 0 {
            elapsed += started.elapsed();
        }
        for (content, column) in contents.iter().zip(0..) {
            kv.register(seat, column, content.hash, &content.tokens);
        }
        kv.release(seat);
    }
    elapsed
}

/// A prompt's blocks found in the cache, with and without their hashes at hand.
pub(crate) fn prefix_lookup(criterion: &mut Criterion) {
    println!("prefix lookup: the limit is one read of the same tokens, `compare_tokens`");
    let mut group = criterion.benchmark_group("prefix_lookup");
    for &num_blocks in sizes(&[64, 4096]) {
        group.throughput(Throughput::Elements(num_blocks.into()));
        let (hasher, contents) = (ChainHasher::new(SEED), contents(num_blocks));
        let mut cache = PrefixCache::new(num_blocks, BLOCK_SIZE);
        for (content, block) in contents.iter().zip(1..) {
            cache.register(BlockId(block), content.hash, &content.tokens);
        }
        let is_found = |hash, tokens: &[i32]| cache.find(hash, tokens).is_some();
        group.bench_function(BenchmarkId::new("hash_and_find", num_blocks), |bencher| {
            bencher.iter(|| {
                let mut parent = 0;
                for content in black_box(&contents) {
                    parent = hasher.chain(parent, &content.tokens);
                    assert!(is_found(parent, &content.tokens), "every block is cached");
                }
            });
        });
        group.bench_function(BenchmarkId::new("find", num_blocks), |bencher| {
            bencher.iter(|| {
                for content in black_box(&contents) {
                    assert!(
                        is_found(content.hash, &content.tokens),
                        "every block is cached"
                    );
                }
            });
        });
        group.bench_function(BenchmarkId::new("compare_tokens", num_blocks), |bencher| {
            bencher.iter(|| {
                for (content, block) in black_box(&contents).iter().zip(1..) {
                    assert!(
                        cache.tokens(BlockId(block)) == content.tokens,
                        "tokens are kept"
                    );
                }
            });
        });
    }
    group.finish();
}
