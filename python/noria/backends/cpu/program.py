"""A model's forward as a program of noria-cpu."""

import numpy as np
import numpy.typing as npt
import torch

from noria._core import CpuProgram, Expander
from noria.backends.ops import StepInputs
from noria.kv_cache import KvCache
from noria.runner.step import StepView


class RecordedForward:
    """Runs steps of a program over a KV cache, which stays the tensor's memory.

    Attributes:
        core: the program.
    """

    def __init__(self, program: CpuProgram) -> None:
        self.core = program
        self._is_first = True
        self._logits = np.empty((0, program.num_logits_columns), dtype=np.float32)

    @property
    def stage_us(self) -> dict[str, int]:
        """Microseconds so far by what took them: "attention", and each kind of product and op by its name."""
        totals: dict[str, int] = {}
        for name, ns in self.core.stage_ns:
            totals[name] = totals.get(name, 0) + ns
        return {name: ns // 1000 for name, ns in totals.items()}

    def run(self, inputs: StepInputs, kv: KvCache) -> torch.Tensor:
        """Logits `[num_logits, vocab_size]` float32 of one step, whose K and V are in the cache then."""
        self._begin()
        logits = torch.empty(len(inputs.logits_indices), self.core.num_logits_columns)
        self.core.run(
            input_ids=inputs.input_ids.numpy(),
            positions=inputs.positions.numpy(),
            slot_mapping=inputs.slot_mapping.numpy(),
            cu_seqlens_q=inputs.cu_seqlens_q.numpy(),
            context_lens=inputs.context_lens.numpy(),
            row_seats=inputs.row_seats.numpy(),
            block_tables=inputs.block_tables.numpy(),
            logits_indices=inputs.logits_indices.numpy(),
            kv=kv.host_bytes,
            kv_dtype=kv.dtype_name,
            logits=logits.numpy(),
        )
        return logits

    def run_expanded(self, expander: Expander, view: StepView, kv: KvCache) -> npt.NDArray[np.float32]:
        """The same of the step that was expanded last. The next call overwrites the logits."""
        self._begin()
        num_logits = view.num_logits
        if num_logits > len(self._logits):
            self._logits = np.empty((num_logits, self.core.num_logits_columns), dtype=np.float32)
        logits = self._logits[:num_logits]
        self.core.run_expanded(
            expander,
            num_tokens=view.num_tokens,
            num_rows=view.num_rows,
            num_logits=num_logits,
            kv=kv.host_bytes,
            kv_dtype=kv.dtype_name,
            logits=logits,
        )
        return logits

    def _begin(self) -> None:
        if self._is_first:
            # torch's threads would spin beside the program's; sampling, in this thread, needs none.
            torch.set_num_threads(1)
            self._is_first = False
