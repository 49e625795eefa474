"""Cases that a scheduler under pressure gets right or wrong, with vLLM's stored figures beside.

Each case is a fresh core at depth 1 under the engine's default admission, ageing and bypasses, and a script.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter_ns

import numpy as np

from noria import _core
from noria._core import Core
from noria.bench.scripted import ScriptedCore
from noria.errors import NoriaError

VLLM_SOURCE = "vLLM 0.32 (CPU), its default scheduler on the same inputs, AMD EPYC with AVX512, 2 cores"
_BLOCK_SIZE = 16
_VOCAB_SIZE = 2**31 - 1
_MOST_STEPS = 5_000


@dataclass(frozen=True, slots=True)
class CaseRow:
    """One case.

    Attributes:
        case: its letter.
        what: its input, in words.
        vllm: what vLLM does, as stored.
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


def _core_of(
    num_blocks: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    *,
    policy: str = "priority",
    admission: str = "peak",
    peak_percent: int = 100,
    ageing_steps: int = 1024,
    enable_prefix_caching: bool = True,
) -> Core:
    return Core(
        num_blocks=num_blocks,
        block_size=_BLOCK_SIZE,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=min(num_blocks * _BLOCK_SIZE, 65_536),
        vocab_size=_VOCAB_SIZE,
        depth=1,
        scheduling_policy=policy,
        admission=admission,
        peak_percent=peak_percent,
        ageing_steps=ageing_steps,
        enable_prefix_caching=enable_prefix_caching,
    )


def _steps_until(scripted: ScriptedCore, handle: int, before: Callable[[], None] = lambda: None) -> int:
    """Steps until `handle` gets tokens; 0: in the next one."""
    for waited in range(_MOST_STEPS):
        before()
        step = scripted.step()
        if step is None:
            break
        if handle in step.handles:
            return waited
    raise NoriaError(f"a request got no tokens in {_MOST_STEPS} steps")


def _waited(case: str, what: str, vllm: int, waited: int, most: int) -> CaseRow:
    noria = "runs in the next step" if waited == 0 else f"waits {waited} steps"
    bar = "the next step" if most == 0 else f"{most} steps"
    return CaseRow(case, what, f"waits {vllm} steps", noria, bar, waited <= most)


def _case_a() -> CaseRow:
    scripted = ScriptedCore(_core_of(1024, 4, 2048))
    for _ in range(4):
        scripted.submit(64, 300, priority=5)
    scripted.step()
    waited = _steps_until(scripted, scripted.submit(64, 16, priority=0))
    return _waited("A", "4 seats full of low priority, high priority arrives", 296, waited, 0)


def _case_b() -> CaseRow:
    scripted = ScriptedCore(_core_of(160, 8, 4096))
    for _ in range(4):
        scripted.submit(330, 300, priority=5)
    scripted.step()
    waited = _steps_until(scripted, scripted.submit(1600, 16, priority=0))
    return _waited("B", "76 blocks free, high needs 100, four low hold 21 each", 318, waited, 0)


def _case_c() -> CaseRow:
    scripted = ScriptedCore(_core_of(2048, 8, 512))
    scripted.submit(16_000, 16, priority=5)
    scripted.step()
    waited = _steps_until(scripted, scripted.submit(100, 16, priority=0))
    return _waited("C", "high short behind a started low 16k prefill, budget 512", 32, waited, 0)


def _case_d() -> CaseRow:
    scripted = ScriptedCore(_core_of(160, 32, 4096))
    scripted.submit(1720, 160)
    scripted.step()
    scripted.submit(952, 8)
    small = [scripted.submit(8, 8) for _ in range(10)]
    waited = _steps_until(scripted, small[-1])
    what = "head needs 60 blocks, 52 free; ten 1-block requests behind it"
    return _waited("D", what, 199, waited, 0)


def _case_e() -> CaseRow:
    scripted = ScriptedCore(_core_of(1024, 4, 64, ageing_steps=200))
    for _ in range(4):
        scripted.submit(16, 20)
    scripted.step()
    low = scripted.submit(16, 8, priority=5)

    def keep_busy() -> None:
        while scripted.core.num_waiting < 5:
            scripted.submit(16, 20)

    waited = _steps_until(scripted, low, keep_busy)
    return CaseRow(
        "E",
        "low priority first, then high priority without end; ageing after 200 steps",
        "never runs in 3000 steps",
        f"waits {waited} steps",
        "220 steps",
        waited <= 220,
    )


def _crowd(percent: int) -> tuple[int, float]:
    """Steps, and tokens computed again by those that had to be."""
    scripted = ScriptedCore(_core_of(16 * 36, 64, 2048, policy="fcfs", peak_percent=percent))
    for _ in range(64):
        scripted.submit(64, 512)
    scripted.drain()
    needed = 64 * (64 + 512 - 1)
    return scripted.num_steps, scripted.num_computed_tokens / needed - 1


def _case_f() -> list[CaseRow]:
    what = "64 requests (64 in, 512 out), room for 16"
    vllm = "1321 steps, +55% computed again"
    rows = []
    for percent, most_steps, most_again in ((100, 1800, 0.01), (300, 1321, 0.30)):
        steps, again = _crowd(percent)
        rows.append(
            CaseRow(
                "F",
                f"{what}; peak_percent {percent}",
                vllm,
                f"{steps} steps, +{again:.1%} computed again",
                f"{most_steps} steps, +{most_again:.0%}",
                steps <= most_steps and again <= most_again,
            )
        )
    return rows


def _case_g() -> CaseRow:
    scripted = ScriptedCore(_core_of(40, 8, 64, admission="optimistic"))
    for _ in range(8):
        scripted.submit(60, 100, priority=5)
    admits = False
    while scripted.core.num_free_blocks + scripted.core.num_cached_blocks > 0:
        scripted.step()
    urgent = scripted.submit(8, 4, priority=0)
    step = scripted.step()
    if step is not None and step.preempted:
        admits = urgent in step.admitted
    return CaseRow(
        "G",
        "a step that preempts, and a better one waits",
        "admits nobody",
        "admits it" if admits else "admits nobody",
        "admits it",
        admits,
    )


def _case_n() -> CaseRow:
    num_late = num_preempted = 0
    for policy in ("fcfs", "priority", "sjf", "deadline", "fair", "prefix"):
        for num_prompt in range(17, 49):
            blocks = 20 + -(-(num_prompt + 10) // _BLOCK_SIZE)
            core = _core_of(
                blocks, 8, 512, policy=policy, admission="optimistic", enable_prefix_caching=False
            )
            scripted = ScriptedCore(core)
            for _ in range(5):
                scripted.submit(54, 60)
            ending = scripted.submit(num_prompt, 12)
            num_output = 0
            while ending not in scripted.finished_us:
                step = scripted.step()
                if step is None:
                    break
                num_late += ending in step.preempted and num_output >= 11
                num_preempted += len(step.preempted)
                num_output += int((step.handles == ending).sum())
    is_met = num_late == 0 and num_preempted > 0
    return CaseRow(
        "N",
        "a victim is chosen while one has 11 of 12 outputs, six policies",
        "evicted that one",
        f"never, of {num_preempted} victims" if num_late == 0 else f"evicted it {num_late} times",
        "never",
        is_met,
    )


def _median_us(times_ns: list[int]) -> float:
    return median(times_ns) / 1e3


def _case_h() -> CaseRow:
    scripted = ScriptedCore(_core_of(1024 * 8, 1024, 1024 * 9))
    for _ in range(1024):
        scripted.submit(8, 112, priority=5)
    for _ in range(3):
        scripted.step()
    for _ in range(448):
        scripted.submit(16, 8, priority=0)
    started = perf_counter_ns()
    step = scripted.step()
    storm_us = (perf_counter_ns() - started) / 1e3
    num_preempted = 0 if step is None else len(step.preempted)
    return CaseRow(
        "H",
        f"priority storm: {num_preempted} of 1,024 preempted in a step",
        "68–72 ms",
        f"{storm_us / 1e3:.1f} ms, plan, script and commit",
        "the peer's",
        num_preempted == 448 and storm_us < 68_000,
    )


def _case_i() -> CaseRow:
    scripted = ScriptedCore(_core_of(1024, 4, 2048))
    handles = [scripted.submit(8, 8) for _ in range(100_000)]
    times = []
    for handle in handles[50_000:50_101]:
        started = perf_counter_ns()
        scripted.core.finish(handle, 0, _core.ABORT, 0)
        times.append(perf_counter_ns() - started)
    cost = _median_us(times)
    return CaseRow(
        "I", "abort one of 100,000 waiting", "55 ms", f"{cost:.1f} µs", "the peer's", cost < 55_000
    )


def _blocked(num_waiting: int, num_prompt: int) -> float:
    """Microseconds of a plan while `num_waiting` requests wait for blocks; median."""
    scripted = ScriptedCore(_core_of(2200, 64, 40_000))
    scripted.submit(34_000, 1000)
    scripted.step()
    for _ in range(num_waiting):
        scripted.submit(num_prompt, 2000)
    return _plan_us(scripted)


def _plan_us(scripted: ScriptedCore) -> float:
    """Microseconds of a plan in which one decodes and nobody else can run; median."""
    buffer = np.zeros(scripted.core.layout.size, dtype=np.int32)
    times = []
    for _ in range(50):
        started = perf_counter_ns()
        plan = scripted.core.plan(0, buffer)
        times.append(perf_counter_ns() - started)
        scripted.core.commit(plan.step, np.ones(1, np.int32), np.full(1, 7, np.int32), 0, 0)
    return _median_us(times)


def _case_k() -> CaseRow:
    few, many = _blocked(1000, 2000), _blocked(5000, 2000)
    return CaseRow(
        "K",
        "1,000 (5,000) blocked waiters, each plan",
        "1.4–2 ms",
        f"{few:.1f} µs ({many:.1f} µs)",
        "constant",
        many < 3 * few and few < 1400,
    )


def _cached_head(num_tokens: int) -> float:
    """Microseconds of a plan while a cached prompt of `num_tokens` waits for blocks; median."""
    scripted = ScriptedCore(_core_of(2 * num_tokens // _BLOCK_SIZE + 70, 64, num_tokens, policy="fcfs"))
    scripted.submit(num_tokens, 1, name=1)
    scripted.step()
    scripted.submit(num_tokens, 1000)
    scripted.step()
    scripted.submit(num_tokens, 2000, name=1)
    return _plan_us(scripted)


def _case_l() -> CaseRow:
    half, whole = _cached_head(16_384), _cached_head(32_768)
    return CaseRow(
        "L",
        "an inadmissible head with a 32k (16k) cached prompt, each plan",
        "1 ms: its lookup is repeated",
        f"{whole:.1f} µs ({half:.1f} µs)",
        "constant",
        whole < 3 * half and whole < 1000,
    )


def _case_own() -> CaseRow:
    """1,000 requests in the order that a function gives, on one seat."""
    core = _core_of(64, 1, 2048, policy="own")
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
        "not measured",
        f"{'in order' if is_met else 'not in order'}; {scripted.policy.cost}",
        "in order, each asked about once",
        is_met,
    )


def run_cases(on_progress: Callable[[str], None] | None = None) -> list[CaseRow]:
    """Runs every case.

    Args:
        on_progress: told the case that comes next.
    """
    tell = on_progress or (lambda _text: None)
    rows: list[CaseRow] = []
    cases: tuple[tuple[str, Callable[[], CaseRow | list[CaseRow]]], ...] = (
        ("A", _case_a),
        ("B", _case_b),
        ("C", _case_c),
        ("D", _case_d),
        ("E", _case_e),
        ("F", _case_f),
        ("G", _case_g),
        ("H", _case_h),
        ("I", _case_i),
        ("K", _case_k),
        ("L", _case_l),
        ("N", _case_n),
        ("own", _case_own),
    )
    for name, case in cases:
        tell(f"case {name}")
        result = case()
        rows.extend(result if isinstance(result, list) else [result])
    return rows
