"""Any other causal decoder that transformers has: its own modules, over noria's paged attention.

Such a module sees one ragged stream, as a text of `num_tokens` tokens whose positions jump; attention, the
one op that looks across tokens, is replaced by a function that stores to and reads from the paged cache. So
there is no padding, and the runner sees no difference. What a module computes between is run as it is.

transformers is the extra `hf`, and is imported when a model needs it.
"""

import inspect
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from noria.backends.ops import Scope
from noria.backends.torch.ops import TorchOps
from noria.errors import ModelError
from noria.models.config import ModelConfig, RopeConfig

_NAME = "noria_paged"
_FIXED_ROPES = (None, "default", "linear", "llama3", "yarn", "proportional")
"""Kinds whose frequencies do not hang on the text at hand, which would make cached K wrong."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_FAILURES = (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError)
"""What transformers raises for files that it does not take."""


class _Attends(Protocol):
    """What the attention function of the module that runs now hands its tensors to."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int, scope: Scope, /
    ) -> torch.Tensor:
        """`[num_tokens, num_heads * head_dim]` of `[num_tokens, heads, head_dim]` each."""


_RUNNING: ContextVar[_Attends] = ContextVar("noria_attends")
"""Not every module passes its caller's arguments down to its attention; all run in their caller's context."""


class _Probe:
    """Writes down the shapes of K and V of each layer, and attends to nothing."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, ...]] = {}

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, _value: torch.Tensor, layer: int, _scope: Scope
    ) -> torch.Tensor:
        self.shapes[layer] = tuple(key.shape[1:])
        return torch.zeros_like(query).flatten(1)


class ForeignNetwork:
    """A module of transformers behind the interface of noria's own networks."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._picks = "logits_to_keep" in inspect.signature(module.forward).parameters

    def forward(self, ops: Any) -> torch.Tensor:
        """One step's logits, `[num_logits, vocab_size]`; it runs in torch alone."""
        assert isinstance(ops, TorchOps)
        inputs = ops.inputs
        logits = self._run(ops, inputs.input_ids, inputs.positions, inputs.logits_indices)
        return logits if logits.dtype == torch.float64 else logits.float()

    def probed(self, config: ModelConfig, path: Path) -> ModelConfig:
        """The configuration, with the shape that K and V turn out to have.

        Raises:
            ModelError: not every layer attends, or not alike, or not through transformers' interface.
        """
        probe = _Probe()
        one = torch.zeros(1, dtype=torch.int64, device=next(self._module.parameters()).device)
        try:
            with torch.inference_mode():
                vocab_size = self._run(probe, one, one, one).shape[-1]
        except _FAILURES as error:
            raise ModelError(f"{path}: transformers cannot run it ({_first_line(error)})") from None
        layers, shapes = sorted(probe.shapes), set(probe.shapes.values())
        if layers != list(range(config.num_layers)):
            raise ModelError(
                f"{path}: {len(layers)} of the {config.num_layers} layers of a {config.architecture} attend "
                "through transformers' attention interface; noria needs all"
            )
        if len(shapes) > 1:
            raise ModelError(f"{path}: layers with K of different shapes {sorted(shapes)} are not supported")
        num_kv_heads, head_dim = shapes.pop()
        return replace(config, num_kv_heads=num_kv_heads, head_dim=head_dim, vocab_size=vocab_size)

    def _run(
        self, running: _Attends, ids: torch.Tensor, positions: torch.Tensor, wanted: torch.Tensor
    ) -> torch.Tensor:
        arguments: dict[str, Any] = {"logits_to_keep": wanted} if self._picks else {}
        token = _RUNNING.set(running)
        try:
            out = self._module(
                input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments
            )
        finally:
            _RUNNING.reset(token)
        logits: torch.Tensor = out.logits[0]
        return logits if self._picks else logits.index_select(0, wanted)


def read_foreign_config(directory: Path, architecture: str) -> ModelConfig | None:
    """The configuration of a model that transformers runs; None where it does not, or is not installed.

    The shape of K and V is what the file says; `ForeignNetwork.probed` knows what it is.

    Raises:
        ModelError: transformers runs it, but noria cannot let it.
    """
    try:
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return None
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        return None
    path = directory / "config.json"
    try:
        config: Any = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except _FAILURES as error:
        raise ModelError(f"{path}: transformers does not read it ({_first_line(error)})") from None
    if MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) != architecture:
        return None
    _refuse_what_cannot_be_paged(path, config)

    def integer(name: str, default: int | None = None) -> int:
        value = getattr(config, name, None)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{path}: {name!r} should be a whole number of at least 1, found {value!r}")
        return value

    num_heads, hidden_size = integer("num_attention_heads"), integer("hidden_size")
    head_dim = integer("head_dim", max(hidden_size // num_heads, 1))
    eos = config.eos_token_id
    return ModelConfig(
        architecture=architecture,
        num_layers=integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=integer("intermediate_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=head_dim,
        vocab_size=integer("vocab_size"),
        max_position_embeddings=integer("max_position_embeddings"),
        rms_norm_eps=1e-6,
        rope=RopeConfig(),
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        bos_token_id=config.bos_token_id if isinstance(config.bos_token_id, int) else None,
        is_foreign=True,
    )


def _refuse_what_cannot_be_paged(path: Path, config: Any) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{path}: an encoder-decoder ({config.model_type}) is not supported")
    for kind in getattr(config, "layer_types", None) or ():
        if kind not in _LAYER_TYPES:
            raise ModelError(
                f"{path}: layers of {kind!r} are not supported; supported: {', '.join(_LAYER_TYPES)}"
            )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in rope.values() if isinstance(part, dict)] or [rope]
    for part in parts:
        kind = part.get("rope_type", part.get("type"))
        if kind not in _FIXED_ROPES:
            raise ModelError(
                f"{path}: RoPE kind {kind!r} is not supported in a model that transformers runs, which would "
                "choose its frequencies anew for each step"
            )


def load_foreign(
    directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[ModelConfig, ForeignNetwork]:
    """Loads a module, and finds the shape of its K and V.

    Raises:
        ModelError: transformers does not load it, or it does not attend as noria needs it to.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(_NAME, _paged_attention)
    AttentionMaskInterface.register(_NAME, _no_mask)
    path = directory / "config.json"
    try:
        module: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=_NAME,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except _FAILURES as error:
        raise ModelError(f"{path}: transformers does not load it ({_first_line(error)})") from None
    if "position_ids" not in inspect.signature(module.forward).parameters:
        raise ModelError(f"{path}: a {config.architecture} takes no positions, so it cannot run ragged")
    network = ForeignNetwork(module.to(device).eval())
    return network.probed(config, path), network


def _paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_ignored: object,
) -> tuple[torch.Tensor, None]:
    """`[1, heads, num_tokens, head_dim]` in, `[1, num_tokens, heads, head_dim]` out, as transformers asks."""
    if s_aux is not None:
        raise ValueError("attention sinks are not supported")
    if key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        raise ValueError("heads of K and V of different sizes are not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    scope = Scope(scale, sliding_window or None, softcap)
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out = _RUNNING.get().attend(q, k, v, module.layer_idx, scope)
    return out.view(1, *q.shape), None


def _no_mask(*_arguments: object, **_named: object) -> None:
    """Which tokens see which is for the paged attention to say."""


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
