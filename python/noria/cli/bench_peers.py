"""`noria bench peers`: noria beside other engines, on the same work, in turns."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import packaged_model
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from noria.bench.peers import EntrantRuns

EXAMPLES = """Examples:

  export NORIA_PEERS=vllm=/opt/vllm/bin/python,transformers=/opt/hf/bin/python
  noria bench peers --hf ./SmolLM2-135M --run noria:float32,vllm:float32,transformers

  export NORIA_PEERS=llama.cpp=/opt/llama/bin/python
  noria bench peers --gguf smollm2 --run noria,llama.cpp:16 --workload workload.json
"""

_PIPE_WIDTH = 140


def peers(
    *,
    run: Annotated[
        str,
        Parameter(
            help="Engines, separated by commas, each with its options behind colons. noria, vllm and "
            "transformers: float32 or bfloat16; noria: int8, torch, cpu; vllm: eager; transformers: static; "
            "llama.cpp: a number of slots."
        ),
    ],
    hf: Annotated[
        Path | None, Parameter(help="A folder with config.json: what all but llama.cpp load.")
    ] = None,
    gguf: Annotated[
        str | None,
        Parameter(
            help="A GGUF file, or smollm2: what llama.cpp loads, and noria too where there is no --hf."
        ),
    ] = None,
    workload: Annotated[
        Path | None,
        Parameter(
            help='A JSON file: [{"prompt_token_ids": [1, 2], "max_tokens": 8}, ...]. '
            "[default: 64 random requests, as of bench throughput]"
        ),
    ] = None,
    num_requests: Annotated[int | None, Parameter(help="Of the workload, the first ones.")] = None,
    max_num_seqs: Annotated[int, Parameter(help="Sequences that run at once, in each engine.")] = 64,
    repeat: Annotated[int, Parameter(help="Rounds; in each, every engine runs once.")] = 2,
    output_json: Annotated[
        Path | None,
        Parameter(
            allow_leading_hyphen=True,
            help="Write everything measured to this file; - writes it to standard output instead of a table.",
        ),
    ] = None,
) -> None:
    """Output tokens per second of noria and of its peers, each from an environment of its own.

    NORIA_PEERS names the Python of each peer's environment, as name=python pairs separated by commas: vllm
    (its CPU build), llama.cpp (the package xllamacpp, which carries its server), transformers. All requests
    are there at once; tokens are greedy and the end of sequence is ignored. Engines are loaded once, and run
    one after another in each round. All run on the CPU.
    """
    from rich.console import Console

    from noria.bench.machine import detect_machine
    from noria.bench.peers import parse_entrant, read_environments, run_entrants
    from noria.bench.report import STDOUT, check_writable, machine_line, write_json
    from noria.bench.workload import Workload, read_workload, synthetic_workload

    counts = {"--repeat": repeat, "--max-num-seqs": max_num_seqs, "--num-requests": num_requests}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name} is {value}; it must be 1 or more", name=name, value=value)
    if output_json is not None:
        check_writable(output_json)
    environments = read_environments()
    gguf_path = None if gguf is None else Path(packaged_model(gguf))
    hf_model, gguf_model = _existing(hf, "--hf", "folder"), _existing(gguf_path, "--gguf", "file")
    entrants = [parse_entrant(text.strip(), environments, hf_model, gguf_model) for text in run.split(",")]
    if workload is not None:
        asked = read_workload(workload)
        asked = Workload(asked.source, asked.requests[:num_requests])
    else:
        asked = synthetic_workload(num_requests or 64, vocab_size=_vocab_size(hf or gguf_path))
    machine = detect_machine()
    num_threads = max(1, int(machine.num_usable_cpus))
    status_console = Console(stderr=True, highlight=False, markup=False)
    with status_console.status("") as status:
        runs = run_entrants(
            entrants,
            asked,
            num_seqs=max_num_seqs,
            num_threads=num_threads,
            num_repeats=repeat,
            on_progress=status.update,
        )
    if output_json is not None:
        report = {
            "command": "bench peers",
            "machine": machine,
            "num_threads": num_threads,
            "workload": {
                "source": asked.source,
                "num_requests": len(asked.requests),
                "num_prompt_tokens": int(asked.prompt_lengths.sum()),
                "num_output_tokens": int(asked.output_lengths.sum()),
            },
            "max_num_seqs": max_num_seqs,
            "runs": runs,
        }
        write_json(output_json, report)
        if output_json == STDOUT:
            return
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(machine_line(machine, torch_version=None, num_threads=num_threads))
    console.print(
        f"{len(asked.requests)} requests, {asked.source}; {asked.prompt_lengths.sum()} prompt and "
        f"{asked.output_lengths.sum()} output tokens; {max_num_seqs} sequences at once; {repeat} rounds"
    )
    console.print(peers_table(runs))


def peers_table(runs: "list[EntrantRuns]") -> "Table":
    """Rates, and how many times as fast each run of noria's is: the rounds' own ratios, median and range."""
    from rich.table import Table

    from noria.bench.report import format_spread

    ours = [run for run in runs if run.name.split(":")[0] == "noria"]
    table = Table()
    table.add_column("engine")
    table.add_column("output tokens / s", justify="right", no_wrap=True)
    for own in ours:
        table.add_column(f"{own.name} is", justify="right", no_wrap=True)
    for run in runs:
        ratios = [
            [mine / other for mine, other in zip(own.tokens_per_s, run.tokens_per_s, strict=True)]
            for own in ours
        ]
        cells = [
            "" if own is run else f"{format_spread(ratio, 2)} x"
            for own, ratio in zip(ours, ratios, strict=True)
        ]
        table.add_row(run.about, format_spread(run.tokens_per_s), *cells)
    return table


def _existing(path: Path | None, flag: str, what: str) -> str:
    """The path as text, "" where there is none."""
    if path is None:
        return ""
    is_there = path.is_dir() if what == "folder" else path.is_file()
    if not is_there:
        raise ConfigError(f"{flag} is {path}; there is no such {what}", name=flag, value=str(path))
    return str(path)


def _vocab_size(model: Path | None) -> int:
    from noria.loading import read_model_config

    if model is None:
        raise ConfigError("give --hf, --gguf, or both", name="--hf", value=None)
    return read_model_config(model).vocab_size
