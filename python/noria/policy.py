"""A scheduling policy of one's own: a function from what is known of requests to their places in line."""

import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from noria._core import FACT_FIELDS, Core
from noria.errors import NoriaError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WaitingRequests:
    """Requests that have just got in line, as arrays of `[num_requests]` int64.

    A request gets in line when it is submitted, and again each time that it is preempted.

    Attributes:
        handle: the request's, as in events.
        priority: its band; a better band's requests all run before a worse one's, whatever their scores.
        tenant: whose it is: `SchedulingHints.tenant_id`.
        adapter: what it runs with: `SchedulingHints.adapter_id`; 0 for none.
        arrival: how many requests came before it.
        submitted_us: when, on the clock of `time.perf_counter_ns`.
        due_us: when its next token is due by its targets, on the same clock.
        expires_us: when it expires, on the same clock; 2**63 - 1 for never.
        num_prompt_tokens: of its prompt.
        num_output_tokens: that it has; more than 0 where it was preempted.
        max_output_tokens: that it may have.
        num_expected_tokens: that its sender thinks it will want; 0 for no idea.
        num_remaining: output tokens to go, as predicted.
        num_uncached: tokens that the prefix cache does not hold.
        num_preemptions: times that it was preempted.
    """

    handle: npt.NDArray[np.int64]
    priority: npt.NDArray[np.int64]
    tenant: npt.NDArray[np.int64]
    adapter: npt.NDArray[np.int64]
    arrival: npt.NDArray[np.int64]
    submitted_us: npt.NDArray[np.int64]
    due_us: npt.NDArray[np.int64]
    expires_us: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    num_output_tokens: npt.NDArray[np.int64]
    max_output_tokens: npt.NDArray[np.int64]
    num_expected_tokens: npt.NDArray[np.int64]
    num_remaining: npt.NDArray[np.int64]
    num_uncached: npt.NDArray[np.int64]
    num_preemptions: npt.NDArray[np.int64]


PolicyFunction = Callable[[WaitingRequests], npt.ArrayLike]
"""Gives `[num_requests]` integers: lower goes first in its band, and of equals the first come.

A pure function: it is asked about a request only when that gets in line.
"""


@dataclass(frozen=True, slots=True)
class PolicyCost:
    """What asking a policy has cost.

    Attributes:
        num_calls: of the function.
        num_requests: that it was asked about.
        time_us: in the function, and in telling the core.
    """

    num_calls: int = 0
    num_requests: int = 0
    time_us: float = 0.0

    def __str__(self) -> str:
        each = self.time_us / self.num_requests if self.num_requests else 0.0
        return (
            f"{self.num_calls} calls about {self.num_requests} requests, {self.time_us / 1e3:.1f} ms: "
            f"{each:.1f} µs a request"
        )


class PolicyFailedError(NoriaError):
    """A policy raised, or gave no scores.

    Attributes:
        handles: `[num_requests]` int64: whom it was asked about.
    """

    def __init__(self, message: str, handles: npt.NDArray[np.int64]) -> None:
        super().__init__(message)
        self.handles = handles


class PolicyKeeper:
    """Asks a policy about requests that have got in line, and tells the core.

    Args:
        core: built with `scheduling_policy="own"`.
        function: the policy.
    """

    def __init__(self, core: Core, function: PolicyFunction) -> None:
        self._core = core
        self._function = function
        self.cost = PolicyCost()

    def score_changed(self, now_us: int) -> None:
        """To be called before each plan; does nothing where nobody has got in line since.

        Raises:
            PolicyFailedError: the function raised, or did not give one integer a request.
        """
        if not self._core.num_changed:
            return
        started_ns = time.perf_counter_ns()
        facts = self._core.take_changed()  # [num_requests, len(FACT_FIELDS)]
        if len(facts):
            columns = dict(zip(FACT_FIELDS, np.ascontiguousarray(facts.T), strict=True))
            self._core.set_scores(columns["handle"], self._scores(WaitingRequests(**columns)), now_us)
        self.cost = dataclasses.replace(
            self.cost,
            num_calls=self.cost.num_calls + (len(facts) > 0),
            num_requests=self.cost.num_requests + len(facts),
            time_us=self.cost.time_us + (time.perf_counter_ns() - started_ns) / 1e3,
        )

    def _scores(self, requests: WaitingRequests) -> npt.NDArray[np.int64]:
        try:
            scores = np.asarray(self._function(requests))
        except Exception as error:
            _log.warning("the policy failed", exc_info=True)
            message = f"the policy failed: {type(error).__name__}: {error}"
            raise PolicyFailedError(message, requests.handle) from error
        if scores.shape != requests.handle.shape or scores.dtype.kind not in "iu":
            raise PolicyFailedError(
                f"the policy gave {scores.dtype} of shape {list(scores.shape)}; it must give an integer for "
                f"each of the {len(requests.handle)} requests",
                requests.handle,
            )
        return np.ascontiguousarray(scores, dtype=np.int64)
