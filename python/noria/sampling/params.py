"""What a request may ask of the sampler, by vLLM's names and with vLLM's meaning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from noria.errors import SamplingParamsError
from noria.sampling import checks
from noria.sampling.structured import StructuredOutputsParams

if TYPE_CHECKING:
    import torch

LogitsProcessor = Callable[[list[int], "torch.Tensor"], "torch.Tensor"]
"""From the output's token ids so far and a row of logits, `[vocab_size]`, to a row that replaces it."""

_GREEDY_BELOW = 1e-5
"""vLLM's `_SAMPLING_EPS`: a temperature below it means the most likely token."""

_MAX_N = 16384
"""As vLLM: more is a mistake, and each answer is a request."""

_MIN_SEED = -(2**63)
_MAX_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen, and when it ends.

    The order is vLLM's. Logits are edited: grammar and processors, `allowed_token_ids`, `bad_words`,
    `min_tokens`, `logit_bias`, penalties. They are divided by the temperature; then `min_p`, `top_k` and
    `top_p` each drop tokens, and the token is drawn from what is left, in proportion to its probability.

    Attributes:
        n: answers to each prompt, each with noise of its own.
        temperature: divides the logits; 0 (in fact anything below 1e-5) takes the most likely token.
        top_k: keeps this many of the most likely tokens, and what ties with the last; 0 or −1 keeps all.
        top_p: keeps the most likely tokens until they hold this much of the probability; in (0, 1].
        min_p: drops tokens less likely than this times the most likely one; in [0, 1].
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens that the prompt
            or the output has; above 0, and 1 does nothing.
        presence_penalty: taken off the logits of tokens that the output has; −2 to 2.
        frequency_penalty: taken off as often as the output has the token; −2 to 2.
        logit_bias: token id → what is added to its logit, −100 to 100.
        allowed_token_ids: no other token is sampled.
        bad_words: texts that the output never has (their token ids, with and without a space before them).
        seed: makes the tokens repeatable; the engine chooses one where it is None. A signed 64-bit integer.
        max_tokens: most tokens to generate; None generates until the context is full.
        min_tokens: before so many tokens no stop and no end of sequence ends the request.
        stop: texts that end it; the text is cut before the one that ends first.
        stop_token_ids: tokens that end the request, beside the model's end of sequence.
        include_stop_str_in_output: the text keeps what stopped it.
        ignore_eos: goes on past the model's end of sequence.
        skip_special_tokens: leaves special tokens out of the text.
        detokenize: makes text at all.
        logprobs: so many of the most likely tokens are told with each token; −1 tells all; None none.
        prompt_logprobs: the same for the prompt's tokens; such a request reads no prefix cache.
        logits_processors: functions of (output ids, logits row) → logits row, one after another. Each is a
            Python call a token while the device waits: 64 of them that do nothing take some milliseconds.
        structured_outputs: a rule that the answer's text obeys.

    Raises:
        SamplingParamsError: a value is of the wrong type or out of its range.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._read_numbers()
        self._read_lists()
        self._read_ends()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            checks.boolean(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise checks.error("detokenize", self.detokenize, "True where stop has texts", True)
        rule = self.structured_outputs
        if rule is not None and not isinstance(rule, StructuredOutputsParams):
            raise checks.error("structured_outputs", rule, "StructuredOutputsParams or None")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen; this is its constructor

    def _read_numbers(self) -> None:
        self._set("n", checks.integer_from("n", self.n, 1, "1 or more"))
        if self.n > _MAX_N:
            raise checks.error("n", self.n, f"at most {_MAX_N}", _MAX_N)
        temperature = checks.real("temperature", self.temperature, "a finite number, 0 or more")
        if not (checks.is_finite(temperature) and temperature >= 0.0):
            raise checks.error("temperature", self.temperature, "a finite number, 0 or more", 0.0)
        self._set("temperature", temperature)
        top_p = checks.real("top_p", self.top_p, "a number above 0, up to 1")
        if not 0.0 < top_p <= 1.0:
            raise checks.error("top_p", self.top_p, "above 0 and at most 1", 1.0)
        self._set("top_p", top_p)
        self._set("min_p", checks.real_in("min_p", self.min_p, 0.0, 1.0))
        self._set("top_k", checks.integer_from("top_k", self.top_k, -1, "1 or more (0 or -1 turns it off)"))
        repetition = checks.real("repetition_penalty", self.repetition_penalty, "a finite number above 0")
        if not (checks.is_finite(repetition) and repetition > 0.0):
            raise checks.error("repetition_penalty", self.repetition_penalty, "a finite number above 0", 0.0)
        self._set("repetition_penalty", repetition)
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, checks.real_in(name, getattr(self, name), -2.0, 2.0))
        if self.seed is not None:
            seed = checks.integer("seed", self.seed, "a signed 64-bit integer or None")
            if not _MIN_SEED <= seed <= _MAX_SEED:
                expected = f"a signed 64-bit integer ({_MIN_SEED} to {_MAX_SEED})"
                raise checks.error("seed", seed, expected, _MAX_SEED)
            self._set("seed", seed)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                self._set(name, checks.integer_from(name, value, -1, "0 or more (-1 tells all), or None"))

    def _read_lists(self) -> None:
        if self.logit_bias is not None:
            self._set("logit_bias", checks.biases("logit_bias", self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = checks.token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise checks.error("allowed_token_ids", [], "at least one token id, or None", 1)
            self._set("allowed_token_ids", allowed)
        self._set("bad_words", checks.texts("bad_words", self.bad_words))
        if self.logits_processors is not None:
            processors = self.logits_processors
            if not isinstance(processors, Sequence) or not all(callable(given) for given in processors):
                raise checks.error("logits_processors", processors, "a list of functions, or None")
            self._set("logits_processors", tuple(processors))

    def _read_ends(self) -> None:
        if self.max_tokens is not None:
            expected = "an integer, 1 or more, or None"
            max_tokens = checks.integer("max_tokens", self.max_tokens, expected)
            if max_tokens < 1:
                raise checks.error("max_tokens", max_tokens, "1 or more", 1)
            self._set("max_tokens", max_tokens)
        self._set("min_tokens", checks.integer_from("min_tokens", self.min_tokens, 0, "0 or more"))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            expected = f"at most max_tokens, {self.max_tokens}"
            raise checks.error("min_tokens", self.min_tokens, expected, self.max_tokens)
        self._set("stop", checks.texts("stop", self.stop))
        self._set("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """The most likely token is taken, so no noise is needed."""
        return self.temperature < _GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        """A token's logit depends on what the prompt or the output has."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def edits_on_host(self) -> bool:
        """Its logits are edited by Python between forward and sample."""
        return bool(self.logits_processors) or self.structured_outputs is not None


def default_params(of_model: Mapping[str, float]) -> SamplingParams:
    """The parameters of a request that brings none.

    Args:
        of_model: what the model's authors sample with, by name; the rest is as ever.

    Raises:
        SamplingParamsError: the model's files say what no request may.
    """
    values = dict(of_model)
    top_k = values.pop("top_k", 0)
    try:
        return SamplingParams(**values, top_k=int(top_k))  # type: ignore[arg-type]
    except SamplingParamsError as error:
        raise SamplingParamsError(
            f"generation_config.json of the model: {error}", value=error.value, limit=error.limit
        ) from error
