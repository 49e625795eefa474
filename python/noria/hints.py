"""What a sender may tell of a request, for the scheduler to go by; none of it changes a token."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from noria.errors import RejectedError

_MAX_TOKENS = 2**32 - 1
_MAX_MS = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingHints:
    """Whose a request is, how long its output may get, and when its tokens are wanted.

    Attributes:
        tenant: whose account it is under the `fair` policy, and whose lengths predict its own.
        expected_tokens: output tokens that it will want, if its sender has an idea; a wrong one costs
            time, never tokens.
        ttft_target_ms: under `deadline`, when its first token is due after its submit.
        itl_target_ms: under `deadline`, how long after one token the next is due.

    Raises:
        RejectedError: a value is of the wrong type or out of its range.
    """

    tenant: str = ""
    expected_tokens: int | None = None
    ttft_target_ms: float = 1000.0
    itl_target_ms: float = 100.0

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str):
            raise RejectedError(f"tenant is {self.tenant!r}; it must be a text", value=self.tenant)
        expected = self.expected_tokens
        if expected is not None and (
            isinstance(expected, bool) or not isinstance(expected, int) or not 1 <= expected <= _MAX_TOKENS
        ):
            raise RejectedError(
                f"expected_tokens is {expected!r}; it must be an integer from 1 to {_MAX_TOKENS}, or None",
                value=expected,
                limit=_MAX_TOKENS,
            )
        for name in ("ttft_target_ms", "itl_target_ms"):
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not 0 <= value <= _MAX_MS:
                raise RejectedError(
                    f"{name} is {value!r}; it must be a number from 0 to {_MAX_MS}",
                    value=value,
                    limit=_MAX_MS,
                )

    @property
    def tenant_id(self) -> int:
        """The tenant as the core knows it: 64 bits of a hash of its name; 0 for no name."""
        if not self.tenant:
            return 0
        digest = hashlib.blake2b(self.tenant.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    @property
    def ttft_target_us(self) -> int:
        """`ttft_target_ms` in the core's unit."""
        return round(self.ttft_target_ms * 1000)

    @property
    def itl_target_us(self) -> int:
        """`itl_target_ms` in the core's unit."""
        return round(self.itl_target_ms * 1000)


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
