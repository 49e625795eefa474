"""`noria bench`: what an engine and its decision core cost, with the peer or the limit beside it."""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import MODEL_HELP, EngineFlags, ModelFlags, parse_choices, parse_sizes, resolve_model
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from noria.bench.lengths import LogNormalLengths
    from noria.bench.throughput import EngineFactory, Facts, ThroughputRun
    from noria.bench.workload import Workload
    from noria.config import EngineConfig

_DEFAULT_REQUESTS = 128
_DEFAULT_VOCAB_SIZE = 49_152
_PIPE_WIDTH = 120  # where there is no terminal to ask

_OUTPUT_JSON_HELP = (
    "Write everything measured to this file; - writes it to standard output instead of tables."
)

THROUGHPUT_EXAMPLES = """Examples:

  noria bench throughput smollm2 --num-requests 64
  noria bench throughput smollm2 --batching continuous,padded --repeat 3
  noria bench throughput --null-runner --num-requests 512 --output-json x.json
"""

SCHEDULER_EXAMPLES = """Examples:

  noria bench scheduler
  noria bench scheduler --running 64,1024 --output-json scheduler.json
"""


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """What is asked: random token ids with lognormal lengths, or a file."""

    num_requests: Annotated[
        int | None,
        Parameter(
            help="Requests; of a file, the first ones. "
            f"[default: {_DEFAULT_REQUESTS}; with --workload the whole file]"
        ),
    ] = None
    workload: Annotated[
        Path | None,
        Parameter(
            help="A JSON file in place of random requests: "
            '[{"prompt_token_ids": [1, 2], "max_tokens": 8}, ...]'
        ),
    ] = None
    seed: Annotated[
        int, Parameter(help="Of the random lengths and ids; the same seed gives the same requests.")
    ] = 0
    prompt_median: Annotated[float, Parameter(help="Median prompt, tokens.")] = 64
    prompt_sigma: Annotated[
        float, Parameter(help="Spread of prompts: standard deviation of ln(length); 0 is none.")
    ] = 0.6
    prompt_min: Annotated[int, Parameter(help="Shortest prompt, tokens.")] = 16
    prompt_max: Annotated[int, Parameter(help="Longest prompt, tokens.")] = 256
    output_median: Annotated[float, Parameter(help="Median output, tokens.")] = 64
    output_sigma: Annotated[
        float, Parameter(help="Spread of outputs: standard deviation of ln(length); 0 is none.")
    ] = 0.8
    output_min: Annotated[int, Parameter(help="Shortest output, tokens.")] = 8
    output_max: Annotated[int, Parameter(help="Longest output, tokens.")] = 256


_NO_MODEL_FLAGS = ModelFlags()
_NO_ENGINE_FLAGS = EngineFlags()
_NO_WORKLOAD_FLAGS = WorkloadFlags()


def throughput(
    model: Annotated[str | None, Parameter(help=MODEL_HELP + " Not needed with --null-runner.")] = None,
    /,
    *,
    batching: Annotated[
        str,
        Parameter(
            help="continuous, padded or gang; several, separated by commas, run in turns and are compared. "
            "padded: a static batch, prompts padded, finished rows computed until the last ends. "
            "gang: the same without padding and finished rows."
        ),
    ] = "continuous",
    workload_flags: WorkloadFlags = _NO_WORKLOAD_FLAGS,
    repeat: Annotated[int, Parameter(help="Runs of each batching, in turns; more shows the spread.")] = 1,
    null_runner: Annotated[
        bool, Parameter(negative="", help="Count steps without a model: times are then the engine's alone.")
    ] = False,
    vocab_size: Annotated[
        int | None,
        Parameter(
            help="Token ids are below this; with --null-runner and no model only. "
            f"[default: {_DEFAULT_VOCAB_SIZE}]"
        ),
    ] = None,
    engine_flags: EngineFlags = _NO_ENGINE_FLAGS,
    model_flags: ModelFlags = _NO_MODEL_FLAGS,
    output_json: Annotated[Path | None, Parameter(allow_leading_hyphen=True, help=_OUTPUT_JSON_HELP)] = None,
) -> None:
    """Output tokens per second, steps, occupancy and latencies of a workload.

    All requests arrive at once; tokens are greedy and the end of sequence is ignored, so that each
    request makes the same number of tokens under every batching.
    """
    from noria.bench.throughput import run_batchings

    names = parse_choices(batching, ("continuous", "padded", "gang"), "--batching")
    _check_output(output_json)
    if model is None and not null_runner:
        raise ConfigError(
            "give a MODEL, or --null-runner to count steps without one", name="MODEL", value=None
        )
    _refuse_unused(model, null_runner, vocab_size, workload_flags, model_flags)
    size = _DEFAULT_VOCAB_SIZE if vocab_size is None else vocab_size
    loaded = _load(model, null_runner, size, workload_flags, model_flags)
    configs = [
        _engine_config(model or "null", name, engine_flags, model_flags, loaded.max_model_len)
        for name in names
    ]
    from noria.cli.progress import RunProgress

    console, progress = _console(output_json), RunProgress(len(loaded.workload.requests), repeat)
    with progress:
        runs = run_batchings(
            loaded.engines,
            configs,
            loaded.workload,
            num_repeats=repeat,
            facts=loaded.facts,
            on_run=progress.begin,
            on_events=progress.update,
        )
    _report_throughput(console, output_json, runs, loaded, configs, engine_flags)


def _refuse_unused(
    model: str | None,
    null_runner: bool,
    vocab_size: int | None,
    workload_flags: WorkloadFlags,
    model_flags: ModelFlags,
) -> None:
    """Flags that would change nothing beside others are mistakes.

    Raises:
        ConfigError: one was given; it is named.
    """
    unused: list[tuple[str, object, str]] = []
    if null_runner:
        unused += [
            (field.name, getattr(model_flags, field.name), "--null-runner computes nothing")
            for field in fields(ModelFlags)
            if field.name != "max_model_len"
        ]
    if model is not None:
        unused.append(("vocab_size", vocab_size, "MODEL has a vocabulary of its own"))
    if workload_flags.workload is not None:
        unused += [
            (field.name, getattr(workload_flags, field.name), "--workload has the requests")
            for field in fields(WorkloadFlags)
            if field.name not in ("workload", "num_requests")
            and getattr(workload_flags, field.name) != field.default
        ]
    for name, value, why in unused:
        if value not in (None, "auto"):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} is {value}; {why}: leave {flag} out", name=flag, value=value)


def scheduler(
    *,
    running: Annotated[
        str,
        Parameter(
            help="Sequences that decode at once; several, separated by commas, are measured in turns.",
            allow_leading_hyphen=True,
        ),
    ] = "64,256,1024,4096",
    steps: Annotated[int, Parameter(help="Timed steps a repeat; more steadies the figure.")] = 200,
    repeat: Annotated[int, Parameter(help="Repeats of each size; more shows the spread.")] = 5,
    seed: Annotated[int, Parameter(help="Of the random prompts and tokens.")] = 0,
    output_json: Annotated[Path | None, Parameter(allow_leading_hyphen=True, help=_OUTPUT_JSON_HELP)] = None,
) -> None:
    """Cost of the decision core in steady decode, seen from Python.

    Timed are submit, plan, commit and expansion. Depth 2, blocks of 16, prefix cache on, stop ids set;
    in each step 1% of the rows finish and are replaced by requests with 128-token prompts. No model runs.
    """
    from noria.bench import scheduler as bench
    from noria.bench.machine import detect_machine
    from noria.bench.report import machine_line, scheduler_table, write_json

    sizes = parse_sizes(running, "--running")
    _check_output(output_json)
    console, status_console = _console(output_json), _stderr_console()
    with status_console.status("") as status:
        rows = bench.run_scheduler_bench(
            sizes, num_steps=steps, num_repeats=repeat, seed=seed, on_progress=status.update
        )
    machine = detect_machine()
    console.print(machine_line(machine, torch_version=None, num_threads=None))
    console.print(
        f"depth {bench.DEPTH}, block {bench.BLOCK_SIZE}, prefix cache on, 2 stop ids, prompts of "
        f"{bench.PROMPT_TOKENS} tokens, {repeat} x {steps} steps; median [fastest-slowest repeat]",
    )
    console.print(scheduler_table(rows))
    console.print(f"Peer: {bench.VLLM_SOURCE}. Not measured in this run.")
    if output_json is not None:
        report = {
            "command": "bench scheduler",
            "machine": machine,
            "num_steps": steps,
            "num_repeats": repeat,
            "seed": seed,
            "depth": bench.DEPTH,
            "block_size": bench.BLOCK_SIZE,
            "peer": bench.VLLM_SOURCE,
            "rows": rows,
        }
        write_json(output_json, report)


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What the runs need.

    Attributes:
        engines: starts an engine.
        workload: what is asked.
        max_model_len: tokens of the longest context that a run needs.
        about: the model, for the report.
        facts: of the model: what bounds its steps, and what they take.
    """

    engines: "EngineFactory"
    workload: "Workload"
    max_model_len: int
    about: dict[str, object]
    facts: "Facts"


def _load(
    model: str | None,
    is_null: bool,
    vocab_size: int,
    workload_flags: WorkloadFlags,
    model_flags: ModelFlags,
) -> _Loaded:
    """Reads the workload, then the model: errors in what is asked need not wait for the weights."""
    from noria.bench.throughput import Facts, null_engines, torch_engines

    path = None if model is None else resolve_model(model)
    workload = _workload_from_file(workload_flags)
    context = None
    if path is not None:
        from noria.loading import read_model_config

        model_config = read_model_config(path)
        vocab_size, context = model_config.vocab_size, model_config.max_position_embeddings
    if workload is None:
        workload = _synthetic(workload_flags, vocab_size)
    max_model_len = _context(workload, model_flags.max_model_len, context)
    workload.check_fits(max_model_len=max_model_len, vocab_size=vocab_size)
    if is_null or path is None:
        engines = null_engines(vocab_size=vocab_size, max_model_len=max_model_len)
        return _Loaded(
            engines, workload, max_model_len, {"runner": "null", "vocab_size": vocab_size}, Facts()
        )

    import torch

    from noria.config import torch_device
    from noria.kv_format import kv_dtype
    from noria.models import load_model

    dtype = model_flags.dtype if model_flags.dtype == "auto" else getattr(torch, model_flags.dtype)
    loaded = load_model(
        path,
        dtype=dtype,
        device=torch_device(model_flags.device),
        max_model_len=max_model_len,
        backend=model_flags.backend,
        quantization=model_flags.quantization,
    )
    about: dict[str, object] = {
        "runner": loaded.backend,
        "backend": loaded.backend_reason,
        "linear maps": loaded.linear_kernel,
        "model": path.name,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(kv_dtype(model_flags.kv_cache_dtype, loaded.dtype)).removeprefix("torch."),
        "device": str(loaded.device),
        "vocab_size": vocab_size,
    }
    limit = None
    if loaded.device.type == "cpu" and not loaded.config.is_foreign:
        from noria.bench.limit import measure_limit

        limit = measure_limit(loaded, path, model_flags.quantization, model_flags.kv_cache_dtype)
    program = loaded.program
    facts = Facts(limit, None if program is None else lambda: program.stage_us)
    return _Loaded(torch_engines(loaded), workload, max_model_len, about, facts)


def _workload_from_file(flags: WorkloadFlags) -> "Workload | None":
    from noria.bench.workload import Workload, read_workload

    if flags.workload is None:
        return None
    workload = read_workload(flags.workload)
    if flags.num_requests is None:
        return workload
    if not 1 <= flags.num_requests <= len(workload.requests):
        raise ConfigError(
            f"--num-requests is {flags.num_requests}; {flags.workload} has {len(workload.requests)}",
            name="--num-requests",
            value=flags.num_requests,
        )
    return Workload(workload.source, workload.requests[: flags.num_requests])


def _synthetic(flags: WorkloadFlags, vocab_size: int) -> "Workload":
    from noria.bench.workload import synthetic_workload

    return synthetic_workload(
        _DEFAULT_REQUESTS if flags.num_requests is None else flags.num_requests,
        vocab_size=vocab_size,
        seed=flags.seed,
        prompt_lengths=_lengths(
            "prompt", flags.prompt_median, flags.prompt_sigma, flags.prompt_min, flags.prompt_max
        ),
        output_lengths=_lengths(
            "output", flags.output_median, flags.output_sigma, flags.output_min, flags.output_max
        ),
    )


def _lengths(of: str, median: float, sigma: float, low: int, high: int) -> "LogNormalLengths":
    """Lengths of prompts or of outputs; an error says of which."""
    from noria.bench.lengths import LogNormalLengths

    try:
        return LogNormalLengths(median, sigma, low, high)
    except ConfigError as error:
        raise ConfigError(f"{of} lengths: {error}", name=error.name, value=error.value) from None


def _context(workload: "Workload", asked: int | None, model_limit: int | None) -> int:
    """Tokens of a request: as asked, else what a static batch of this workload reserves for a row."""
    if asked is not None:
        return asked
    needed = workload.static_reservation
    return needed if model_limit is None else min(needed, model_limit)


def _engine_config(
    model: str, batching: str, engine_flags: EngineFlags, model_flags: ModelFlags, max_model_len: int
) -> "EngineConfig":
    from noria.config import EngineConfig

    return EngineConfig(
        model=model,
        dtype=model_flags.dtype,
        kv_cache_dtype=model_flags.kv_cache_dtype,
        device=model_flags.device,
        backend=model_flags.backend,
        quantization=model_flags.quantization,
        max_model_len=max_model_len,
        max_num_seqs=engine_flags.max_num_seqs,
        max_num_batched_tokens=engine_flags.max_num_batched_tokens,
        block_size=engine_flags.block_size,
        num_kv_blocks=engine_flags.num_kv_blocks,
        enable_prefix_caching=engine_flags.enable_prefix_caching,
        batching=batching,
        depth=engine_flags.depth,
        skip_tokenizer_init=True,
    )


def _report_throughput(
    console: "Console",
    output_json: Path | None,
    runs: "list[ThroughputRun]",
    loaded: _Loaded,
    configs: "list[EngineConfig]",
    engine_flags: EngineFlags,
) -> None:
    from noria.bench.lengths import longest_over_mean, longest_over_mean_in_order
    from noria.bench.machine import detect_machine, torch_facts
    from noria.bench.report import machine_line, throughput_report, throughput_table, write_json

    machine, torch_used = detect_machine(), torch_facts()
    workload, seats = loaded.workload, engine_flags.max_num_seqs
    console.print(machine_line(machine, torch_version=torch_used.version, num_threads=torch_used.num_threads))
    lengths = workload.output_lengths
    console.print(
        f"{len(workload.requests)} requests, {workload.source}; {workload.prompt_lengths.sum()} prompt "
        f"and {lengths.sum()} output tokens"
    )
    console.print(
        f"E[longest of {seats}] / E[length] of the outputs: {longest_over_mean(lengths, seats):.2f} at "
        f"random, {longest_over_mean_in_order(lengths, seats):.2f} in this order"
    )
    about = ", ".join(
        str(value) for name, value in loaded.about.items() if name not in ("runner", "vocab_size")
    )
    title = f"{about or 'no model: times are the engine alone'}; {seats} seats, depth {configs[0].depth}"
    console.print(throughput_table(runs, title=title))
    if (limit := loaded.facts.limit) is not None:
        console.print(
            f"limit: {limit.bytes_per_s / 1e9:.1f} GB/s and {limit.operations_per_s / 1e9:.0f} Gop/s "
            f"measured, {limit.bytes_per_weight:.3g} bytes a weight, each step's weights and rows, and KV"
        )
    if output_json is not None:
        report = throughput_report(
            runs,
            machine=machine,
            torch_used=torch_used,
            workload=workload,
            about=loaded.about,
            configs=configs,
            limit=loaded.facts.limit,
        )
        write_json(output_json, report)


def _check_output(output_json: Path | None) -> None:
    from noria.bench.report import check_writable

    if output_json is not None:
        check_writable(output_json)


def _console(output_json: Path | None) -> "Console":
    """Where tables go: standard output, unless the JSON goes there."""
    from noria.bench.report import STDOUT

    return _stderr_console() if output_json == STDOUT else _stdout_console()


def _stdout_console() -> "Console":
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(highlight=False, markup=False, width=width)


def _stderr_console() -> "Console":
    from rich.console import Console

    width = None if sys.stderr.isatty() else _PIPE_WIDTH
    return Console(stderr=True, highlight=False, markup=False, width=width)
