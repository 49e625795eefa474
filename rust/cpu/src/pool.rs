//! A pool of threads that help the caller with a job.
//!
//! A job is cut in units that whoever is there takes one by one, and it is over when all units are done: nobody waits
//! for a worker that the system has not given a CPU to, or that still sleeps. So on a crowded machine a job takes no
//! longer than the caller alone would need for it.
//!
//! Between jobs a worker spins for some microseconds and then sleeps: an idle engine uses no CPU. A job costs two locks
//! a worker and, if workers sleep, one wake-up, which the caller does not wait for.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use crate::cpus::Cpus;

/// Looks for a job before a worker sleeps: about 50 µs.
const SPINS: usize = 2000;
/// Looks before a waiting worker gives its CPU to whoever else wants it: about 5 µs.
const BUSY_SPINS: usize = 200;

/// A borrowed function, its lifetime erased.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(&Worker<'_>) + Sync));

// SAFETY: what it points to is `Sync`, so any thread may call it.
unsafe impl Send for Job {}

/// What the lock guards.
struct State {
    job: Option<Job>,
    /// Workers that run the job.
    num_inside: usize,
    is_closing: bool,
}

struct Inner {
    state: Mutex<State>,
    /// Jobs so far; changed under the lock, looked at without it.
    epoch: AtomicUsize,
    /// A job came, or the pool closes.
    called: Condvar,
    /// A worker left a job.
    left: Condvar,
    has_panicked: AtomicBool,
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn assert_whole(&self) {
        assert!(
            !self.has_panicked.load(Ordering::Acquire),
            "a worker of the pool panicked: the pool is lost"
        );
    }
}

/// One of the threads that run a job.
pub(crate) struct Worker<'a> {
    inner: &'a Inner,
    /// From 0, which is the caller; each once in a job.
    pub(crate) index: usize,
}

impl Worker<'_> {
    /// Waits until all units of a stage are done, and sees what they wrote.
    ///
    /// # Panics
    /// Another worker panicked, and will never do its unit.
    pub(crate) fn wait_for(&self, num_done: &AtomicUsize, num_units: usize) {
        let mut spins = 0;
        while num_done.load(Ordering::Acquire) < num_units {
            self.inner.assert_whole();
            spins += 1;
            if spins < BUSY_SPINS {
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
    }
}

/// Threads that run jobs together with the caller.
pub(crate) struct Pool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    cpus: Option<Arc<Cpus>>,
}

impl Pool {
    /// `num_workers` in all, the caller included.
    pub(crate) fn new(num_workers: usize) -> std::io::Result<Pool> {
        assert!(num_workers > 0, "a pool needs a worker");
        let inner = Arc::new(Inner {
            state: Mutex::new(State {
                job: None,
                num_inside: 0,
                is_closing: false,
            }),
            epoch: AtomicUsize::new(0),
            called: Condvar::new(),
            left: Condvar::new(),
            has_panicked: AtomicBool::new(false),
        });
        let mut pool = Pool {
            inner,
            threads: Vec::new(),
            cpus: Cpus::of(num_workers).map(Arc::new),
        };
        for index in 1..num_workers {
            let (inner, cpus) = (Arc::clone(&pool.inner), pool.cpus.clone());
            pool.threads.push(
                std::thread::Builder::new()
                    .name(format!("noria-cpu-{index}"))
                    .spawn(move || {
                        let _stay = cpus.and_then(|cpus| cpus.stay(index));
                        serve(&inner, index);
                    })?,
            );
        }
        Ok(pool)
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Runs `job` here and on each worker that comes before it is over here. It has to share its work by units that are
    /// taken, and must not count on any worker but the caller.
    ///
    /// # Panics
    /// The job did; the pool cannot be used again.
    pub(crate) fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) {
        let inner = &*self.inner;
        inner.assert_whole();
        // No longer than for the job: the thread is the caller's.
        let _stay = self.cpus.as_ref().and_then(|cpus| cpus.stay(0));
        // SAFETY: only the lifetime is erased. A worker calls it while it is counted inside, which it can only begin to
        // be while the job is in `state`; this function takes it out and waits for all inside before it returns, or
        // unwinds.
        let erased: *const (dyn Fn(&Worker<'_>) + Sync) = unsafe {
            std::mem::transmute::<
                &(dyn Fn(&Worker<'_>) + Sync),
                &'static (dyn Fn(&Worker<'_>) + Sync),
            >(job)
        };
        let mut state = inner.lock();
        state.job = Some(Job(erased));
        inner.epoch.fetch_add(1, Ordering::Release);
        drop(state);
        inner.called.notify_all();
        let outcome = work(inner, 0, job);
        let mut state = inner.lock();
        state.job = None;
        while state.num_inside > 0 {
            state = inner
                .left
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        inner.assert_whole();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.is_closing = true;
        self.inner.epoch.fetch_add(1, Ordering::Release);
        drop(state);
        self.inner.called.notify_all();
        for thread in self.threads.drain(..) {
            // A worker's own panics are caught; there is nothing to learn from the result.
            let _ = thread.join();
        }
    }
}

/// One worker's part of a job.
fn work(
    inner: &Inner,
    index: usize,
    job: &(dyn Fn(&Worker<'_>) + Sync),
) -> std::thread::Result<()> {
    let outcome = catch_unwind(AssertUnwindSafe(|| job(&Worker { inner, index })));
    if outcome.is_err() {
        inner.has_panicked.store(true, Ordering::Release);
    }
    outcome
}

fn serve(inner: &Inner, index: usize) {
    let mut seen = 0;
    loop {
        for _ in 0..SPINS {
            if inner.epoch.load(Ordering::Acquire) != seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = inner.lock();
        let job = loop {
            if state.is_closing {
                return;
            }
            let epoch = inner.epoch.load(Ordering::Acquire);
            if epoch != seen {
                seen = epoch;
                if let Some(job) = state.job {
                    break job;
                }
            }
            state = inner
                .called
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        };
        state.num_inside += 1;
        drop(state);
        // SAFETY: this worker is counted inside, so `Pool::run` holds the borrow.
        let job = unsafe { &*job.0 };
        // The caller learns of a panic by the flag.
        let _ = work(inner, index, job);
        let mut state = inner.lock();
        state.num_inside -= 1;
        if state.num_inside == 0 {
            inner.left.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(target_os = "linux")]
    #[test]
    fn as_many_workers_as_cpus_have_one_each_and_the_caller_keeps_none() {
        use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

        let cpus_of = |set: &CpuSet| -> Vec<usize> {
            (0..CpuSet::MAX_CPU)
                .filter(|&cpu| set.is_set(cpu))
                .collect()
        };
        let before = sched_getaffinity(None).unwrap();
        let all = cpus_of(&before);
        for num_workers in [all.len(), all.len() + 1] {
            let mut pool = Pool::new(num_workers).unwrap();
            let seen: Vec<Mutex<Vec<usize>>> =
                (0..num_workers).map(|_| Mutex::new(Vec::new())).collect();
            let num_inside = AtomicUsize::new(0);
            pool.run(&|worker| {
                let found = cpus_of(&sched_getaffinity(None).unwrap());
                *seen[worker.index].lock().unwrap() = found;
                num_inside.fetch_add(1, Ordering::Release);
                while num_inside.load(Ordering::Acquire) < num_workers {
                    std::thread::yield_now();
                }
            });
            let is_one_each = num_workers == all.len() && num_workers > 1;
            for (index, found) in seen.iter().enumerate() {
                let found = found.lock().unwrap();
                if is_one_each {
                    assert_eq!(*found, [all[index]], "worker {index}");
                } else {
                    assert_eq!(*found, all, "worker {index} of {num_workers}");
                }
            }
            assert_eq!(sched_getaffinity(None).unwrap(), before);
        }
        // Another choice that is made while a job runs stays.
        let mut last = CpuSet::new();
        last.set(all[all.len() - 1]);
        Pool::new(all.len()).unwrap().run(&|worker| {
            if worker.index == 0 {
                sched_setaffinity(None, &last).unwrap();
            }
        });
        assert_eq!(sched_getaffinity(None).unwrap(), last);
        sched_setaffinity(None, &before).unwrap();
    }

    /// Runs stages of `num_units` units, each of which has to see all of the stage before.
    fn run_stages(pool: &mut Pool, num_stages: usize, num_units: usize, slow: Option<usize>) {
        let counters =
            || -> Vec<AtomicUsize> { (0..num_stages).map(|_| AtomicUsize::new(0)).collect() };
        let (taken, done, sums) = (counters(), counters(), counters());
        pool.run(&|worker| {
            for stage in 0..num_stages {
                loop {
                    let unit = taken[stage].fetch_add(1, Ordering::Relaxed);
                    if unit >= num_units {
                        break;
                    }
                    if Some(worker.index) == slow {
                        std::thread::sleep(std::time::Duration::from_millis(1));
                    }
                    if stage > 0 {
                        assert_eq!(sums[stage - 1].load(Ordering::Relaxed), num_units);
                    }
                    sums[stage].fetch_add(1, Ordering::Relaxed);
                    done[stage].fetch_add(1, Ordering::AcqRel);
                }
                worker.wait_for(&done[stage], num_units);
            }
        });
        assert!(
            sums.iter()
                .all(|sum| sum.load(Ordering::Relaxed) == num_units)
        );
    }

    #[test]
    fn every_unit_is_done_once_and_sees_the_stage_before() {
        for num_workers in 1..=4 {
            let mut pool = Pool::new(num_workers).unwrap();
            for _ in 0..100 {
                run_stages(&mut pool, 20, 5, None);
            }
        }
    }

    #[test]
    fn slow_and_sleeping_workers_are_no_harm() {
        let mut pool = Pool::new(3).unwrap();
        for slow in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(10));
            run_stages(&mut pool, 3, 4, Some(slow));
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_hangs_nobody() {
        for guilty in [0, 1] {
            let mut pool = Pool::new(2).unwrap();
            let (was_there, done) = (AtomicBool::new(false), AtomicUsize::new(0));
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    if worker.index == 1 {
                        was_there.store(true, Ordering::Release);
                    }
                    while !was_there.load(Ordering::Acquire) {
                        std::thread::yield_now();
                    }
                    assert!(worker.index != guilty, "on purpose");
                    worker.wait_for(&done, 1);
                });
            }));
            assert!(outcome.is_err());
        }
    }
}
