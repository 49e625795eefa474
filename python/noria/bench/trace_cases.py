"""A trace's lengths under pressure: what admission and order are worth, counted in steps.

All requests have the trace's prompt and output lengths; outputs end by a stop id, so that the core knows only
`max_tokens` beforehand, and what it learns.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria._core import Core
from noria.bench.scripted import ScriptedCore
from noria.errors import ConfigError

NUM_KV_TOKENS = 65_536
TOKEN_BUDGET = 2_048
MAX_TOKENS = 2_048
_BLOCK_SIZE = 16
_LOAD = 0.9
MOST_REQUESTS = 100_000
"""Of a trace."""
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_COLUMN_NAMES = "TIMESTAMP, ContextTokens and GeneratedTokens"
NUM_SEATS = 256
"""More than the KV cache holds: memory is what runs short."""


@dataclass(frozen=True, slots=True)
class AdmissionRun:
    """All requests present at the start, under one admission.

    Attributes:
        admission: its name.
        num_steps: until the last has ended.
        useful_tokens_per_step: output tokens a step.
        recomputed_share: tokens computed beside those that had to be, by those.
        num_preempted: preemptions.
    """

    admission: str
    num_steps: int
    useful_tokens_per_step: float
    recomputed_share: float
    num_preempted: int


@dataclass(frozen=True, slots=True)
class OrderRun:
    """Requests that arrive at 90% of what the core can serve, under one order.

    Attributes:
        num_seats: seats.
        policy: its name.
        ageing_steps: steps after which a request is served first; 0: never.
        mean_latency_steps: from arrival to end.
        longest_latency_steps: the longest.
    """

    num_seats: int
    policy: str
    ageing_steps: int
    mean_latency_steps: float
    longest_latency_steps: float


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests that came, in order of arrival.

    Attributes:
        lengths: `[n, 2]`: prompt and output tokens.
        arrivals_s: `[n]`: seconds after the first.
    """

    lengths: npt.NDArray[np.int64]
    arrivals_s: npt.NDArray[np.float64]


def read_trace(path: Path, num_requests: int) -> Trace:
    """The first requests of a trace that fit.

    Args:
        path: a CSV file with the columns `TIMESTAMP`, `ContextTokens` and `GeneratedTokens`.
        num_requests: rows, at most.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"--trace {path} is no CSV file with the columns {_COLUMN_NAMES}; "
                    f"it lacks {' and '.join(missing)}",
                    name="--trace",
                    value=str(path),
                )
            rows = [row for _, row in zip(range(num_requests), reader, strict=False)]
        lengths = np.array(
            [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows], dtype=np.int64
        ).reshape(-1, 2)
        times = np.array([row["TIMESTAMP"][:26] for row in rows], dtype="datetime64[us]")
    except ConfigError:
        raise
    except (OSError, TypeError, ValueError, csv.Error) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--trace {path} cannot be read ({cause}); it must be a CSV file with the columns "
            f"{_COLUMN_NAMES}",
            name="--trace",
            value=str(path),
        ) from error
    fits = (lengths[:, 0] > 0) & (lengths[:, 1] > 0) & (lengths[:, 1] <= MAX_TOKENS)
    fits &= lengths[:, 0] + MAX_TOKENS <= NUM_KV_TOKENS
    if not fits.any():
        raise ConfigError(
            f"--trace {path} has no request that fits; give one with prompts and outputs up to {MAX_TOKENS}",
            name="--trace",
            value=str(path),
        )
    lengths, times = lengths[fits], times[fits]
    return Trace(lengths, (times - times[0]).astype(np.float64) / 1e6)


def _core(
    *, policy: str = "fcfs", admission: str = "peak", ageing_steps: int = 0, num_seats: int = NUM_SEATS
) -> Core:
    num_blocks = NUM_KV_TOKENS // _BLOCK_SIZE
    return Core(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_seats,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=NUM_KV_TOKENS,
        depth=1,
        watermark_blocks=num_blocks // 100,
        scheduling_policy=policy,
        admission=admission,
        ageing_steps=ageing_steps,
    )


def run_admissions(trace: Trace, tell: Callable[[str], None] = lambda _text: None) -> list[AdmissionRun]:
    """Runs a whole trace at once under each admission.

    Args:
        trace: its lengths are used.
        tell: told what comes next.
    """
    runs = []
    for admission in ("optimistic", "peak", "reserve"):
        tell(f"{len(trace.lengths)} requests under {admission}")
        scripted = _run_at_once(trace, _core(admission=admission))
        needed = int(trace.lengths.sum()) - len(trace.lengths)
        runs.append(
            AdmissionRun(
                admission,
                scripted.num_steps,
                scripted.num_output_tokens / scripted.num_steps,
                scripted.num_computed_tokens / needed - 1,
                scripted.num_preempted,
            )
        )
    return runs


def _run_at_once(trace: Trace, core: Core) -> ScriptedCore:
    scripted = ScriptedCore(core)
    for num_prompt, num_output in trace.lengths.tolist():
        scripted.submit(num_prompt, MAX_TOKENS, wanted=num_output)
    scripted.drain()
    return scripted


def run_orders(
    trace: Trace,
    *,
    num_seats: int,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[OrderRun]:
    """Runs a trace at 90% of what the core can serve, in order of arrival and shortest first.

    What it can serve is what it does while all requests are present at once, but for the first and the last
    tenth. With as many seats as memory allows, some fifty run at once and seldom a queue forms, unless the
    trace has peaks that last: an hour of a service has.

    Args:
        trace: its arrivals are stretched to that load, their bursts kept.
        num_seats: seats.
        seed: of the hints' errors (lognormal, sigma 0.5).
        tell: told what comes next.
    """
    rng = np.random.default_rng(seed)
    lengths, num_requests = trace.lengths, len(trace.lengths)
    tell(f"{num_requests} requests at once on {num_seats} seats")
    ends = np.sort(list(_run_at_once(trace, _core(num_seats=num_seats)).finished_us.values()))
    # What it can serve, without the time in which it fills up and that in which it empties.
    first, last = num_requests // 10, num_requests * 9 // 10
    steps_per_request = (ends[last] - ends[first]) / (last - first)
    stretch = steps_per_request * num_requests / _LOAD / max(trace.arrivals_s[-1], 1e-6)
    arrivals = (trace.arrivals_s * stretch).astype(np.int64)
    errors = np.exp(rng.normal(0.0, 0.5, num_requests))
    hints = np.maximum(1, lengths[:, 1] * errors).astype(np.int64)
    runs = []
    for policy, ageing_steps in (("fcfs", 0), ("sjf", 0), ("sjf", 8192), ("sjf", 1024)):
        tell(f"{num_requests} requests at 90% load under {policy}, ageing {ageing_steps or 'off'}")
        scripted = ScriptedCore(_core(policy=policy, ageing_steps=ageing_steps, num_seats=num_seats))
        handles: list[int] = []
        now = 0
        while len(handles) < num_requests or scripted.core.num_waiting + scripted.core.num_running:
            while len(handles) < num_requests and arrivals[len(handles)] <= now:
                (num_prompt, num_output), hint = lengths[len(handles)].tolist(), int(hints[len(handles)])
                handles.append(scripted.submit(num_prompt, MAX_TOKENS, wanted=num_output, expected=hint))
            scripted.now_us = now
            scripted.step()
            now += 1
        ends = np.array([scripted.finished_us[handle] for handle in handles])
        latencies = ends - arrivals
        runs.append(
            OrderRun(num_seats, policy, ageing_steps, float(latencies.mean()), float(latencies.max()))
        )
    return runs
