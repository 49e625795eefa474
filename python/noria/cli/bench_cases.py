"""`noria bench cases`: what the scheduler does where others go wrong, with a peer's figures beside."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

    from noria.bench.cases import CaseRow

EXAMPLES = """Examples:

  noria bench cases
"""


def cases() -> None:
    """Cases in which a scheduler under pressure goes wrong, counted in steps, beside vLLM's stored figures.

    No model runs: each case is a script of requests whose lengths are known. It takes seconds, and ends with
    status 1 if a bar is not met.
    """
    from rich.console import Console

    from noria.bench.cases import VLLM_SOURCE, run_cases

    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 160)
    rows = run_cases()
    console.print(_table(rows))
    console.print(f"vLLM's side is stored: {VLLM_SOURCE}.")
    missed = [row.case for row in rows if not row.is_met]
    if missed:
        console.print(f"Not met: {', '.join(missed)}.")
        raise SystemExit(1)


def _table(rows: "list[CaseRow]") -> "Table":
    from rich.table import Table

    table = Table(title="Cases, each against its bar")
    for name in ("", "case", "vLLM (stored)", "noria", "bar", "met"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(row.case, row.what, row.vllm, row.noria, row.bar, "yes" if row.is_met else "NO")
    return table
