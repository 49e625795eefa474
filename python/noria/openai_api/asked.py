"""What a request's body asks for."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from noria.errors import BodyError
from noria.sampling.params import SamplingParams
from noria.sampling.structured import StructuredOutputsParams

Body = Mapping[str, object]

# Under the same names in `SamplingParams`, whose own checks say what is wrong with a value. The second row is
# not OpenAI's, but vLLM's.
_SAMPLING = (
    *("temperature", "top_p", "n", "stop", "seed", "presence_penalty", "frequency_penalty"),
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens", "bad_words", "allowed_token_ids"),
)
_COMMON = (*_SAMPLING, "model", "user", "metadata", "logit_bias", "logprobs", "stream", "response_format")
_CHAT = (
    *_COMMON,
    *("messages", "max_tokens", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
    *("chat_template_kwargs", "add_generation_prompt"),
)
_COMPLETION = (*_COMMON, "prompt", "max_tokens", "echo", "suffix", "best_of")

_MAX_COMPLETION_TOKENS = 16
"""Of a completion that says nothing of it; a chat may take what the context leaves."""


_DEFAULTS = SamplingParams()


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A chat completion.

    Attributes:
        model: the name that the body gives it; None if it gives none.
        messages: the turns so far.
        params: how the answer is sampled.
        tools: that the model may call; None if there are none, or it must not.
        template_kwargs: what else the chat template reads.
        add_generation_prompt: the prompt ends with what opens the assistant's turn.
    """

    model: str | None
    messages: Sequence[Mapping[str, object]]
    params: SamplingParams
    tools: Sequence[Mapping[str, object]] | None
    template_kwargs: Mapping[str, object] | None
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True)
class CompletionAsked:
    """A completion of one prompt or several.

    Attributes:
        model: the name that the body gives it; None if it gives none.
        prompts: texts or token ids.
        params: how each is sampled.
    """

    model: str | None
    prompts: Sequence[str | Sequence[int]]
    params: SamplingParams


def read_chat(body: object, default_params: SamplingParams = _DEFAULTS) -> ChatAsked:
    """The body of `/v1/chat/completions`.

    Args:
        body: as it was sent.
        default_params: what the model's authors sample with, where the body does not say.

    Raises:
        RejectedError: a value is bad, or is not supported.
    """
    given = _given(body, _CHAT)
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BodyError("messages must be a list of at least one message", param="messages", value=messages)
    num_logprobs = None
    if _flag(given, "logprobs", False):
        num_logprobs = given.get("top_logprobs", 0)
    elif "top_logprobs" in given:
        raise BodyError("top_logprobs needs logprobs to be true", param="top_logprobs", value=given)
    kwargs = given.get("chat_template_kwargs")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise BodyError("chat_template_kwargs must be an object", param="chat_template_kwargs", value=kwargs)
    max_tokens = given.get("max_completion_tokens", given.get("max_tokens"))
    return ChatAsked(
        model=_model(given),
        messages=messages,
        params=_params(given, max_tokens, num_logprobs, default_params),
        tools=_tools(given),
        template_kwargs=kwargs,
        add_generation_prompt=_flag(given, "add_generation_prompt", True),
    )


def read_completion(body: object, default_params: SamplingParams = _DEFAULTS) -> CompletionAsked:
    """The body of `/v1/completions`; see `read_chat`.

    Raises:
        RejectedError: a value is bad, or is not supported.
    """
    given = _given(body, _COMPLETION)
    for name, accepted in (("echo", False), ("suffix", ""), ("best_of", 1)):
        if given.get(name, accepted) != accepted:
            raise BodyError(f"{name} is not supported; leave it out", param=name, value=given[name])
    max_tokens = given.get("max_tokens", _MAX_COMPLETION_TOKENS)
    return CompletionAsked(
        model=_model(given),
        prompts=_prompts(given.get("prompt")),
        params=_params(given, max_tokens, given.get("logprobs"), default_params),
    )


def _given(body: object, known: Sequence[str]) -> dict[str, object]:
    """What is not null."""
    if not isinstance(body, Mapping):
        raise BodyError("body must be an object", param="body", value=body)
    for name in body:
        if name not in known:
            raise BodyError(f"{name!r} is not a parameter that noria knows", param=str(name), value=name)
    given = {name: value for name, value in body.items() if value is not None}
    if given.get("stream"):
        raise BodyError("stream is true; here an answer is given whole", param="stream", value=True)
    return given


def _model(given: Body) -> str | None:
    model = given.get("model")
    if model is not None and not isinstance(model, str):
        raise BodyError("model must be a text", param="model", value=model)
    return model


def _flag(given: Body, name: str, default: bool) -> bool:
    value = given.get(name, default)
    if not isinstance(value, bool):
        raise BodyError(f"{name} must be true or false", param=name, value=value)
    return value


def _prompts(prompt: object) -> list[str | Sequence[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(token_id, int) for token_id in prompt):
            return [prompt]
        if all(isinstance(one, str | list) for one in prompt):
            return prompt
    raise BodyError(
        "prompt must be a text, a list of token ids, or a list of at least one of these",
        param="prompt",
        value=prompt,
    )


def _tools(given: Body) -> Sequence[Mapping[str, object]] | None:
    """The tools that the model is told of."""
    tools, choice = given.get("tools"), given.get("tool_choice", "auto")
    if choice not in ("auto", "none"):
        raise BodyError(
            f"tool_choice is {choice!r}; it must be auto or none: a call cannot be forced",
            param="tool_choice",
            value=choice,
        )
    if tools is None:
        return None
    if not isinstance(tools, list):
        raise BodyError("tools must be a list", param="tools", value=tools)
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BodyError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": ..., ...}}}}',
                param="tools",
                value=tool,
            )
    return tools if tools and choice == "auto" else None


def _params(
    given: Body, max_tokens: object, num_logprobs: object, defaults: SamplingParams
) -> SamplingParams:
    values: dict[str, object] = {name: given[name] for name in _SAMPLING if name in given}
    bias = given.get("logit_bias")
    if bias is not None:
        values["logit_bias"] = _logit_bias(bias)
    rule = _rule(given.get("response_format"))
    return replace(
        defaults,
        max_tokens=max_tokens,  # type: ignore[arg-type]  # it checks all of its values itself
        logprobs=num_logprobs,  # type: ignore[arg-type]
        structured_outputs=rule,
        **values,  # type: ignore[arg-type]
    )


def _logit_bias(bias: object) -> object:
    """JSON's keys are texts."""
    if not isinstance(bias, dict):
        return bias
    read = {}
    for token_id, value in bias.items():
        try:
            read[int(token_id)] = value
        except ValueError:
            raise BodyError(
                f"logit_bias has the key {token_id!r}; it must be a token id", param="logit_bias", value=bias
            ) from None
    return read


def _rule(response_format: object) -> StructuredOutputsParams | None:
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            assert isinstance(response_format, dict)
            named = response_format.get("json_schema")
            schema = named.get("schema") if isinstance(named, dict) else None
            if isinstance(schema, dict):
                return StructuredOutputsParams(json=schema)
            raise BodyError(
                "response_format.json_schema must have a schema", param="response_format", value=named
            )
    raise BodyError(
        f"response_format has the type {kind!r}; it must be text, json_object or json_schema",
        param="response_format",
        value=response_format,
    )
