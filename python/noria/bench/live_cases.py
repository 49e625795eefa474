"""Cases A to D through `LLM` and a model: the flags are the defaults, but for a case's sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria import LLM, SamplingParams, _core
from noria.bench.cases import CaseRow
from noria.errors import NoriaError
from noria.runner.base import SeatInit

_MOST_TURNS = 400
_STEP = _core.RECORD_FIELDS.index("step")


@dataclass(frozen=True, slots=True)
class _Pressure:
    """A case's sizes, and who comes.

    Attributes:
        case: its letter.
        what: its input, in words.
        vllm: what vLLM does at these or larger sizes, as stored.
        policy: `scheduling_policy`; `fcfs` is the default.
        num_blocks: of the KV cache.
        max_num_seqs: seats.
        token_budget: of a step.
        first: prompt and output tokens, and priority, of those that run when the others come.
        then: of the others; it is the last of them that is waited for.
        most_steps: that it may wait.
    """

    case: str
    what: str
    vllm: str
    policy: str
    num_blocks: int
    max_num_seqs: int
    token_budget: int
    first: tuple[tuple[int, int, int], ...]
    then: tuple[tuple[int, int, int], ...]
    most_steps: int


_CASES = (
    _Pressure(
        "A",
        "4 seats full of low priority, high priority arrives",
        "waits 296 steps",
        "priority",
        128,
        4,
        2048,
        ((64, 300, 5),) * 4,
        ((64, 16, 0),),
        0,
    ),
    _Pressure(
        "B",
        "19 blocks free, high needs 25, four low hold 5 each",
        "waits 318 steps, of 4 times the sizes",
        "priority",
        39,
        8,
        2048,
        ((70, 75, 5),) * 4,
        ((400, 4, 0),),
        0,
    ),
    _Pressure(
        "C",
        "high short behind a started low prefill of 16 steps",
        "waits 32 steps, as long as the prefill",
        "priority",
        128,
        8,
        32,
        ((500, 16, 5),),
        ((20, 4, 0),),
        0,
    ),
    _Pressure(
        "D",
        "head needs 15 blocks, 13 free; ten 1-block requests behind it",
        "wait 199 steps, of 4 times the sizes",
        "fcfs",
        40,
        32,
        2048,
        ((430, 40, 0),),
        ((238, 2, 0),) + ((8, 8, 0),) * 10,
        0,
    ),
)


def run_live_cases(model: Path, tell: Callable[[str], None] = lambda _text: None) -> list[CaseRow]:
    """Runs each case until the one that it is about has entered.

    A request that comes while a step is in flight can enter the one behind it at the earliest; that one is 0
    steps of waiting.

    Args:
        model: its folder or file.
        tell: told the case that comes next.

    Raises:
        NoriaError: the one that a case is about did not enter in 400 turns.
    """
    rows = []
    for case in _CASES:
        tell(f"case {case.case} with a model")
        with LLM(
            model,
            scheduling_policy=case.policy,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.token_budget,
            num_kv_blocks=case.num_blocks,
            max_model_len=min(2048, 16 * case.num_blocks),
        ) as llm:
            waited, num_preemptions = _run(llm, case)
        noria = "runs in the next step" if waited == 0 else f"waits {waited} steps"
        rows.append(
            CaseRow(
                case.case,
                f"{case.what} (a real model)",
                case.vllm,
                f"{noria}, {num_preemptions} preempted",
                "the next step",
                waited <= case.most_steps,
            )
        )
    return rows


def _run(llm: LLM, case: _Pressure) -> tuple[int, int]:
    """Steps that the last of `case.then` waited, and preemptions."""
    engine, core = llm.engine, llm.engine.core
    rng = np.random.default_rng(0)
    vocab_size = llm.model.config.vocab_size

    def submit(num_prompt: int, max_tokens: int, priority: int) -> int:
        prompt = rng.integers(0, vocab_size, num_prompt)
        init = SeatInit(SamplingParams(max_tokens=max_tokens, temperature=0), 0, num_prompt)
        return engine.submit(prompt, init, max_tokens, priority=priority)

    handles = [submit(*sizes) for sizes in case.first]
    told: list[npt.NDArray[np.int64]] = []

    def turn() -> None:
        events = engine.turn()
        if events is not None:
            told.append(events.rows)

    # The first are in, and as many steps are in flight as there are in a stream of them.
    while core.num_waiting or not core.num_in_flight or not len(core.records()):
        turn()
    handles += [submit(*sizes) for sizes in case.then]
    next_step = int(core.records()[-1, _STEP]) + core.num_in_flight + 1
    entered = None
    for _ in range(_MOST_TURNS):
        turn()
        rows = np.concatenate(told)
        mine = rows[(rows[:, 0] == handles[-1]) & (rows[:, 1] == _core.ADMITTED)]
        if len(mine):
            entered = int(mine[0, 3])
            break
    for handle in handles:
        engine.abort(handle)
    while engine.has_work:
        turn()
    if entered is None:
        raise NoriaError(f"case {case.case}: the request did not enter in {_MOST_TURNS} turns")
    return entered - next_step, int((np.concatenate(told)[:, 1] == _core.PREEMPTED).sum())
