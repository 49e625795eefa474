//! The pool by itself: tables reserved and released, out of free runs and by evictions.

use noria_core::{ChainHasher, Kv, Seat};

use crate::workload::Ids;

/// Blocks of the pool.
pub(crate) const NUM_BLOCKS: u32 = 65_536;
const BLOCK_SIZE: u32 = 16;
/// Blocks of each table.
const TABLE_BLOCKS: u32 = 64;
const NUM_SEATS: u32 = NUM_BLOCKS / TABLE_BLOCKS;

#[inline(never)]
fn counted_in_runs(kv: &mut Kv, seats: &[Seat]) {
    for &seat in seats {
        kv.try_reserve(seat, TABLE_BLOCKS)
            .expect("the pool holds all");
    }
    for &seat in seats {
        kv.release(seat);
    }
}

#[inline(never)]
fn counted_evicting(kv: &mut Kv, seats: &[Seat]) {
    for &seat in seats {
        kv.try_reserve(seat, TABLE_BLOCKS)
            .expect("no block is held");
    }
}

/// Reserves every block of the pool twice, in an order that leaves holes; how often each was counted.
pub(crate) fn run_counted() -> u32 {
    let mut kv = Kv::new(NUM_BLOCKS, BLOCK_SIZE, NUM_SEATS, TABLE_BLOCKS);
    let seats: Vec<Seat> = (0..NUM_SEATS).map(|i| Seat(i * 37 % NUM_SEATS)).collect();
    counted_in_runs(&mut kv, &seats);
    assert_eq!(kv.pool().num_free(), NUM_BLOCKS);
    counted_evicting(&mut kv, &[]); // so that both functions are known
    for &seat in &seats {
        kv.try_reserve(seat, TABLE_BLOCKS)
            .expect("the pool is free");
    }
    let mut ids = Ids::new(3);
    let (hasher, mut parent) = (ChainHasher::new(5), 0);
    for &seat in &seats {
        for column in 0..TABLE_BLOCKS {
            let tokens: [i32; BLOCK_SIZE as usize] = std::array::from_fn(|_| ids.draw());
            let hash = hasher.chain(parent, &tokens);
            kv.register(seat, column, hash, &tokens);
            parent = hash;
        }
    }
    for &seat in &seats {
        kv.release(seat);
    }
    assert_eq!(kv.pool().num_free(), 0, "every block is cached");
    counted_evicting(&mut kv, &seats);
    assert_eq!(kv.cache().num_registered(), 0, "every block was evicted");
    NUM_BLOCKS
}
