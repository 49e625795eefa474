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
_NUM_SEATS = 256


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
        policy: its name.
        ageing_steps: steps after which a request is served first; 0: never.
        mean_latency_steps: from arrival to end.
        longest_latency_steps: the longest.
    """

    policy: str
    ageing_steps: int
    mean_latency_steps: float
    longest_latency_steps: float


def read_trace(path: Path, num_requests: int) -> npt.NDArray[np.int64]:
    """The first lengths of a trace that fit.

    Args:
        path: a CSV file with the columns `ContextTokens` and `GeneratedTokens`.
        num_requests: rows, at most.

    Returns:
        `[n, 2]`: prompt and output tokens.

    Raises:
        ConfigError: it is no such file.
    """
    try:
        with path.open(newline="") as file:
            lengths = [
                (int(row["ContextTokens"]), max(1, int(row["GeneratedTokens"])))
                for _, row in zip(range(num_requests), csv.DictReader(file), strict=False)
            ]
    except (OSError, KeyError, ValueError) as error:
        raise ConfigError(
            f"--trace {path} cannot be read ({error}); it must be a CSV file with the columns ContextTokens "
            "and GeneratedTokens",
            name="--trace",
            value=str(path),
        ) from error
    trace = np.array(lengths, dtype=np.int64).reshape(-1, 2)
    return trace[
        (trace[:, 0] + MAX_TOKENS <= NUM_KV_TOKENS) & (trace[:, 1] <= MAX_TOKENS) & (trace[:, 0] > 0)
    ]


def _core(*, policy: str = "fcfs", admission: str = "peak", ageing_steps: int = 0) -> Core:
    num_blocks = NUM_KV_TOKENS // _BLOCK_SIZE
    return Core(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=_NUM_SEATS,
        max_num_batched_tokens=TOKEN_BUDGET,
        max_model_len=NUM_KV_TOKENS,
        depth=1,
        watermark_blocks=num_blocks // 100,
        scheduling_policy=policy,
        admission=admission,
        ageing_steps=ageing_steps,
    )


def run_admissions(
    trace: npt.NDArray[np.int64], tell: Callable[[str], None] = lambda _text: None
) -> list[AdmissionRun]:
    """Runs a whole trace at once under each admission.

    Args:
        trace: `[n, 2]`: prompt and output tokens.
        tell: told what comes next.
    """
    runs = []
    for admission in ("optimistic", "peak", "reserve"):
        tell(f"{len(trace)} requests under {admission}")
        scripted = ScriptedCore(_core(admission=admission))
        for num_prompt, num_output in trace.tolist():
            scripted.submit(num_prompt, MAX_TOKENS, wanted=num_output)
        scripted.drain()
        needed = int(trace.sum()) - len(trace)
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


def run_orders(
    trace: npt.NDArray[np.int64],
    num_saturated_steps: int,
    *,
    seed: int = 0,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[OrderRun]:
    """Runs a trace's lengths at 90% load, in order of arrival and shortest first.

    Args:
        trace: `[n, 2]`: prompt and output tokens.
        num_saturated_steps: steps that it takes when all are there at the start.
        seed: of the arrivals (Poisson) and of the hints' errors (lognormal, sigma 0.5).
        tell: told what comes next.
    """
    rng = np.random.default_rng(seed)
    gaps = rng.exponential(num_saturated_steps / len(trace) / 0.9, len(trace))
    arrivals = np.cumsum(gaps).astype(np.int64)
    hints = np.maximum(1, trace[:, 1] * np.exp(rng.normal(0.0, 0.5, len(trace)))).astype(np.int64)
    runs = []
    for policy, ageing_steps in (("fcfs", 0), ("sjf", 0), ("sjf", 1024)):
        tell(f"{len(trace)} requests at 90% load under {policy}, ageing {ageing_steps or 'off'}")
        scripted = ScriptedCore(_core(policy=policy, ageing_steps=ageing_steps))
        handles: list[int] = []
        now = 0
        while len(handles) < len(trace) or scripted.core.num_waiting + scripted.core.num_running:
            while len(handles) < len(trace) and arrivals[len(handles)] <= now:
                (num_prompt, num_output), hint = trace[len(handles)].tolist(), int(hints[len(handles)])
                handles.append(scripted.submit(num_prompt, MAX_TOKENS, wanted=num_output, expected=hint))
            scripted.now_us = now
            scripted.step()
            now += 1
        ends = np.array([scripted.finished_us[handle] for handle in handles])
        latencies = ends - arrivals
        runs.append(OrderRun(policy, ageing_steps, float(latencies.mean()), float(latencies.max())))
    return runs
