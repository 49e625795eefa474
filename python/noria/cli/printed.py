"""Answers on standard output: for people, and as lines of JSON."""

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from noria.outputs import CompletionOutput, RequestOutput
    from noria.prompts import PromptInput
    from noria.scores import Logprob, TokenLogprobs

_HEADER_CHARS = 72


def print_all(outputs: "Sequence[RequestOutput]", prompts: "Sequence[PromptInput]") -> None:
    """Every answer under its prompt."""
    for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True), start=1):
        shown = _shown(prompt)
        for completion in output.outputs:
            which = "" if len(output.outputs) == 1 else f" ({completion.index + 1} of {len(output.outputs)})"
            print(f"[{number}/{len(outputs)}] {shown}{which}")
            print(completion.text.strip("\n"))
            if completion.logprobs is not None:
                print_logprobs(completion.logprobs)
            print(f"({len(completion.token_ids)} tokens, {completion.finish_reason})\n", flush=True)


def print_lines(outputs: "Sequence[RequestOutput]", prompts: "Sequence[PromptInput]") -> None:
    """A line of JSON an answer."""
    for output, prompt in zip(outputs, prompts, strict=True):
        for completion in output.outputs:
            print(json.dumps(_told(output, prompt, completion), ensure_ascii=False), flush=True)


def print_errors(outputs: "Sequence[RequestOutput]", prompts: "Sequence[PromptInput]") -> bool:
    """A line on standard error for each prompt with an answer that failed.

    Returns:
        Whether there is one.
    """
    has_failed = False
    for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True), start=1):
        if any(completion.finish_reason == "error" for completion in output.outputs):
            has_failed = True
            cause = " ".join((output.error or "it ended with an error").split())
            print(f"noria: prompt {number} ({_shown(prompt)}): {cause}", file=sys.stderr)
    return has_failed


def print_logprobs(logprobs: "Sequence[TokenLogprobs]") -> None:
    """A line a token: its log probability, its text, and the likeliest beside it."""
    for entry in logprobs:
        chosen, *others = entry.values()
        rest = ", ".join(f"{_text(one)} {one.logprob:.3f}" for one in others)
        print(f"{chosen.logprob:9.3f}  {_text(chosen)}" + (f"  ({rest})" if rest else ""))


def _told(
    output: "RequestOutput", prompt: "PromptInput", completion: "CompletionOutput"
) -> dict[str, object]:
    told: dict[str, object] = {
        "prompt": prompt,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(output.prompt_token_ids),
        "num_output_tokens": len(completion.token_ids),
        "error": output.error,
    }
    if len(output.outputs) > 1:
        told["index"] = completion.index
    if completion.logprobs is not None:
        told["logprobs"] = [
            [
                {"token_id": token_id, "token": one.decoded_token, "logprob": one.logprob, "rank": one.rank}
                for token_id, one in entry.items()
            ]
            for entry in completion.logprobs
        ]
    return told


def _shown(prompt: "PromptInput") -> str:
    """A prompt on one short line."""
    one_line = " ".join(_header(prompt).split())
    return one_line if len(one_line) <= _HEADER_CHARS else one_line[: _HEADER_CHARS - 3] + "..."


def _header(prompt: "PromptInput") -> str:
    return prompt if isinstance(prompt, str) else f"token ids {','.join(map(str, prompt))}"


def _text(logprob: "Logprob") -> str:
    return "?" if logprob.decoded_token is None else json.dumps(logprob.decoded_token, ensure_ascii=False)
