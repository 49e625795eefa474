"""`noria bench cases`: what the scheduler does where others go wrong, with a peer's figures beside."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import resolve_model
from noria.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console
    from rich.table import Table

    from noria.bench.cases import CaseRow
    from noria.bench.peers.case_scripts import Figures
    from noria.bench.trace_cases import Trace

EXAMPLES = """Examples:

  noria bench cases
  noria bench cases --model smollm2
  noria bench cases --trace AzureLLMInferenceTrace_conv.csv
  NORIA_PEERS=vllm=/opt/vllm/bin/python noria bench cases
"""


def cases(
    *,
    trace: Annotated[
        Path | None,
        Parameter(help="A CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens, run too."),
    ] = None,
    num_requests: Annotated[
        int, Parameter(help="Of the trace, the first ones, all at once; it arrives whole.")
    ] = 4000,
    model: Annotated[
        str | None, Parameter(help="Runs cases A to D with this model too, through LLM: a path, or smollm2.")
    ] = None,
) -> None:
    """Cases in which a scheduler under pressure goes wrong, beside what vLLM's does.

    Where NORIA_PEERS names vLLM's environment (vllm=/its/python), its own scheduler runs the same scripts
    there, in a minute or two; else its figures are stored ones, and the table says so. No model runs unless
    one is named: each case is a script of requests whose lengths are known. Ends with status 1 if a bar is
    not met.
    """
    from rich.console import Console

    from noria.bench.cases import run_cases

    # Its errors need not wait for the cases.
    read = None if trace is None else _read_trace(trace, num_requests)
    path = None if model is None else resolve_model(model)
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    with Console(stderr=True, highlight=False, markup=False).status("") as status:
        peer = _vllm(status.update)
        rows = run_cases(peer.figures, status.update)
        if path is not None:
            from noria.bench.live_cases import live_cases, run_live_cases

            rows += run_live_cases(path, live_cases(peer.figures), status.update)
    console.print(_table(rows, peer))
    console.print(peer.source)
    if trace is not None and read is not None:
        _run_trace(console, trace, read)
    missed = [row.case for row in rows if not row.is_met]
    if missed:
        console.print(f"Not met: {', '.join(missed)}.")
        raise SystemExit(1)


@dataclass(frozen=True, slots=True)
class _Peer:
    """vLLM's side: the head of its column, its figures by script, and where they are from."""

    head: str
    figures: "Mapping[str, Figures]"
    source: str


def _vllm(tell: "Callable[[str], None]") -> _Peer:
    """Measured, where its environment is named; else stored."""
    from noria.bench.cases import VLLM_FIGURES, VLLM_SOURCE
    from noria.bench.machine import detect_machine
    from noria.bench.peers import VARIABLE, read_environments
    from noria.bench.peers.scheduler import measure_vllm
    from noria.bench.report import machine_line

    python = read_environments().get("vllm")
    if python is None:
        source = f"vLLM's side is stored: {VLLM_SOURCE}. {VARIABLE}=vllm=PYTHON measures it here."
        return _Peer("vLLM (stored)", VLLM_FIGURES, source)
    measured = measure_vllm(python, tell)
    machine = detect_machine()
    source = (
        f"vLLM's side was measured just now: {measured.about}, its default scheduler on the same scripts. "
        f"Both ran on {machine_line(machine, torch_version=None, num_threads=None)}."
    )
    return _Peer(f"{measured.about} (measured here)", measured.figures, source)


def _read_trace(path: Path, num_requests: int) -> "Trace":
    from noria.bench.trace_cases import read_trace

    if num_requests < 1:
        raise ConfigError(
            f"--num-requests is {num_requests}; it must be 1 or more",
            name="--num-requests",
            value=num_requests,
        )
    return read_trace(path, num_requests)


def _run_trace(console: "Console", path: Path, read: "Trace") -> None:
    from rich.table import Table

    from noria.bench.trace_cases import MOST_REQUESTS, NUM_SEATS, read_trace, run_admissions, run_orders

    admissions = run_admissions(read)
    table = Table(title=f"{len(read.lengths)} requests at once, 65,536 KV tokens, max_tokens 2,048")
    for name in (
        "admission",
        "steps",
        "output tokens a step",
        "of optimistic",
        "computed again",
        "preemptions",
    ):
        table.add_column(name)
    best = admissions[0].useful_tokens_per_step
    for run in admissions:
        table.add_row(
            run.admission,
            str(run.num_steps),
            f"{run.useful_tokens_per_step:.2f}",
            f"{run.useful_tokens_per_step / best:.1%}",
            f"{run.recomputed_share:.2%}",
            str(run.num_preempted),
        )
    console.print(table)
    table = Table(
        title="The whole trace at 90% of what 65,536 KV tokens serve, its peaks kept; hints off by a "
        "lognormal error, sigma 0.5"
    )
    for name in ("policy", "ageing", "mean latency, steps", "of fcfs", "longest, steps"):
        table.add_column(name)
    orders = run_orders(read_trace(path, MOST_REQUESTS), num_seats=NUM_SEATS)
    for order in orders:
        table.add_row(
            order.policy,
            str(order.ageing_steps or "off"),
            f"{order.mean_latency_steps:.0f}",
            f"{order.mean_latency_steps / orders[0].mean_latency_steps:.2f}",
            f"{order.longest_latency_steps:.0f}",
        )
    console.print(table)


def _table(rows: "list[CaseRow]", peer: _Peer) -> "Table":
    from rich.table import Table

    table = Table(title="Cases, each against its bar")
    for name in ("", "case", peer.head, "noria", "bar", "met"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.case, row.what, row.vllm, row.noria, row.bar, "yes" if row.is_met else "NO")
    return table
