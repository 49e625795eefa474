"""Cases that a scheduler under pressure gets right or wrong, with vLLM's figures beside.

Each case is a script of `peers.case_scripts`, run on a fresh core at depth 1 under the engine's default
admission, ageing and bypasses; vLLM's scheduler runs the same script in its own environment, or its figures
are those stored here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from noria._core import Core
from noria.bench.peers.case_scripts import BLOCK_SIZE, SCRIPTS, Figures, Side, Sizes
from noria.bench.scripted import ScriptedCore

VLLM_SOURCE = "vLLM 0.32.0 (CPU), its default scheduler on the same scripts, AMD EPYC (Zen 3), 2 virtual CPUs"
VLLM_FIGURES: Mapping[str, Figures] = {
    "A": {"waited": 299, "ran": 1},
    "B": {"waited": 299, "ran": 1},
    "C": {"waited": 30, "ran": 1},
    "C, half": {"waited": 14, "ran": 1},
    "D": {"waited": 159, "ran": 1},
    "E": {"waited": 3000, "ran": 0},
    "F": {"num_steps": 1324, "again": 0.5005, "num_preempted": 86},
    "F, 300%": {"num_steps": 1324, "again": 0.5005, "num_preempted": 86},
    "G": {"admits": 0},
    "H": {"num_preempted": 448, "us": 158_000},
    "I": {"us": 182_000},
    "K": {"few_us": 61.9, "many_us": 64.9},
    "K, parked": {"few_us": 17_600, "many_us": 49_400},
    "L": {"half_us": 6_300, "whole_us": 7_500},
    "N": {"num_late": 64, "num_preempted": 236, "num_policies": 2},
}
"""What `measure_vllm` gave, by script: the steps are the same anywhere, the times are that machine's."""

_POLICIES = ("fcfs", "priority", "sjf", "deadline", "fair", "prefix")
_VOCAB_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One case.

    Attributes:
        case: its letter.
        what: its input, in words.
        vllm: what vLLM did on it.
        noria: what this core did, just now.
        bar: what it must not exceed.
        is_met: whether it did not.
    """

    case: str
    what: str
    vllm: str
    noria: str
    bar: str
    is_met: bool


@dataclass(frozen=True, slots=True)
class _Case:
    """How a script's figures are told.

    Attributes:
        what: its input, in words.
        told: figures in words.
        bar: what noria's must not exceed, in words.
        is_met: whether they do not: noria's figures, then vLLM's.
    """

    what: str
    told: Callable[[Figures], str]
    bar: str
    is_met: Callable[[Figures, Figures], bool]


def told_wait(figures: Figures) -> str:
    """How long the one that a case is about waits, in words."""
    if not figures["ran"]:
        return f"never runs in {figures['waited']:.0f} steps"
    return f"waits {figures['waited']:.0f} steps" if figures["waited"] else "runs in the next step"


def _told_crowd(figures: Figures) -> str:
    return (
        f"{figures['num_steps']:.0f} steps, +{figures['again']:.1%} computed again, "
        f"{figures['num_preempted']:.0f} preempted"
    )


def _told_us(time_us: float) -> str:
    return f"{time_us:.1f} µs" if time_us < 1000 else f"{time_us / 1e3:.1f} ms"


def _told_victims(figures: Figures) -> str:
    late, among = figures["num_late"], f"{figures['num_preempted']:.0f} victims"
    return f"evicted it: {late:.0f} of {among}" if late else f"never, of {among}"


def _waited(what: str, most: int = 0) -> _Case:
    bar = f"{most} steps" if most else "the next step"
    return _Case(what, told_wait, bar, lambda ours, _: bool(ours["ran"]) and ours["waited"] <= most)


def _crowd(percent: int, most_steps: int, most_again: float) -> _Case:
    return _Case(
        f"64 requests (64 in, 512 out), room for 16; peak_percent {percent}",
        _told_crowd,
        f"{most_steps} steps, +{most_again:.0%}",
        lambda ours, _: ours["num_steps"] <= most_steps and ours["again"] <= most_again,
    )


def _constant(what: str, small: str, large: str) -> _Case:
    return _Case(
        what,
        lambda figures: f"{_told_us(figures[large])} ({_told_us(figures[small])})",
        "constant",
        lambda ours, vllm: ours[large] < 3 * ours[small] and ours[large] < vllm[large],
    )


_CASES: Mapping[str, _Case] = {
    "A": _waited("4 seats full of low priority, high priority arrives"),
    "B": _waited("76 blocks free, high needs 100, four low hold 21 each"),
    "C": _waited("high short behind a started low 16k prefill, budget 512"),
    "D": _waited("head needs 60 blocks, 52 free; ten 1-block requests behind it"),
    "E": _waited("low priority first, then high priority without end; ageing after 200 steps", 220),
    "F": _crowd(100, 1800, 0.01),
    "F, 300%": _crowd(300, 1321, 0.30),
    "G": _Case(
        "a step that preempts, and a better one waits",
        lambda figures: "admits it" if figures["admits"] else "admits nobody",
        "admits it",
        lambda ours, _: bool(ours["admits"]),
    ),
    "H": _Case(
        "a storm: of 1,024 that run, 448 are preempted in one step",
        lambda figures: _told_us(figures["us"]),
        "the peer's",
        lambda ours, vllm: ours["num_preempted"] == 448 and ours["us"] < vllm["us"],
    ),
    "I": _Case(
        "abort one of 100,000 that wait, by priority",
        lambda figures: _told_us(figures["us"]),
        "the peer's",
        lambda ours, vllm: ours["us"] < vllm["us"],
    ),
    "K": _constant("5,000 (1,000) wait for blocks, each plan", "few_us", "many_us"),
    "K, parked": _constant(
        "5,000 (1,000) may not run yet (parked; vLLM: no grammar yet), each plan", "few_us", "many_us"
    ),
    "L": _constant(
        "a prompt of 32k (16k), cached but for 1,600 tokens, waits for blocks, each plan",
        "half_us",
        "whole_us",
    ),
    "N": _Case(
        "a victim is chosen while one has 11 of 12 outputs, every policy",
        _told_victims,
        "never",
        lambda ours, _: not ours["num_late"] and bool(ours["num_preempted"]),
    ),
}


def _scripted(sizes: Sizes) -> ScriptedCore:
    core = Core(
        num_blocks=sizes.num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.token_budget,
        max_model_len=sizes.max_model_len,
        vocab_size=_VOCAB_SIZE,
        depth=1,
        scheduling_policy=sizes.policy,
        admission=sizes.admission,
        peak_percent=sizes.peak_percent,
        ageing_steps=sizes.ageing_steps,
        enable_prefix_caching=sizes.enable_prefix_caching,
    )
    return ScriptedCore(core)


NORIA_SIDE = Side(_POLICIES, _scripted)


def _case_own() -> CaseRow:
    """1,000 requests in the order that a function gives, on one seat."""
    core = _scripted(Sizes(64, 1, 2048, policy="own")).core
    scripted = ScriptedCore(core, lambda requests: requests.num_prompt_tokens)
    rng = np.random.default_rng(0)
    lengths = {scripted.submit(int(num), 1): int(num) for num in rng.integers(1, 900, 1000)}
    admitted: list[int] = []
    while (step := scripted.step()) is not None:
        admitted += step.admitted
    assert scripted.policy is not None
    order = [lengths[handle] for handle in admitted]
    is_met = order == sorted(order) and scripted.policy.cost.num_requests == 1000
    return CaseRow(
        "own",
        "1,000 requests in the order of a Python function",
        "has none",
        f"{'in order' if is_met else 'not in order'}; {scripted.policy.cost}",
        "in order, each asked about once",
        is_met,
    )


def run_cases(
    vllm: Mapping[str, Figures] = VLLM_FIGURES, on_progress: Callable[[str], None] = lambda _text: None
) -> list[CaseRow]:
    """Runs every case.

    Args:
        vllm: its figures, by script.
        on_progress: told the case that comes next.
    """
    rows: list[CaseRow] = []
    for script, case in _CASES.items():
        on_progress(f"case {script}")
        ours, theirs = SCRIPTS[script](NORIA_SIDE), vllm[script]
        letter = script.split(",")[0]
        met = case.is_met(ours, theirs)
        rows.append(CaseRow(letter, case.what, case.told(theirs), case.told(ours), case.bar, met))
    on_progress("a policy of one's own")
    return [*rows, _case_own()]
