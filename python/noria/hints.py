"""What a sender may tell of a request, for the scheduler to go by; none of it changes a token."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from noria.errors import RejectedError

_MAX_TOKENS = 2**32 - 1
_MAX_MS = 2**40
_MAX_S = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingHints:
    """Whose a request is, how long its output may get, and when its tokens are wanted.

    Attributes:
        tenant: whose account it is under the `fair` policy, and whose lengths predict its own.
        expected_tokens: output tokens that it will want, if its sender has an idea; a wrong one costs
            time, never tokens.
        ttft_target_ms: under `deadline`, when its first token is due after its submit.
        itl_target_ms: under `deadline`, how long after one token the next is due.
        adapter: what it runs with beside the model, by name; `EngineConfig.max_adapters` bounds how many
            distinct ones run at once, and KV is shared only within one.
        expires_at: when it ends, `expired`, with what it has by then: seconds since 1970, as of `time.time`.

    Raises:
        RejectedError: a value is of the wrong type or out of its range.
    """

    tenant: str = ""
    expected_tokens: int | None = None
    ttft_target_ms: float = 1000.0
    itl_target_ms: float = 100.0
    adapter: str = ""
    expires_at: float | None = None

    def __post_init__(self) -> None:
        for name in ("tenant", "adapter"):
            text = getattr(self, name)
            if not isinstance(text, str):
                raise RejectedError(f"{name} is {text!r}; it must be a text", value=text)
        expected = self.expected_tokens
        if expected is not None and (
            isinstance(expected, bool) or not isinstance(expected, int) or not 1 <= expected <= _MAX_TOKENS
        ):
            raise RejectedError(
                f"expected_tokens is {expected!r}; it must be an integer from 1 to {_MAX_TOKENS}, or None",
                value=expected,
                limit=_MAX_TOKENS,
            )
        _require_number("ttft_target_ms", self.ttft_target_ms, _MAX_MS)
        _require_number("itl_target_ms", self.itl_target_ms, _MAX_MS)
        if self.expires_at is not None:
            _require_number("expires_at", self.expires_at, _MAX_S)

    @property
    def tenant_id(self) -> int:
        """The tenant as the core knows it: 64 bits of a hash of its name; 0 for no name."""
        return _id_of(self.tenant)

    @property
    def adapter_id(self) -> int:
        """The adapter as the core knows it, likewise."""
        return _id_of(self.adapter)

    @property
    def ttft_target_us(self) -> int:
        """`ttft_target_ms` in the core's unit."""
        return round(self.ttft_target_ms * 1000)

    @property
    def itl_target_us(self) -> int:
        """`itl_target_ms` in the core's unit."""
        return round(self.itl_target_ms * 1000)

    def expiry_us(self, now_us: int) -> int | None:
        """`expires_at` on the core's clock, which says `now_us`."""
        if self.expires_at is None:
            return None
        return max(0, now_us + round((self.expires_at - time.time()) * 1e6))


def _id_of(name: str) -> int:
    if not name:
        return 0
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def _require_number(name: str, value: object, most: int) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= most:  # type: ignore[operator]  # it is a number by then
        raise RejectedError(
            f"{name} is {value!r}; it must be a number from 0 to {most}", value=value, limit=most
        )


NO_HINTS = SchedulingHints()


def spread_hints(
    hints: SchedulingHints | Sequence[SchedulingHints] | None, num_prompts: int
) -> Sequence[SchedulingHints]:
    """One a prompt.

    Raises:
        RejectedError: they are something else, or as many as there are prompts were not given.
    """
    if hints is None:
        hints = NO_HINTS
    if isinstance(hints, SchedulingHints):
        return [hints] * num_prompts
    if not isinstance(hints, Sequence) or not all(isinstance(hint, SchedulingHints) for hint in hints):
        raise RejectedError(
            f"hints is {hints!r}; it must be SchedulingHints, or a list of one for each prompt", value=hints
        )
    if len(hints) != num_prompts:
        raise RejectedError(
            f"{len(hints)} hints were given for {num_prompts} prompts", value=len(hints), limit=num_prompts
        )
    return hints
