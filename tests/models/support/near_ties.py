"""Greedy tokens held against a reference's logits: the same, or first different at a near tie."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from noria import RequestOutput

NEAR_TIE = 1e-3
"""Where activations are float32."""


@dataclass
class Agreement:
    """How answers agree with a reference.

    Attributes:
        near_tie: of its two best logits, where rounding may choose between them.
        num_same: answers that are the reference's.
        num_near_ties: those that are not, from a near tie on.
    """

    near_tie: float = NEAR_TIE
    num_same: int = 0
    num_near_ties: int = 0

    def add(self, token_ids: Sequence[int], logits: torch.Tensor) -> None:
        """Takes an answer; it must be the reference's, up to a near tie.

        Args:
            token_ids: of the answer.
            logits: `[len(token_ids), vocab_size]`: what the reference says at each place, given the answer's
                own tokens before it.
        """
        assert len(token_ids) == len(logits) > 0
        (differs,) = (logits.argmax(-1) != torch.tensor(list(token_ids))).nonzero(as_tuple=True)
        if len(differs) == 0:
            self.num_same += 1
            return
        best = logits[differs[0]].topk(2)
        assert best.values[0] - best.values[1] < self.near_tie, f"token {int(differs[0])} is another"
        assert token_ids[int(differs[0])] == best.indices[1]
        self.num_near_ties += 1

    def __str__(self) -> str:
        return f"{self.num_same} answers identical, {self.num_near_ties} first different at a near tie"


def agreement(
    peer: PreTrainedModel, outputs: Sequence[RequestOutput], at_once: int, near_tie: float
) -> Agreement:
    """Holds outputs against a decoder of transformers that has `model` and `lm_head`, some at once."""
    agreed = Agreement(near_tie)
    for start in range(0, len(outputs), at_once):
        group = outputs[start : start + at_once]
        texts = [[*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]] for output in group]
        longest = max(map(len, texts))
        # Attention looks back only, so what pads a text on its right changes nothing before it.
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
        with torch.inference_mode():
            hidden = peer.model(padded).last_hidden_state
            for output, states in zip(group, hidden, strict=True):
                ids = output.outputs[0].token_ids
                agreed.add(ids, peer.lm_head(states[len(output.prompt_token_ids) - 1 :][: len(ids)]))
    return agreed
