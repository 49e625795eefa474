"""`noria generate`: prompts in, answers out."""

import dataclasses
import inspect
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import (
    MODEL_HELP,
    EngineFlags,
    ModelFlags,
    SamplingFlags,
    StructureFlags,
    parse_biases,
    parse_ids,
    resolve_model,
)
from noria.cli.printed import print_all, print_errors, print_lines, print_logprobs
from noria.config import MAX_NUM_SEQS
from noria.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from noria.llm import LLM
    from noria.outputs import Events, RequestOutput
    from noria.prompts import PromptInput
    from noria.sampling.params import SamplingParams

EXAMPLES = """Examples:

  noria generate smollm2 --chat "Why is the sky blue?"
  noria generate ./model.gguf "Once upon a time" "The sea" --temperature 0.8
  noria generate smollm2 --chat --stop "." - < question.txt
  noria generate smollm2 --json-lines - < prompts.jsonl > answers.jsonl
  noria generate smollm2 --chat "Is water wet?" --choice yes --choice no --logprobs 3
  noria generate smollm2 --chat "Invent a person." --json-schema person.json --n 3 --temperature 0.8
"""

_NO_MODEL_FLAGS = ModelFlags()
_NO_ENGINE_FLAGS = EngineFlags()
_NO_SAMPLING_FLAGS = SamplingFlags()
_NO_STRUCTURE_FLAGS = StructureFlags()
_MAX_TOKENS = 128
EXIT_FAILED = 1
_OPTION = re.compile(r"--?[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def generate(
    model: Annotated[str, Parameter(help=MODEL_HELP)],
    prompts: Annotated[
        tuple[str, ...],
        Parameter(
            show_default=False,
            allow_leading_hyphen=True,  # for -
            help="One is answered as its tokens come; several are answered together. - reads standard input.",
        ),
    ] = (),
    /,
    *,
    prompt_token_ids: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            allow_leading_hyphen=True,
            help="A prompt as token ids, comma-separated: 1,2,3; may be repeated.",
        ),
    ] = (),
    chat: Annotated[
        bool,
        Parameter(
            negative="", help="Put each prompt through the model's chat template, as a user's message."
        ),
    ] = False,
    json_lines: Annotated[
        bool,
        Parameter(
            negative="",
            help="A line of JSON an answer, in the prompts' order. What - reads is then lines of JSON too: "
            'a text, a list of token ids, or {"prompt": text}. For more, see noria batch.',
        ),
    ] = False,
    system: Annotated[str | None, Parameter(help="With --chat: a system message before each prompt.")] = None,
    n: Annotated[int, Parameter(help="Answers to each prompt; --temperature makes them differ.")] = 1,
    logprobs: Annotated[
        int | None,
        Parameter(
            help="Tell each token's log probability, and those of so many of the likeliest. [default: none]"
        ),
    ] = None,
    structure: StructureFlags = _NO_STRUCTURE_FLAGS,
    sampling: SamplingFlags = _NO_SAMPLING_FLAGS,
    model_flags: ModelFlags = _NO_MODEL_FLAGS,
    engine_flags: EngineFlags = _NO_ENGINE_FLAGS,
) -> int:
    """Answer one prompt or several.

    The text goes to standard output, what is worth knowing about the run to standard error. It ends with
    status 1 if an answer ends with an error.
    """
    _refuse_options(prompts)
    if not prompts and not prompt_token_ids:
        raise ConfigError("give a PROMPT or --prompt-token-ids", name="PROMPT", value=None)
    if chat and prompt_token_ids:
        raise ConfigError(
            "--chat needs text; it cannot be used with --prompt-token-ids", name="--chat", value=chat
        )
    if system is not None and not chat:
        raise ConfigError("--system needs --chat", name="--system", value=system)
    given_ids = [parse_ids(text, "--prompt-token-ids") for text in prompt_token_ids]
    path = resolve_model(model)
    # Before the weights: its errors need not wait for them.
    params = dataclasses.replace(
        sampling_params(sampling, max_tokens=_MAX_TOKENS),
        n=n,
        logprobs=logprobs,
        structured_outputs=structure.rule(),
    )
    given: list[PromptInput] = [*_with_stdin(prompts, json_lines), *given_ids]
    if chat and not all(isinstance(prompt, str) for prompt in given):
        raise ConfigError("--chat needs texts; standard input has other prompts", name="--chat", value=chat)

    from noria.llm import LLM

    with LLM(
        path,
        dtype=model_flags.dtype,
        kv_cache_dtype=model_flags.kv_cache_dtype,
        device=model_flags.device,
        backend=model_flags.backend,
        quantization=model_flags.quantization,
        max_model_len=model_flags.max_model_len,
        max_num_seqs=_num_seats(engine_flags.max_num_seqs, len(given) * n),
        max_num_batched_tokens=engine_flags.max_num_batched_tokens,
        block_size=engine_flags.block_size,
        num_kv_blocks=engine_flags.num_kv_blocks,
        enable_prefix_caching=engine_flags.enable_prefix_caching,
        depth=engine_flags.depth,
    ) as llm:
        inputs = [
            chat_ids(llm, prompt, system) if chat and isinstance(prompt, str) else prompt for prompt in given
        ]
        if json_lines:
            outputs = llm.generate(inputs, params, on_error="return")
            print_lines(outputs, given)
        elif len(inputs) == n == 1:
            outputs = [_stream_one(llm, inputs[0], params)]
        else:
            outputs = llm.generate(inputs, params)
            print_all(outputs, given)
        return EXIT_FAILED if print_errors(outputs, given) else 0


def _num_seats(max_num_seqs: int, num_answers: int) -> int:
    """No more than there is use for, as each takes KV; what is out of its range is left, to be refused."""
    is_valid = 1 <= max_num_seqs <= MAX_NUM_SEQS
    return min(max_num_seqs, max(1, num_answers)) if is_valid else max_num_seqs


def _with_stdin(prompts: Sequence[str], json_lines: bool) -> "list[PromptInput]":
    """The prompts, with what standard input holds in the place of `-`."""
    given: list[PromptInput] = []
    for prompt in prompts:
        if prompt != "-":
            given.append(prompt)
        elif json_lines:
            lines = enumerate(_stdin_text().split("\n"), start=1)
            given += [_from_json(line, number) for number, line in lines if line.strip()]
        else:
            given.append(_stdin_text().removesuffix("\n"))
    return given


def _stdin_text() -> str:
    """All of standard input.

    Raises:
        ConfigError: it is closed, or no text.
    """
    if sys.stdin is None:
        raise ConfigError("standard input is closed", name="PROMPT", value="-")
    try:
        text = sys.stdin.read()
        text.encode()  # in some locales, bytes that are no text come as lone surrogates
    except UnicodeError:
        raise ConfigError("standard input is not UTF-8 text", name="PROMPT", value="-") from None
    return text


def _refuse_options(prompts: tuple[str, ...]) -> None:
    """PROMPT may begin with a hyphen, as `-` does, so what looks like an option is refused here.

    Raises:
        ConfigError: one does; the text has the option that is spelled most alike.
    """
    known = list(_option_names(generate))
    for prompt in prompts:
        if _OPTION.fullmatch(prompt):
            alike = get_close_matches(prompt, known, n=1)
            hint = f"Did you mean {alike[0]}?" if alike else "Try --help."
            raise ConfigError(f"Unknown option: {prompt}. {hint}", name=prompt, value=prompt)


def _option_names(command: Callable[..., object]) -> Iterator[str]:
    """A command's options, as they are written; a group of flags is the default of its parameter."""
    for parameter in inspect.signature(command).parameters.values():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        group = parameter.default
        names = (
            [field.name for field in dataclasses.fields(group)]
            if dataclasses.is_dataclass(group)
            else [parameter.name]
        )
        yield from (f"--{name.replace('_', '-')}" for name in names)


def _from_json(line: str, number: int) -> "PromptInput":
    try:
        prompt = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"line {number} of standard input is not valid JSON ({error})", name="PROMPT", value=line
        ) from None
    if isinstance(prompt, dict) and list(prompt) == ["prompt"]:
        prompt = prompt["prompt"]  # --chat takes it as it takes a text
    if isinstance(prompt, str | list | dict):
        return prompt
    raise ConfigError(
        f'line {number} of standard input must be a text, a list of token ids or {{"prompt": text}}',
        name="PROMPT",
        value=line,
    )


def sampling_params(flags: SamplingFlags, *, max_tokens: int | None) -> "SamplingParams":
    """The engine's parameters from the flags.

    Args:
        flags: as given.
        max_tokens: where the flags do not say; None: what the context leaves.

    Raises:
        SamplingParamsError: a value is out of its range.
        ConfigError: `--stop-token-ids` is no list of integers, or `--logit-bias` no list of biases.
    """
    from noria.sampling.params import SamplingParams

    stop_ids = [] if flags.stop_token_ids is None else parse_ids(flags.stop_token_ids, "--stop-token-ids")
    return SamplingParams(
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        min_p=flags.min_p,
        repetition_penalty=flags.repetition_penalty,
        presence_penalty=flags.presence_penalty,
        frequency_penalty=flags.frequency_penalty,
        logit_bias=None if flags.logit_bias is None else parse_biases(flags.logit_bias, "--logit-bias"),
        seed=time.time_ns() if flags.seed is None else flags.seed,
        max_tokens=max_tokens if flags.max_tokens is None else flags.max_tokens,
        min_tokens=flags.min_tokens,
        stop=flags.stop or None,
        stop_token_ids=stop_ids,
        ignore_eos=flags.ignore_eos,
    )


def chat_ids(llm: "LLM", text: str, system: str | None = None) -> list[int]:
    """The token ids of one user's message in the model's chat template."""
    assert llm.tokenizer is not None
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages.append({"role": "user", "content": text})
    # The template writes the special tokens itself.
    return llm.tokenizer.encode(llm.tokenizer.apply_chat_template(messages), add_special_tokens=False)


def _stream_one(llm: "LLM", prompt: "PromptInput", params: "SamplingParams") -> "RequestOutput":
    from noria.cli.answer import AnswerPieces

    answer = AnswerPieces(llm, params)

    def show(events: "Events", _indices: "npt.NDArray[np.int64]") -> None:
        piece = answer.take(events)
        if piece:
            sys.stdout.write(piece)
            sys.stdout.flush()

    (output,) = llm.generate([prompt], params, use_tqdm=False, on_events=show)
    print(flush=True)
    metrics, completion = output.metrics, output.outputs[0]
    line = f"{len(output.prompt_token_ids)} prompt tokens, {len(completion.token_ids)} output tokens"
    if metrics is not None and metrics.finished_time is not None and metrics.first_token_time is not None:
        first_ms = (metrics.first_token_time - metrics.arrival_time) * 1e3
        line += f", first after {first_ms:.0f} ms"
        decode_s = metrics.finished_time - metrics.first_token_time
        if len(completion.token_ids) > 1 and decode_s > 0:
            line += f", then {(len(completion.token_ids) - 1) / decode_s:.1f} tokens/s"
    if completion.logprobs is not None:
        print_logprobs(completion.logprobs)
    print(f"{line}; finish reason: {completion.finish_reason}", file=sys.stderr)
    return output
