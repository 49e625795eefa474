"""How tokens are chosen: `SamplingParams`, and `noria.sampling.sampler.Sampler` over a whole step.

The sampler is not imported here: parameters must be cheap to import, and the sampler needs torch.
"""

from noria.sampling.params import SamplingParams
from noria.sampling.structured import StructuredOutputsParams

__all__ = ["SamplingParams", "StructuredOutputsParams"]
