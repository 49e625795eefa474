"""What a response's body tells."""

from collections.abc import Sequence

from noria.errors import BodyError
from noria.outputs import CompletionOutput, RequestOutput
from noria.scores import Logprob

Body = dict[str, object]


def chat_body(
    output: RequestOutput, *, name: str, created: int, model: str, num_top_logprobs: int | None
) -> Body:
    """The body that `/v1/chat/completions` gives.

    Args:
        output: finished.
        name: of this response.
        created: when, in seconds since 1970.
        model: its name.
        num_top_logprobs: how many of the most likely tokens are told of each place, if any are.
    """
    choices = [
        {
            "index": answer.index,
            "message": _message(answer, name),
            "logprobs": _chat_logprobs(answer, num_top_logprobs or 0),
            "finish_reason": "tool_calls" if answer.tool_calls else answer.finish_reason,
        }
        for answer in output.outputs
    ]
    return {
        "id": f"chatcmpl-{name}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage([output]),
    }


def _message(answer: CompletionOutput, name: str) -> Body:
    """What the assistant says, and what it wants to have called."""
    if not answer.tool_calls:
        return {"role": "assistant", "content": answer.text, "refusal": None}
    calls = [
        {
            "id": f"call_{name}_{answer.index}_{place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(answer.tool_calls)
    ]
    content = (answer.content or "").strip() or None
    return {"role": "assistant", "content": content, "refusal": None, "tool_calls": calls}


def completion_body(outputs: Sequence[RequestOutput], *, name: str, created: int, model: str) -> Body:
    """The body that `/v1/completions` gives; see `chat_body`. There is an output for each prompt."""
    answers = [answer for output in outputs for answer in output.outputs]
    choices = [
        {
            "index": index,
            "text": answer.text,
            "logprobs": _completion_logprobs(answer),
            "finish_reason": answer.finish_reason,
        }
        for index, answer in enumerate(answers)
    ]
    return {
        "id": f"cmpl-{name}",
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": _usage(outputs),
    }


def error_body(error: Exception) -> Body:
    """The body of a refusal."""
    param = error.param if isinstance(error, BodyError) else None
    return {
        "error": {"message": str(error), "type": "invalid_request_error", "param": param, "code": None},
    }


def _usage(outputs: Sequence[RequestOutput]) -> Body:
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    num_cached = sum(output.metrics.num_cached_tokens for output in outputs if output.metrics is not None)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


def _chat_logprobs(answer: CompletionOutput, num_top: int) -> Body | None:
    if answer.logprobs is None:
        return None
    told = []
    for entry in answer.logprobs:
        chosen, *_ = entry.values()
        likeliest = sorted(entry.values(), key=lambda one: one.rank or 0)[:num_top]
        told.append(_token(chosen) | {"top_logprobs": [_token(one) for one in likeliest]})
    return {"content": told}


def _token(logprob: Logprob) -> Body:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": logprob.logprob, "bytes": list(text.encode())}


def _completion_logprobs(answer: CompletionOutput) -> Body | None:
    if answer.logprobs is None:
        return None
    tokens, values, tops, offsets = [], [], [], []
    offset = 0
    for entry in answer.logprobs:
        chosen, *_ = entry.values()
        tokens.append(chosen.decoded_token or "")
        values.append(chosen.logprob)
        tops.append({one.decoded_token or "": one.logprob for one in entry.values()})
        offsets.append(offset)
        offset += len(tokens[-1])
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
