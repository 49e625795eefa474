//! Which CPU each worker runs on.
//!
//! Where a job has as many workers as this process may use CPUs, each worker has one of its own: systems now and then put
//! two workers on one CPU, whose units then take twice as long, or move a worker away from what its caches hold. With fewer
//! workers the system chooses: other processes may have as few, and would not have to meet on the same CPUs.

pub(crate) use chosen::Cpus;

/// Set to `false`, workers go where the system puts them.
const BIND_VARIABLE: &str = "OMP_PROC_BIND";

/// Whether each of so many workers has a CPU of its own.
pub fn is_bound(num_workers: usize) -> bool {
    Cpus::of(num_workers).is_some()
}

#[cfg(target_os = "linux")]
mod chosen {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

    use super::BIND_VARIABLE;

    /// A CPU for each worker.
    pub(crate) struct Cpus {
        all: CpuSet,
        of_workers: Vec<usize>,
    }

    /// A thread's stay on a worker's CPU; it ends when this is dropped.
    pub(crate) struct Stay {
        before: CpuSet,
        own: CpuSet,
    }

    impl Cpus {
        /// One for each of so many workers, or None where the system is to choose.
        pub(crate) fn of(num_workers: usize) -> Option<Cpus> {
            let is_refused = std::env::var(BIND_VARIABLE)
                .is_ok_and(|value| value.trim().eq_ignore_ascii_case("false"));
            let all = sched_getaffinity(None).ok()?;
            let of_workers: Vec<usize> = (0..CpuSet::MAX_CPU)
                .filter(|&cpu| all.is_set(cpu))
                .collect();
            let is_one_each = num_workers > 1 && of_workers.len() == num_workers;
            (is_one_each && !is_refused).then_some(Cpus { all, of_workers })
        }

        /// Keeps this thread on a worker's CPU, unless somebody has already chosen other CPUs for it.
        pub(crate) fn stay(&self, worker: usize) -> Option<Stay> {
            let before = sched_getaffinity(None).ok()?;
            if before != self.all {
                return None;
            }
            let mut own = CpuSet::new();
            own.set(self.of_workers[worker]);
            sched_setaffinity(None, &own).ok()?;
            Some(Stay { before, own })
        }
    }

    impl Drop for Stay {
        fn drop(&mut self) {
            // Who has moved it meanwhile has the last word.
            if sched_getaffinity(None).is_ok_and(|now| now == self.own) {
                let _ = sched_setaffinity(None, &self.before);
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod chosen {
    /// There are none: the system chooses.
    pub(crate) enum Cpus {}

    impl Cpus {
        pub(crate) fn of(_num_workers: usize) -> Option<Cpus> {
            None
        }

        pub(crate) fn stay(&self, _worker: usize) -> Option<()> {
            match *self {}
        }
    }
}
