"""Cases A to D through `LLM` and a model: the flags are the defaults, but for a case's sizes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from noria import LLM, SamplingParams, _core
from noria.bench.cases import CaseRow, told_wait
from noria.bench.peers.case_scripts import PRESSURES, Ask, Figures, Pressure
from noria.errors import NoriaError
from noria.runner.base import SeatInit

_MOST_TURNS = 400
_STEP = _core.RECORD_FIELDS.index("step")


@dataclass(frozen=True, slots=True)
class LiveCase:
    """A case that a model runs.

    Attributes:
        case: its letter.
        what: its input, in words.
        pressure: the same as tokens.
        vllm: what its scheduler does on it, in words.
    """

    case: str
    what: str
    pressure: Pressure
    vllm: str


def live_cases(vllm: Mapping[str, Figures]) -> list[LiveCase]:
    """Cases A to D at the sizes of the scripts, but for C: half of its prompt fits SmolLM2's context.

    Args:
        vllm: its figures, by script.
    """
    what = {
        "A": "4 seats full of low priority, high priority arrives",
        "B": "76 blocks free, high needs 100, four low hold 21 each",
        "C, half": "high short behind a started low 8k prefill, budget 512",
        "D": "head needs 60 blocks, 52 free; ten 1-block requests behind it",
    }
    return [
        LiveCase(script[0], words, PRESSURES[script], told_wait(vllm[script]))
        for script, words in what.items()
    ]


def run_live_cases(
    model: Path, cases: Sequence[LiveCase], tell: Callable[[str], None] = lambda _text: None
) -> list[CaseRow]:
    """Runs each case until the one that it is about has entered.

    A request that comes while a step is in flight can enter the one behind it at the earliest; that one is 0
    steps of waiting.

    Args:
        model: its folder or file.
        cases: of `live_cases`, or smaller ones.
        tell: told the case that comes next.

    Raises:
        NoriaError: the one that a case is about did not enter in 400 turns.
    """
    rows = []
    for case in cases:
        tell(f"case {case.case} with a model")
        sizes, asks = case.pressure.sizes, (*case.pressure.first, *case.pressure.then)
        with LLM(
            model,
            scheduling_policy=sizes.policy,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.token_budget,
            num_kv_blocks=sizes.num_blocks,
            max_model_len=max(ask.num_prompt + ask.max_tokens for ask in asks),
        ) as llm:
            waited, num_preemptions = _run(llm, case)
        noria = told_wait({"waited": waited, "ran": 1})
        rows.append(
            CaseRow(
                case.case,
                f"{case.what} (a real model)",
                case.vllm,
                f"{noria}, {num_preemptions} preempted",
                "the next step",
                waited == 0,
            )
        )
    return rows


def _run(llm: LLM, case: LiveCase) -> tuple[int, int]:
    """Steps that the last to come waited, and preemptions."""
    engine, core = llm.engine, llm.engine.core
    rng = np.random.default_rng(0)
    vocab_size = llm.model.config.vocab_size

    def submit(ask: Ask) -> int:
        prompt = rng.integers(0, vocab_size, ask.num_prompt)
        params = SamplingParams(max_tokens=ask.max_tokens, temperature=0)
        init = SeatInit(params, 0, ask.num_prompt)
        return engine.submit(prompt, init, ask.max_tokens, priority=ask.priority)

    handles = [submit(ask) for ask in case.pressure.first]
    told: list[npt.NDArray[np.int64]] = []

    def turn() -> None:
        events = engine.turn()
        if events is not None:
            told.append(events.rows)

    # The first are in, and as many steps are in flight as there are in a stream of them.
    while core.num_waiting or not core.num_in_flight or not len(core.records()):
        turn()
    handles += [submit(ask) for ask in case.pressure.then]
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
