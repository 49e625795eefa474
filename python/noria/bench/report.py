"""Tables for people and JSON for programs, from the same results."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from noria.bench.lengths import longest_over_mean, longest_over_mean_in_order
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from noria.bench.limit import Limit
    from noria.bench.machine import Machine, TorchFacts
    from noria.bench.scheduler import SchedulerRow
    from noria.bench.throughput import ThroughputRun
    from noria.bench.workload import Workload
    from noria.config import EngineConfig

STDOUT = Path("-")
"""As an output file: standard output."""


def check_writable(path: Path) -> None:
    """Refuses an output file that cannot be written, before anything is measured.

    Raises:
        ConfigError: its folder is missing, it is a folder, or it may not be written.
    """
    if path == STDOUT:
        return
    if str(path).startswith("-"):
        raise ConfigError(
            f"output file {path} looks like a flag; write ./{path} if it is one",
            name="output_json",
            value=str(path),
        )
    if path.is_dir():
        raise ConfigError(f"output file {path} is a folder", name="output_json", value=str(path))
    if not path.parent.is_dir():
        raise ConfigError(
            f"output file {path}: folder {path.parent} does not exist", name="output_json", value=str(path)
        )
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise ConfigError(
            f"output file {path} cannot be written: {error.strerror}", name="output_json", value=str(path)
        ) from None
    if not existed:
        path.unlink()


def write_json(path: Path, report: Mapping[str, object]) -> None:
    """Writes a report; dataclasses become objects."""
    text = json.dumps(report, indent=2, default=_plain) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        path.write_text(text, encoding="utf-8")


def throughput_report(
    runs: Sequence["ThroughputRun"],
    *,
    machine: "Machine",
    torch_used: "TorchFacts",
    workload: "Workload",
    about: Mapping[str, object],
    configs: Sequence["EngineConfig"],
    limit: "Limit | None",
) -> dict[str, object]:
    """All that `bench throughput` measured.

    With one batching, the fields of its median run stand at the top level too.
    """
    seats = configs[0].max_num_seqs
    names = list(dict.fromkeys(run.batching for run in runs))
    report: dict[str, object] = {
        "command": "bench throughput",
        "machine": machine,
        "torch": torch_used,
        **about,
        "workload": {
            "source": workload.source,
            "num_requests": len(workload.requests),
            "num_prompt_tokens": int(workload.prompt_lengths.sum()),
            "num_output_tokens": int(workload.output_lengths.sum()),
            "longest_over_mean": longest_over_mean(workload.output_lengths, seats),
            "longest_over_mean_in_order": longest_over_mean_in_order(workload.output_lengths, seats),
        },
        "config": configs[0],
        "limit": limit,
        "runs": runs,
        "tokens_per_s": {name: _spread([run for run in runs if run.batching == name]) for name in names},
    }
    if len(names) == 1:
        report.update(dataclasses.asdict(_median_run(runs)))
    return report


def _spread(runs: Sequence["ThroughputRun"]) -> dict[str, float]:
    rates = [run.output_tokens_per_s for run in runs]
    return {"median": median(rates), "min": min(rates), "max": max(rates)}


def _median_run(runs: Sequence["ThroughputRun"]) -> "ThroughputRun":
    """The run whose tokens a second are in the middle (of an even number, the slower one)."""
    return sorted(runs, key=lambda run: run.output_tokens_per_s)[(len(runs) - 1) // 2]


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")


def machine_line(machine: "Machine", *, torch_version: str | None, num_threads: int | None) -> str:
    """One line to stand above every figure."""
    parts = [f"{machine.cpu_model}, {machine.num_usable_cpus:g} cores ({machine.isa_summary})"]
    if torch_version is not None:
        parts.append(f"torch {torch_version}")
    if num_threads is not None:
        parts.append(f"{num_threads} threads")
    return ", ".join(parts)


def format_bytes(num_bytes: float) -> str:
    """Bytes in the largest binary unit that leaves a number of 1 or more."""
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} GiB"


def format_spread(values: Sequence[float], digits: int = 1) -> str:
    """The median, and the range where there is more than one value."""
    middle = median(values)
    if len(values) < 2:
        return f"{middle:.{digits}f}"
    return f"{middle:.{digits}f} [{min(values):.{digits}f}-{max(values):.{digits}f}]"


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def scheduler_table(rows: Sequence["SchedulerRow"]) -> "Table":
    """Cost by size, the stored peer beside it."""
    from rich.table import Table

    from noria.bench.scheduler import VERBS

    table = Table(title="Decision core across the Python boundary, steady decode", title_justify="left")
    headings = ("running", "ns / sequence", "us / step", *VERBS, "vLLM us / step", "times cheaper")
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        spread = f"{row.ns_per_sequence:.0f} [{row.ns_per_sequence_min:.0f}-{row.ns_per_sequence_max:.0f}]"
        peer = "-" if row.vllm_us_per_step is None else f"{row.vllm_us_per_step:.0f}"
        ratio = "-" if row.times_cheaper_than_vllm is None else f"{row.times_cheaper_than_vllm:.0f} x"
        verbs = (f"{row.us_by_verb[verb]:.1f}" for verb in VERBS)
        table.add_row(str(row.running), spread, f"{row.us_per_step:.1f}", *verbs, peer, ratio)
    return table


def throughput_table(runs: Sequence["ThroughputRun"], *, title: str) -> "Table":
    """The batchings side by side: one column each, medians over the repeats."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("")
    names = list(dict.fromkeys(run.batching for run in runs))
    groups = [[run for run in runs if run.batching == name] for name in names]
    for name in names:
        table.add_column(name, justify="right")

    def row(label: str, cells: Sequence[str]) -> None:
        table.add_row(label, *cells)

    first = [group[0] for group in groups]
    row("output tokens / s", [format_spread([run.output_tokens_per_s for run in group]) for group in groups])
    row("wall time, s", [format_spread([run.wall_s for run in group], 2) for group in groups])
    row("decode steps", [str(run.num_decode_steps) for run in first])
    row("rows computed", [str(run.num_rows_computed) for run in first])
    row("rows useful", [f"{run.num_rows_useful} ({run.useful_share:.0%})" for run in first])
    row("  of a prompt's first chunks", [str(run.num_chunk_rows) for run in first])
    row("ghost rows", [str(run.num_ghost_rows) for run in first])
    row("padding rows", [str(run.num_padding_rows) for run in first])
    row("padding tokens", [str(run.num_padding_tokens) for run in first])
    row("seat occupancy", [f"{run.seat_occupancy:.1%}" for run in first])
    row("preemptions", [str(run.num_preemptions) for run in first])
    for label, name in (
        ("first token", "ttft_ms"),
        ("between tokens", "inter_token_ms"),
        ("whole request", "e2e_ms"),
    ):
        cells = []
        for group in groups:
            values = [getattr(run, name) for run in group]
            middle, high = median([v.p50 for v in values]), median([v.p95 for v in values])
            cells.append(f"{_three_digits(middle)} / {_three_digits(high)}")
        row(f"{label}, ms, p50 / p95", cells)
    row("runner idle", [f"{median([run.runner_idle_share for run in group]):.1%}" for group in groups])
    stages = [_stages(run) for run in first]
    for label in stages[0]:
        parts = [seconds[label] / run.wall_s for seconds, run in zip(stages, first, strict=True)]
        row(f"time in {label}", [f"{part:.1%}" for part in parts])
    if runs[0].limit_share is not None:
        shares = [[run.limit_share for run in group if run.limit_share is not None] for group in groups]
        row("of this machine's limit", [f"{median(group):.1%}" for group in shares])
    return table


def _stages(run: "ThroughputRun") -> dict[str, float]:
    """Seconds by stage, in the order of a step; the forward in parts, where they are known."""
    parts = {"products": 0.0, "attention": 0.0, "small ops": 0.0}
    for name, seconds in run.forward_s.items():
        is_product = name.startswith(("head", "linear"))
        kind = "products" if is_product else "attention" if name == "attention" else "small ops"
        parts[kind] += seconds
    whole = run.stage_s["forward"]
    rest = whole - sum(run.forward_s.values())
    forward = parts | {"forward, in Python": rest} if run.forward_s else {"forward": whole}
    before = {name: run.stage_s[name] for name in ("plan", "expand")}
    behind = {name: run.stage_s[name] for name in ("sample", "commit", "text")}
    return before | forward | behind


def _three_digits(value: float) -> str:
    """A number of 100 or more as an integer, a smaller one with three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
