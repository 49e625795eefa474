"""The least time that a run's steps can take on this CPU: what its weights weigh, and what its rows multiply.

Each step reads all weights once and multiplies them by its own rows: the longer of the two counts. KV is
read once for each token that is made, and once for each prompt. Bandwidth and rates are measured with the
kernels' own instructions, just before the runs.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from noria import _core
from noria.bench.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from noria.models import Model

_MEASURED_S = 0.5
_COLUMN = {name: index for index, name in enumerate(_core.RECORD_FIELDS)}


@dataclass(frozen=True, slots=True)
class Limit:
    """What bounds a model's steps on a machine.

    Attributes:
        bytes_per_s: that threads read from memory.
        operations_per_s: multiplications and additions, each counted.
        num_body_weights: that every token is multiplied by.
        num_head_weights: that every row that samples is multiplied by.
        bytes_per_weight: as they are stored, mean.
        kv_bytes_per_token: of all layers.
    """

    bytes_per_s: float
    operations_per_s: float
    num_body_weights: int
    num_head_weights: int
    bytes_per_weight: float
    kv_bytes_per_token: int

    def seconds(self, records: npt.NDArray[np.int64], workload: Workload) -> float:
        """The least time of the steps that answered the workload; `records` are theirs, `[n, fields]`."""
        num_tokens = records[:, _COLUMN["num_tokens"]]
        num_sampled = records[:, _COLUMN["num_sample_rows"]]
        num_weights = self.num_body_weights + self.num_head_weights * (num_sampled > 0)
        reading = num_weights * self.bytes_per_weight / self.bytes_per_s
        multiplied = num_tokens * self.num_body_weights + num_sampled * self.num_head_weights
        multiplying = 2 * multiplied / self.operations_per_s
        prompts, outputs = workload.prompt_lengths, workload.output_lengths
        num_kv_tokens = int((prompts * outputs + outputs * (outputs - 1) // 2).sum())
        kv_reading = num_kv_tokens * self.kv_bytes_per_token / self.bytes_per_s
        return float(np.maximum(reading, multiplying).sum()) + kv_reading


def measure_limit(
    model: "Model", path: "Path", quantization: str | None, kv_cache_dtype: str = "auto"
) -> Limit:
    """Measures the machine, for a second, and counts the model's weights.

    Args:
        model: on the CPU.
        path: of its files.
        quantization: that its weights were rounded by; None: none.
        kv_cache_dtype: of the KV cache; `auto`: the model's.
    """
    from noria.kv_cache import kv_bytes_per_block
    from noria.kv_format import kv_dtype
    from noria.loading.sizes import num_parameters

    config = model.config
    num_embedded = config.vocab_size * config.hidden_size
    num_body = num_parameters(path, config) - num_embedded * (1 if config.tie_word_embeddings else 2)
    num_weights = num_body + num_embedded
    if model.program is None:
        bytes_per_weight = float(model.dtype.itemsize)
    else:
        # Beside the weights that are multiplied a program holds the embedding, in float32.
        bytes_per_weight = (model.program.core.num_bytes - 4 * num_embedded) / num_weights
    rate = _core.measure_int8 if quantization == "int8" else _core.measure_fma
    return Limit(
        bytes_per_s=_core.measure_bandwidth(_MEASURED_S) * 1e9,
        operations_per_s=rate(_MEASURED_S) * 1e9,
        num_body_weights=num_body,
        num_head_weights=num_embedded,
        bytes_per_weight=bytes_per_weight,
        kv_bytes_per_token=kv_bytes_per_block(config, 1, kv_dtype(kv_cache_dtype, model.dtype)),
    )
