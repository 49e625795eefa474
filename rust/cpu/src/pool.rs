//! A pool of threads that run one function together, and meet at barriers in it.
//!
//! The caller is worker 0. Between jobs, and at a barrier, a worker spins for some microseconds and then sleeps: a
//! step's stages are shorter than a wake-up, and an idle engine must use no CPU.
//!
//! A job costs one store and, if workers sleep, one wake-up; a barrier one atomic addition a worker.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// Looks before a worker sleeps: about 50 µs, which is more than the longest unevenness of a stage.
const SPINS: usize = 2000;
/// Of these, one in so many gives the CPU to whoever else is waiting for it.
const YIELD_EVERY: usize = 64;

/// A number that only grows, and that threads wait for.
struct Gate {
    value: AtomicUsize,
    num_asleep: AtomicUsize,
    lock: Mutex<()>,
    woken: Condvar,
}

impl Gate {
    fn new() -> Gate {
        Gate {
            value: AtomicUsize::new(0),
            num_asleep: AtomicUsize::new(0),
            lock: Mutex::new(()),
            woken: Condvar::new(),
        }
    }

    fn advance(&self) {
        self.value.fetch_add(1, Ordering::SeqCst);
        // A sleeper announces itself before it looks at the value for the last time: either it is seen here, or it
        // sees the new value.
        if self.num_asleep.load(Ordering::SeqCst) > 0 {
            drop(self.lock.lock().unwrap_or_else(PoisonError::into_inner));
            self.woken.notify_all();
        }
    }

    fn value(&self) -> usize {
        self.value.load(Ordering::SeqCst)
    }

    /// Waits until the value is another than `seen`.
    fn wait_past(&self, seen: usize) {
        for spin in 1..=SPINS {
            if self.value.load(Ordering::Acquire) != seen {
                return;
            }
            if spin % YIELD_EVERY == 0 {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.num_asleep.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        while self.value() == seen {
            guard = self.woken.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        drop(guard);
        self.num_asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A job: a borrowed function, its lifetime erased. It is only called between a job's start and its end, and
/// [`Pool::run`], which borrows it, returns after the end.
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn(&Worker<'_>) + Sync));

// SAFETY: what it points to is `Sync`, so any thread may call it.
unsafe impl Send for Job {}

struct Inner {
    num_workers: usize,
    job: Mutex<Option<Job>>,
    started: Gate,
    finished: Gate,
    num_running: AtomicUsize,
    met: Gate,
    num_arrived: AtomicUsize,
    has_panicked: AtomicBool,
    is_closing: AtomicBool,
}

impl Inner {
    fn assert_whole(&self) {
        assert!(
            !self.has_panicked.load(Ordering::SeqCst),
            "a worker of the pool panicked: the pool is lost"
        );
    }
}

/// One of the threads that run a job.
pub(crate) struct Worker<'a> {
    inner: &'a Inner,
    /// From 0; the caller is 0.
    pub(crate) index: usize,
}

impl Worker<'_> {
    /// Waits until every worker is here.
    ///
    /// # Panics
    /// Another worker panicked, and will never come.
    pub(crate) fn barrier(&self) {
        let inner = self.inner;
        if inner.num_workers == 1 {
            return;
        }
        // First the value, then the flag: who panics sets the flag, then moves the value on.
        let seen = inner.met.value();
        inner.assert_whole();
        if inner.num_arrived.fetch_add(1, Ordering::AcqRel) + 1 == inner.num_workers {
            inner.num_arrived.store(0, Ordering::Release);
            inner.met.advance();
        } else {
            inner.met.wait_past(seen);
        }
        inner.assert_whole();
    }
}

/// Threads that run jobs together.
pub(crate) struct Pool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// `num_workers` in all, the caller included.
    pub(crate) fn new(num_workers: usize) -> std::io::Result<Pool> {
        assert!(num_workers > 0, "a pool needs a worker");
        let inner = Arc::new(Inner {
            num_workers,
            job: Mutex::new(None),
            started: Gate::new(),
            finished: Gate::new(),
            num_running: AtomicUsize::new(0),
            met: Gate::new(),
            num_arrived: AtomicUsize::new(0),
            has_panicked: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
        });
        let mut pool = Pool { inner, threads: Vec::new() };
        for index in 1..num_workers {
            let inner = Arc::clone(&pool.inner);
            pool.threads.push(
                std::thread::Builder::new()
                    .name(format!("noria-cpu-{index}"))
                    .spawn(move || serve(&inner, index))?,
            );
        }
        Ok(pool)
    }

    pub(crate) fn num_workers(&self) -> usize {
        self.inner.num_workers
    }

    /// Runs `job` on every worker, and returns when all have.
    ///
    /// # Panics
    /// The job did; the pool cannot be used again.
    pub(crate) fn run(&mut self, job: &(dyn Fn(&Worker<'_>) + Sync)) {
        let inner = &*self.inner;
        inner.assert_whole();
        let seen = inner.finished.value();
        // SAFETY: only the lifetime is erased. Workers call it between `started.advance` and their part of
        // `finished`, and this function does not return, or unwind, before all of them are through.
        let erased: *const (dyn Fn(&Worker<'_>) + Sync) = unsafe {
            std::mem::transmute::<
                &(dyn Fn(&Worker<'_>) + Sync),
                &'static (dyn Fn(&Worker<'_>) + Sync),
            >(job)
        };
        *inner.job.lock().unwrap_or_else(PoisonError::into_inner) = Some(Job(erased));
        inner.num_running.store(inner.num_workers, Ordering::SeqCst);
        inner.started.advance();
        let outcome = work(inner, 0, job);
        if inner.num_workers > 1 {
            inner.finished.wait_past(seen);
        }
        *inner.job.lock().unwrap_or_else(PoisonError::into_inner) = None;
        if let Err(panic) = outcome {
            resume_unwind(panic);
        }
        inner.assert_whole();
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.is_closing.store(true, Ordering::SeqCst);
        self.inner.started.advance();
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
        inner.has_panicked.store(true, Ordering::SeqCst);
        inner.met.advance(); // who waits at a barrier would wait for ever
    }
    if inner.num_running.fetch_sub(1, Ordering::SeqCst) == 1 {
        inner.finished.advance();
    }
    outcome
}

fn serve(inner: &Inner, index: usize) {
    let mut seen = 0;
    loop {
        inner.started.wait_past(seen);
        seen += 1;
        if inner.is_closing.load(Ordering::SeqCst) {
            return;
        }
        let Some(Job(job)) = *inner.job.lock().unwrap_or_else(PoisonError::into_inner) else {
            return;
        };
        // SAFETY: `Pool::run` holds the borrow until this worker has left `work`.
        let job = unsafe { &*job };
        let _ = work(inner, index, job);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_worker_runs_each_job_once_and_meets_the_others() {
        let mut pool = Pool::new(3).unwrap();
        for round in 0..200 {
            let sums: Vec<AtomicUsize> = (0..50).map(|_| AtomicUsize::new(0)).collect();
            pool.run(&|worker| {
                for (place, sum) in sums.iter().enumerate() {
                    sum.fetch_add(worker.index + 1, Ordering::Relaxed);
                    worker.barrier();
                    assert_eq!(sum.load(Ordering::Relaxed), 6, "round {round}, place {place}");
                }
            });
        }
    }

    #[test]
    fn a_pool_that_slept_wakes_up() {
        let mut pool = Pool::new(2).unwrap();
        let count = AtomicUsize::new(0);
        for _ in 0..3 {
            std::thread::sleep(std::time::Duration::from_millis(20));
            pool.run(&|worker| {
                if worker.index == 1 {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                worker.barrier();
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.load(Ordering::Relaxed), 6);
    }

    #[test]
    fn a_panic_in_one_worker_reaches_the_caller_and_hangs_nobody() {
        for guilty in 0..3 {
            let mut pool = Pool::new(3).unwrap();
            let outcome = catch_unwind(AssertUnwindSafe(|| {
                pool.run(&|worker| {
                    assert!(worker.index != guilty, "on purpose");
                    worker.barrier();
                });
            }));
            assert!(outcome.is_err());
        }
    }
}
