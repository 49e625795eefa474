"""Chunked prefill: how long do streams stall while the longest prompt that fits joins them?

32 streams decode; then a prompt of almost the whole context joins. Measured twice a round, in turns: with the
prompt cut into chunks by a step budget of 256 tokens, and with a budget that takes it whole.

    python benches/engine/chunked_prefill.py MODEL [--context 2048] [--rounds 3] [--output-json FILE]
"""

import argparse
import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from noria import LLM, SamplingParams, _core
from noria.bench.machine import detect_machine
from noria.runner.base import SeatInit

NUM_STREAMS = 32
STREAM_PROMPT = 16
CHUNK_BUDGET = 256


@dataclass(frozen=True, slots=True)
class Joined:
    """One run.

    Attributes:
        worst_gap_s: the longest time between two tokens of a stream while the prompt joined.
        ttft_s: from the prompt's submit to its first token.
    """

    worst_gap_s: float
    ttft_s: float


def join(llm: LLM, num_prompt_tokens: int, seed: int) -> Joined:
    """Lets streams decode, adds the long prompt, and runs until its second token."""
    generator = np.random.default_rng(seed)
    vocab_size = llm.model.config.vocab_size
    engine = llm.engine
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    streams = [
        engine.submit(
            generator.integers(0, vocab_size, STREAM_PROMPT), SeatInit(params, 0, STREAM_PROMPT), 10_000
        )
        for _ in range(NUM_STREAMS)
    ]
    last_token_us = dict.fromkeys(streams, 0)
    worst_gap_us = 0
    joined: int | None = None
    submitted_us = first_us = 0
    num_warm = 0
    while True:
        events = engine.turn()
        assert events is not None
        is_token = events.kinds == _core.TOKEN
        for handle, time_us, position in zip(
            events.handles[is_token].tolist(),
            events.times_us[is_token].tolist(),
            events.rows[is_token, 3].tolist(),
            strict=True,
        ):
            if handle == joined:
                first_us = first_us or time_us
                if position == 1:
                    break
            elif joined is not None:
                worst_gap_us = max(worst_gap_us, time_us - last_token_us[handle])
            last_token_us[handle] = time_us
        else:
            num_warm += 1
            if joined is None and num_warm > 12 and all(last_token_us.values()):
                prompt = generator.integers(0, vocab_size, num_prompt_tokens)
                joined = engine.submit(prompt, SeatInit(params, 0, num_prompt_tokens), 4)
                submitted_us = max(last_token_us.values())
            continue
        break
    for handle in [*streams, joined]:
        if handle is not None:
            engine.abort(handle)
    while engine.turn() is not None:
        pass
    engine.reset_prefix_cache()
    return Joined(worst_gap_us / 1e6, (first_us - submitted_us) / 1e6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder or .gguf file")
    parser.add_argument("--context", type=int, default=2048, help="max_model_len, tokens (default: 2048)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns (default: 3)")
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    longest = arguments.context - 8
    budgets = {"chunked": CHUNK_BUDGET, "whole": arguments.context + NUM_STREAMS}
    runs: dict[str, list[Joined]] = {name: [] for name in budgets}
    num_blocks = (arguments.context + NUM_STREAMS * 256) // 16
    with (
        LLM(
            arguments.model,
            max_model_len=arguments.context,
            max_num_seqs=NUM_STREAMS + 1,
            max_num_batched_tokens=budgets["chunked"],
            num_kv_blocks=num_blocks,
            watermark=0.0,
            admission="optimistic",  # all streams enter at once, whatever they may grow to
        ) as chunked,
        LLM(
            arguments.model,
            max_model_len=arguments.context,
            max_num_seqs=NUM_STREAMS + 1,
            max_num_batched_tokens=budgets["whole"],
            num_kv_blocks=num_blocks,
            watermark=0.0,
            admission="optimistic",  # all streams enter at once, whatever they may grow to
        ) as whole,
    ):
        engines = {"chunked": chunked, "whole": whole}
        for seed in range(arguments.rounds + 1):
            for name, llm in engines.items():
                run = join(llm, longest, seed)
                print(f"{'warm-up' if seed == 0 else f'round {seed}'}  {name:8} {run}", flush=True)
                if seed:
                    runs[name].append(run)
    gap = {name: statistics.median(run.worst_gap_s for run in of) for name, of in runs.items()}
    ttft = {name: statistics.median(run.ttft_s for run in of) for name, of in runs.items()}
    report = {
        "prompt_tokens": longest,
        "streams": NUM_STREAMS,
        "budget": CHUNK_BUDGET,
        "gap_ratio": gap["chunked"] / gap["whole"],
        "ttft_ratio": ttft["chunked"] / ttft["whole"],
        "runs": {name: [asdict(run) for run in of] for name, of in runs.items()},
        "machine": asdict(detect_machine()),
    }
    print(
        f"{longest} prompt tokens join {NUM_STREAMS} streams: worst gap {gap['chunked']:.3f} s chunked, "
        f"{gap['whole']:.3f} s whole (ratio {report['gap_ratio']:.3f}); its TTFT "
        f"{ttft['chunked']:.2f} s chunked, {ttft['whole']:.2f} s whole (ratio {report['ttft_ratio']:.2f})"
    )
    if arguments.output_json:
        arguments.output_json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")


if __name__ == "__main__":
    main()
