"""What the engine asks of a runner, and what a runner asks of the code that computes a step.

The engine enqueues two jobs a step, forward and sample, and takes results in order. A runner runs
jobs strictly in the order in which they were enqueued; it knows nothing of the core but the step
buffer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from noria.errors import NoriaError
from noria.sampling.context import NO_CONTEXT, SeatContext

if TYPE_CHECKING:
    import torch

    from noria.runner.step import StepView
    from noria.sampling.params import SamplingParams


class DeviceLostError(NoriaError):
    """The device cannot compute any more; every request ends with an error."""


@dataclass(frozen=True, slots=True)
class SeatInit:
    """What a runner has to know of a request that gains a seat; the rest is in the step buffer.

    Attributes:
        sampling_params: how its tokens are chosen.
        seed: signed 64-bit; the noise of a token is a function of it and of the output position.
        num_prompt_tokens: tokens of its prompt; positions from there on are output.
        context: token ids that its logits edits depend on; its prompt's, if these are scored.
    """

    sampling_params: "SamplingParams"
    seed: int
    num_prompt_tokens: int
    context: SeatContext = NO_CONTEXT

    @property
    def reads_output(self) -> bool:
        """Whether a seat that it gains back must be told what it has sampled."""
        return self.sampling_params.has_penalty or bool(self.context.bad_words)

    @property
    def is_scored(self) -> bool:
        """Whether log probabilities of its tokens are asked for."""
        params = self.sampling_params
        return params.logprobs is not None or params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class HostMasks:
    """What the host does to the logits of `HOST_MASKED` rows, between forward and sample.

    A row that is in neither `rows` nor `edits` samples nothing.

    Attributes:
        rows: `[num_masks]` int64: rows of the step, each once.
        allowed: `[num_masks, vocab_size]` bool: ids that may be sampled.
        edits: row → a function from its logits `[vocab_size]` to new ones; one that raises ends
            its own request only.
    """

    rows: npt.NDArray[np.int64]
    allowed: npt.NDArray[np.bool_]
    edits: Mapping[int, "Callable[[torch.Tensor], torch.Tensor]"] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MaskRequest:
    """Rows of one step whose logits the host edits before they are sampled.

    All tokens before these positions have been given out as events. Rows of finished requests are
    left out.

    Attributes:
        step: the step's id.
        rows: `[n]` int64: the keys to use in `HostMasks`.
        handles: `[n]` int64: whose rows they are.
        output_positions: `[n]` int64: of the tokens to be sampled.
    """

    step: int
    rows: npt.NDArray[np.int64]
    handles: npt.NDArray[np.int64]
    output_positions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafts:
    """Guessed tokens for the next step's decode rows; those that cannot be used are dropped.

    Attributes:
        handles: `[n]` int64: for whom.
        counts: `[n]` int32: how many for each.
        ids: `[counts.sum()]` int32: the guesses, one after another; None if the device makes them.
    """

    handles: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32] | None = None


MaskProvider = Callable[[MaskRequest], HostMasks]
DraftProvider = Callable[[], Drafts | None]


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log probabilities of some of a step's tokens.

    Attributes:
        rows: `[n]` int64: whose tokens; rows of the step.
        positions: `[n]` int64: in the output, or in the prompt, from 0.
        ids: `[n, 1 + k]` int64: the token, then the `k` most likely ones.
        values: `[n, 1 + k]` float32: their log probabilities.
        ranks: `[n]` int64: the token's rank, from 1.
    """

    rows: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    values: npt.NDArray[np.float32]
    ranks: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SampledIds:
    """A step's tokens.

    Attributes:
        num_ids: `[num_rows]` int32: how many each row sampled; 0 on a sampling row ends its request.
        ids: `[num_ids.sum()]` int32: in row order.
        device_us: what the device took, forward and sample together; None where the host's clock
            over both jobs says it.
        output_scores: of the tokens themselves, where asked for.
        prompt_scores: of prompt tokens in the step, where asked for.
        interrupt: a KeyboardInterrupt that a logits edit raised; its own request ends all the same.
    """

    num_ids: npt.NDArray[np.int32]
    ids: npt.NDArray[np.int32]
    device_us: int | None = None
    output_scores: TokenScores | None = None
    prompt_scores: TokenScores | None = None
    interrupt: KeyboardInterrupt | None = None


class PendingIds(Protocol):
    """Tokens that the device may still be sampling."""

    def wait(self) -> SampledIds:
        """Waits for them; raises what the device reports."""


class Ready:
    """Tokens that wait for nothing."""

    __slots__ = ("_sampled",)

    def __init__(self, sampled: SampledIds) -> None:
        self._sampled = sampled

    def wait(self) -> SampledIds:
        return self._sampled


class Executor(Protocol):
    """Computes steps. One thread calls it; for each step `expand`, `forward`, `sample` in turn."""

    def expand(self, view: "StepView", inits: Sequence[SeatInit]) -> None:
        """Applies the buffer to the seat state: `inits[i]` belongs to the i-th gained seat."""

    def forward(self, view: "StepView") -> None:
        """Computes the logits of the rows that sample."""

    def sample(self, view: "StepView", masks: HostMasks | None) -> PendingIds:
        """Samples from them, and keeps each seat's last token for the next step."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step.

    Attributes:
        step: its id.
        sampled: its tokens; None if it failed.
        error: what was raised, if it failed.
        is_fatal: nothing can be computed any more.
        device_us: time of forward and sample on the device.
        expand_us: host time of expansion and seat state.
        forward_us: host time of the forward; on a GPU, of its launches.
        sample_us: host time of the sampling; on a GPU, of its launches.
        forward_wait_us: the runner waited this long for the step's first job.
        sample_wait_us: and this long between its jobs.
    """

    step: int
    sampled: SampledIds | None
    error: BaseException | None = None
    is_fatal: bool = False
    device_us: int = 0
    expand_us: int = 0
    forward_us: int = 0
    sample_us: int = 0
    forward_wait_us: int = 0
    sample_wait_us: int = 0


class KvMemory(Protocol):
    """Memory that an engine resizes while no step is on its way."""

    num_blocks: int

    def resize(self, num_blocks: int) -> None:
        """Keeps blocks up to `num_blocks`, and gives back the memory of others, or takes more.

        Raises:
            ConfigError: the system does not give so much; nothing has changed.
        """


class StepRunner(Protocol):
    """Runs steps in order. The engine thread alone calls it."""

    def forward(self, step: int, buffer_index: int, inits: Sequence[SeatInit]) -> None:
        """Enqueues a step's expansion and forward.

        Args:
            step: its id, above those before.
            buffer_index: which buffer of the ring holds it; not to be written before its result
                is taken or it is discarded.
            inits: one for each gained seat, in the buffer's order.
        """

    def sample(self, step: int, masks: HostMasks | None = None) -> None:
        """Enqueues the sampling of the step whose forward was enqueued last."""

    def next_result(
        self, *, block: bool, while_waiting: Callable[[], None] | None = None
    ) -> StepResult | None:
        """The next result, in step order; None if there is none yet and `block` is false.

        `while_waiting` is called at least once a second of a wait; what it raises ends the wait, and no
        result is lost. After a result with an error nothing runs until `discard_from`.
        """

    def discard_from(self, step: int) -> None:
        """Forgets `step` and all after it.

        When this returns, none of their jobs runs or will run, no result of theirs will come, and
        their buffers may be written.
        """

    def close(self) -> None:
        """Drops what was not begun, waits for the job that runs, and stops. Idempotent."""
