"""What a seat's logits edits depend on beside the sampling parameters."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


def _no_ids() -> npt.NDArray[np.int64]:
    return np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class SeatContext:
    """Token ids that belong to a request; empty where its parameters do not need them.

    Attributes:
        stop_token_ids: what ends it, and is therefore banned before `min_tokens`.
        bad_words: token ids of its bad words.
        prompt_token_ids: `[num_prompt_tokens]` int64.
        output_token_ids: `[n]` int64: what it has sampled before it gained this seat.
    """

    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_token_ids: npt.NDArray[np.int64] = field(default_factory=_no_ids)
    output_token_ids: npt.NDArray[np.int64] = field(default_factory=_no_ids)


NO_CONTEXT = SeatContext()
