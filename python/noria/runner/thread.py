"""A runner with one thread and one queue of jobs: what makes steps overlap with planning.

Why no job of a discarded step ever runs. A step is a ticket, shared by its jobs and its result.
- A job that raises makes the thread *broken*: it drops every job until it meets a fence. All it
  drops belongs to the failed step or to later ones, as the engine enqueues in step order.
- `discard_from` cancels the tickets, enqueues a fence and waits until the thread has passed it:
  whatever was enqueued before has then run or was dropped, the thread is whole again, and what is
  enqueued next is new. It also covers a discard that the engine decides on by itself while a job of
  the step is running.
- A result whose ticket was cancelled after it was put in the queue is dropped by `next_result`.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noria.errors import NoriaError
from noria.runner.base import DeviceLostError, Executor, HostMasks, PendingIds, SeatInit, StepResult
from noria.runner.step import StepView

# Waits are cut, so that the engine's side looks at Ctrl-C after this time at the latest.
_SIGNAL_CHECK_S = 1.0


class _Ticket:
    """A step on its way; the thread writes the times, the engine's side `is_cancelled`."""

    __slots__ = (
        "buffer_index",
        "expand_ns",
        "forward_ns",
        "forward_wait_ns",
        "is_cancelled",
        "sample_ns",
        "sample_wait_ns",
        "step",
    )

    def __init__(self, step: int, buffer_index: int) -> None:
        self.step = step
        self.buffer_index = buffer_index
        self.is_cancelled = False
        self.forward_wait_ns = 0
        self.expand_ns = 0
        self.forward_ns = 0
        self.sample_wait_ns = 0
        self.sample_ns = 0


@dataclass(frozen=True, slots=True)
class _Forward:
    ticket: _Ticket
    inits: Sequence[SeatInit]


@dataclass(frozen=True, slots=True)
class _Sample:
    ticket: _Ticket
    masks: HostMasks | None


@dataclass(frozen=True, slots=True)
class _Fence:
    passed: threading.Event


@dataclass(frozen=True, slots=True)
class _Close:
    pass


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What the thread hands back: the step's tokens, perhaps still being sampled, or an error."""

    ticket: _Ticket
    pending: PendingIds | None
    error: BaseException | None


_Job = _Forward | _Sample | _Fence | _Close
_Jobs = queue.SimpleQueue[_Job]
_Outcomes = queue.SimpleQueue[_Outcome]


class ThreadRunner:
    """A `StepRunner` over an executor.

    Args:
        executor: computes the steps; only the runner's thread calls it from now on.
        ring: the buffers, by index.
    """

    def __init__(self, executor: Executor, ring: Sequence[StepView]) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._outcomes: _Outcomes = queue.SimpleQueue()
        self._tickets: list[_Ticket] = []  # in step order: neither taken nor discarded
        # The thread's target holds no reference to this object, so that one that is dropped without
        # `close` is finalized, which ends the thread; at exit finalizers run before modules go away.
        self._thread = threading.Thread(
            target=_run_jobs,
            args=(executor, tuple(ring), self._jobs, self._outcomes),
            name="noria-runner",
            daemon=True,
        )
        self._thread.start()
        self._finalizer = weakref.finalize(self, _stop, self._jobs, self._thread)

    def forward(self, step: int, buffer_index: int, inits: Sequence[SeatInit]) -> None:
        self._require_open()
        ticket = _Ticket(step, buffer_index)
        self._tickets.append(ticket)
        self._jobs.put(_Forward(ticket, inits))

    def sample(self, step: int, masks: HostMasks | None = None) -> None:
        self._require_open()
        if not self._tickets or self._tickets[-1].step != step:
            raise NoriaError(f"step {step} cannot be sampled: its forward is not the last one enqueued")
        self._jobs.put(_Sample(self._tickets[-1], masks))

    def next_result(
        self, *, block: bool, while_waiting: Callable[[], None] | None = None
    ) -> StepResult | None:
        while True:
            self._require_open()
            try:
                outcome = self._outcomes.get(block=block, timeout=_SIGNAL_CHECK_S)
            except queue.Empty:
                if not block:
                    return None
                if while_waiting is not None:
                    while_waiting()
                continue
            if not outcome.ticket.is_cancelled:
                break
        if self._tickets.pop(0) is not outcome.ticket:
            raise NoriaError(f"the result of step {outcome.ticket.step} came out of order")
        return _result(outcome)

    def discard_from(self, step: int) -> None:
        self._require_open()
        for ticket in self._tickets:
            ticket.is_cancelled = ticket.step >= step
        self._tickets = [ticket for ticket in self._tickets if not ticket.is_cancelled]
        fence = _Fence(threading.Event())
        self._jobs.put(fence)
        fence.passed.wait()

    def close(self) -> None:
        for ticket in self._tickets:
            ticket.is_cancelled = True
        self._tickets.clear()
        self._finalizer()

    def _require_open(self) -> None:
        if not self._finalizer.alive:
            raise NoriaError("the runner is closed")


def _stop(jobs: _Jobs, thread: threading.Thread) -> None:
    jobs.put(_Close())
    # A finalizer can run on the runner's own thread, when the last reference dies there.
    if thread is not threading.current_thread():
        thread.join()


def _run_jobs(executor: Executor, ring: Sequence[StepView], jobs: _Jobs, outcomes: _Outcomes) -> None:
    """The thread: runs jobs in order until it is told to close."""
    is_broken = False
    last_end_ns = time.perf_counter_ns()
    while True:
        job = jobs.get()
        wait_ns = time.perf_counter_ns() - last_end_ns
        match job:
            case _Close():
                return
            case _Fence():
                is_broken = False
                job.passed.set()
            case _Forward() | _Sample() if not is_broken and not job.ticket.is_cancelled:
                outcome = _run_job(executor, ring, job, wait_ns)
                if outcome is not None:
                    is_broken = outcome.error is not None
                    outcomes.put(outcome)
                del outcome
        # What a job holds (masks, an error's frames and the tensors in them) must not live on until the next.
        del job
        last_end_ns = time.perf_counter_ns()


def _run_job(
    executor: Executor, ring: Sequence[StepView], job: _Forward | _Sample, wait_ns: int
) -> _Outcome | None:
    ticket = job.ticket
    view = ring[ticket.buffer_index]
    start_ns = time.perf_counter_ns()
    try:
        if isinstance(job, _Forward):
            ticket.forward_wait_ns = wait_ns
            executor.expand(view, job.inits)
            expanded_ns = time.perf_counter_ns()
            ticket.expand_ns = expanded_ns - start_ns
            executor.forward(view)
            ticket.forward_ns = time.perf_counter_ns() - expanded_ns
            return None
        ticket.sample_wait_ns = wait_ns
        pending = executor.sample(view, job.masks)
        ticket.sample_ns = time.perf_counter_ns() - start_ns
        return _Outcome(ticket, pending, None)
    except BaseException as error:  # noqa: BLE001  an unreported one would leave the engine waiting for ever
        return _Outcome(ticket, None, error)


def _result(outcome: _Outcome) -> StepResult:
    """Waits for the device, where the tokens are still on their way."""
    ticket, sampled, error = outcome.ticket, None, outcome.error
    if outcome.pending is not None:
        try:
            sampled = outcome.pending.wait()
        except Exception as raised:  # noqa: BLE001  whatever the device reports belongs to this step
            error = raised
    host_us = (ticket.expand_ns + ticket.forward_ns + ticket.sample_ns) // 1000
    device_us = None if sampled is None else sampled.device_us
    return StepResult(
        step=ticket.step,
        sampled=sampled,
        error=error,
        is_fatal=error is not None and _is_fatal(error),
        device_us=host_us if device_us is None else device_us,
        expand_us=ticket.expand_ns // 1000,
        forward_us=ticket.forward_ns // 1000,
        sample_us=ticket.sample_ns // 1000,
        forward_wait_us=ticket.forward_wait_ns // 1000,
        sample_wait_us=ticket.sample_wait_ns // 1000,
    )


def _is_fatal(error: BaseException) -> bool:
    """What is no Exception (SystemExit, …) is not the step's own fault: the next would fare no better."""
    return isinstance(error, DeviceLostError) or not isinstance(error, Exception)
