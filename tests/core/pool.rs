//! The pool by itself: which blocks it gives, in which order, and what it counts.

use noria_core::{BlockId, BlockPool};

fn taken(pool: &mut BlockPool, last: Option<u32>, num_wanted: u32) -> Option<(u32, u32)> {
    let given = pool.allocate(last.map(BlockId), num_wanted);
    given.map(|(first, num)| (first.0, num))
}

#[test]
fn a_table_goes_on_behind_its_last_block_where_that_is_free() {
    let mut pool = BlockPool::new(20);
    assert_eq!(
        taken(&mut pool, None, 4),
        Some((1, 4)),
        "the pool's first run from its start"
    );
    assert_eq!(taken(&mut pool, Some(4), 2), Some((5, 2)));
    assert_eq!(
        taken(&mut pool, Some(2), 1),
        Some((14, 1)),
        "block 3 is held: the middle of the rest"
    );
    assert_eq!(
        taken(&mut pool, Some(6), 9),
        Some((7, 7)),
        "as far as it goes"
    );
    assert_eq!(
        taken(&mut pool, Some(20), 3),
        Some((15, 3)),
        "behind the last block of all there is none"
    );
    assert_eq!(pool.num_free(), 20 - 4 - 2 - 1 - 7 - 3);
}

#[test]
fn a_run_is_cut_in_its_middle_from_four_times_what_is_taken_on() {
    for (num_wanted, expected) in [
        (1, (10, 1)),
        (4, (10, 4)),
        (5, (2, 5)),
        (16, (2, 16)),
        (30, (2, 16)),
    ] {
        let mut pool = BlockPool::new(17);
        assert_eq!(taken(&mut pool, None, 1), Some((1, 1)));
        assert_eq!(
            taken(&mut pool, None, num_wanted),
            Some(expected),
            "{num_wanted} of 16"
        );
    }
}

#[test]
fn a_pool_that_is_empty_gives_nothing_and_nothing_is_evicted_of_one_without_cached_blocks() {
    let mut pool = BlockPool::new(3);
    assert_eq!(taken(&mut pool, None, 3), Some((1, 3)));
    assert_eq!(taken(&mut pool, None, 1), None);
    assert_eq!(taken(&mut pool, Some(3), 1), None);
    assert_eq!(pool.evict(), None);
    assert_eq!((pool.num_blocks(), pool.limit()), (3, 3));
    assert_eq!((pool.num_free(), pool.num_cached()), (0, 0));
    assert!(!pool.is_shrinking());
}

#[test]
fn a_block_has_as_many_holders_as_it_was_given() {
    let mut pool = BlockPool::new(2);
    pool.allocate(None, 1).expect("one is free");
    pool.retain(BlockId(1));
    pool.retain(BlockId(1));
    assert_eq!(pool.num_holders(BlockId(1)), 3);
    assert_eq!(pool.num_holders(BlockId(2)), 0);
    pool.forget(BlockId(1));
    assert_eq!(pool.num_free(), 1, "held blocks do not come free so");
}
