"""`noria demo`: one small model, 64 questions, 8 seats; then the same work under static batching."""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import MODEL_HELP, SMOLLM2_ALIAS, DType, resolve_model
from noria.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from noria.bench.workload import Workload
    from noria.llm import LLM

EXAMPLES = """Examples:

  noria demo
  noria demo --max-num-seqs 16 --no-compare
"""

_BATCHINGS = ("continuous", "gang", "padded")


def demo(
    *,
    model: Annotated[str, Parameter(help=MODEL_HELP)] = SMOLLM2_ALIAS,
    num_prompts: Annotated[int, Parameter(help="How many of the 64 questions are asked.")] = 64,
    max_num_seqs: Annotated[int, Parameter(help="Seats: answers written at once.")] = 8,
    depth: Annotated[int, Parameter(help="Steps in flight, 1 to 3.")] = 2,
    dtype: Annotated[DType, Parameter(help="Number format of weights and KV cache.")] = "auto",
    compare: Annotated[
        bool, Parameter(help="Then answer the same requests under gang and padded batching, and compare.")
    ] = True,
) -> None:
    """Watch a real model answer 64 questions on 8 seats, then compare with static batching.

    Answers end at very different lengths. With continuous batching a seat is refilled in the step
    after its answer ends; a static batch holds it until the longest answer of its batch is done.
    """
    from noria.cli.demo_prompts import DEMO_PROMPTS

    if not 1 <= num_prompts <= len(DEMO_PROMPTS):
        raise ConfigError(
            f"--num-prompts is {num_prompts}; it must be 1 to {len(DEMO_PROMPTS)}",
            name="--num-prompts",
            value=num_prompts,
        )
    path = resolve_model(model)
    from rich.console import Console

    out = Console(highlight=False, markup=False)
    out.print(f"Loading {path.name} ...")

    from noria.bench.machine import detect_machine, torch_facts
    from noria.bench.report import machine_line
    from noria.llm import LLM

    prompts = DEMO_PROMPTS[:num_prompts]
    with LLM(path, dtype=dtype, max_num_seqs=max_num_seqs, max_model_len=512, depth=depth) as llm:
        torch_used = torch_facts()
        out.print(
            machine_line(
                detect_machine(), torch_version=torch_used.version, num_threads=torch_used.num_threads
            )
        )
        out.print(f"\n{num_prompts} questions, {max_num_seqs} seats, continuous batching", style="bold")
        workload = _answer(llm, [(prompt.text, prompt.max_tokens) for prompt in prompts], out)
        if not compare:
            return
        llm.engine.close()
        _compare(llm, workload, out)


def _answer(llm: "LLM", prompts: list[tuple[str, int]], out: "Console") -> "Workload":
    """Answers on the screen; the same requests as a workload of fixed lengths."""
    import numpy as np

    from noria.bench.workload import Workload, WorkloadRequest
    from noria.cli.generate import chat_ids
    from noria.cli.seats import Answer, SeatScreen
    from noria.sampling.params import SamplingParams

    inputs = [chat_ids(llm, text) for text, _ in prompts]
    params = [SamplingParams(temperature=0.0, max_tokens=max_tokens) for _, max_tokens in prompts]
    answers = []
    for (text, _), one in zip(prompts, params, strict=True):
        stream = llm.answer_text(one)
        assert stream is not None  # there is a tokenizer, and text is wanted
        answers.append(Answer(text, stream))
    with SeatScreen(answers, lambda: llm.engine.seat_handles, out) as screen:
        outputs = llm.generate(inputs, params, use_tqdm=False, on_events=screen.update)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    stats = llm.stats()
    out.print(
        f"\n{sum(lengths)} tokens ({min(lengths)} to {max(lengths)} an answer) in {stats.num_decode_steps} "
        f"decode steps; seats held {stats.seat_occupancy:.0%} of the time"
    )
    pairs = zip(inputs, lengths, strict=True)
    return Workload(
        "the demo's questions, each as long as its answer was",
        tuple(WorkloadRequest(np.array(ids, dtype=np.int32), length) for ids, length in pairs),
    )


def _compare(llm: "LLM", workload: "Workload", out: "Console") -> None:
    """The same requests under each batching, each held to the length that its answer had."""
    from noria.bench.lengths import longest_over_mean, longest_over_mean_in_order
    from noria.bench.report import throughput_table
    from noria.bench.throughput import run_batchings, torch_engines
    from noria.cli.progress import RunProgress

    configs = [replace(llm.config, batching=name) for name in _BATCHINGS]
    out.print("\nThe same requests again, each held to the length that its answer had", style="bold")
    with RunProgress(len(workload.requests), 1) as progress:
        runs = run_batchings(
            torch_engines(llm.model), configs, workload, on_run=progress.begin, on_events=progress.update
        )
    seats = llm.config.max_num_seqs
    title = f"{len(workload.requests)} requests, {seats} seats, depth {llm.config.depth}"
    out.print(throughput_table(runs, title=title))
    lengths = workload.output_lengths
    by_name = {run.batching: run for run in runs}
    continuous, padded = by_name["continuous"], by_name["padded"]
    out.print(
        f"Padded took {padded.num_decode_steps / continuous.num_decode_steps:.2f} x the decode steps and "
        f"{padded.wall_s / continuous.wall_s:.2f} x the time of continuous batching. "
        f"A batch of {seats} is as long as its longest answer: E[longest of {seats}] / E[length] of these "
        f"answers is {longest_over_mean(lengths, seats):.2f} for batches drawn at random, "
        f"{longest_over_mean_in_order(lengths, seats):.2f} in this order."
    )
