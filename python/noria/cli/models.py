"""`noria models`: what is supported, and what one model takes of memory."""

from collections import Counter
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.options import KV_DTYPE_HELP, MODEL_HELP, DType, KvDType, packaged_model
from noria.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from noria.models import ModelConfig

EXAMPLES = """Examples:

  noria models
  noria models smollm2 --memory 8GiB
  noria models Qwen/Qwen3-0.6B --dtype bfloat16
"""

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_SHORT_CONTEXT = 2048


def models(
    model: Annotated[
        str | None,
        Parameter(show_default=False, help=f"{MODEL_HELP} Of what a hub has, headers are fetched."),
    ] = None,
    /,
    *,
    dtype: Annotated[
        DType,
        Parameter(help="Number format of weights. auto: bfloat16 where the hardware computes it."),
    ] = "auto",
    kv_cache_dtype: Annotated[KvDType, Parameter(help=KV_DTYPE_HELP)] = "auto",
    device: Annotated[str, Parameter(help="Where it would run: auto, cpu, cuda or cuda:N.")] = "auto",
    memory: Annotated[
        str | None,
        Parameter(
            help="What is to hold weights and KV cache, as 8GiB or 500MB. [default: what is available now]",
            allow_leading_hyphen=True,
        ),
    ] = None,
) -> None:
    """List what is supported; of one model, show its shape, its memory, and what fits.

    Only headers are read: nothing is loaded.
    """
    budget = None if memory is None else parse_bytes(memory, "--memory")
    if model is None:
        given = {"--dtype": dtype, "--kv-cache-dtype": kv_cache_dtype, "--device": device, "--memory": memory}
        for flag, value in given.items():
            if value not in (None, "auto"):
                raise ConfigError(f"{flag} is {value}; it needs a MODEL", name=flag, value=value)
    facts = supported() if model is None else about(model, dtype, kv_cache_dtype, device, budget)
    width = max(len(name) for name in facts)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def supported() -> dict[str, str]:
    """What noria runs, by name, in words."""
    import importlib.util

    from noria.models.registry import FAMILIES

    facts = {
        family.title: f"{', '.join(family.architectures)}; in GGUF: {family.gguf_architecture}"
        for family in FAMILIES
    }
    has_extra = importlib.util.find_spec("transformers") is not None
    how = "installed" if has_extra else "not installed: pip install 'noria[hf]'"
    return facts | {
        "others": f"causal decoders that transformers runs by its attention interface ({how})",
        "weights": "safetensors of F64, F32, F16 and BF16",
        "GGUF": "Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K and what else the gguf package dequantises",
        "RoPE": "default, linear, dynamic, yarn, longrope, llama3",
    }


def about(
    model: str, dtype: DType, kv_cache_dtype: KvDType, device: str, budget: int | None
) -> dict[str, str]:
    """What there is to know of one model before it is loaded, by name, in words.

    Args:
        model: as a user names it.
        dtype: of weights.
        kv_cache_dtype: of the KV cache; `auto`: the same.
        device: where it would run.
        budget: bytes for both; None: what is available.
    """
    from noria.bench.report import format_bytes
    from noria.config import torch_device
    from noria.kv_cache import kv_bytes_per_block
    from noria.kv_format import kv_dtype, stored_formula
    from noria.loading import read_model_config
    from noria.loading.dtype import chosen_dtype
    from noria.loading.hub_headers import described_model
    from noria.loading.sizes import num_parameters
    from noria.models.registry import implementation

    asked = packaged_model(model)
    where = torch_device(device)
    chosen, reason = chosen_dtype(dtype, where)
    with described_model(asked) as path:
        config = read_model_config(path)
        count = num_parameters(path, config)
        by_format, backend = _weight_bytes(path, config, count, chosen, where)
    weight_bytes = sum(by_format.values())
    parts = [f"{format_bytes(num_bytes)} of {stored}" for stored, num_bytes in by_format.items()]
    weights = f"{count / 1e6:,.1f} million, {format_bytes(weight_bytes)}"
    weights += f" ({', '.join(parts)})" if len(parts) > 1 else f" of {next(iter(by_format))}"
    stored = kv_dtype(kv_cache_dtype, chosen)
    token_bytes = kv_bytes_per_block(config, 1, stored)
    return {
        "model": str(asked),
        "run by": implementation(config),
        "layers": f"{config.num_layers} of {config.hidden_size}, MLP of {config.intermediate_size}",
        "attention": f"{config.num_heads} heads, {config.num_kv_heads} KV heads of {config.head_dim}",
        "windows": _windows(config),
        "RoPE": "transformers' own" if config.is_foreign else _rope(config),
        "vocabulary": f"{config.vocab_size:,} tokens",
        "context": f"{config.max_position_embeddings:,} tokens",
        "sampling": _sampling(config),
        "dtype": reason,
        "backend": backend,
        "weights": weights,
        "KV of a token": f"{format_bytes(token_bytes)} (2 · {config.num_layers} layers · "
        f"{config.num_kv_heads} KV heads · {stored_formula(config.head_dim, stored)})",
        "KV of a context": format_bytes(token_bytes * config.max_position_embeddings),
        "what fits": _fitting(config, weight_bytes, token_bytes, budget, where),
    }


def _weight_bytes(
    path: "Path", config: "ModelConfig", num_parameters: int, dtype: "torch.dtype", device: "torch.device"
) -> tuple[dict[str, int], str]:
    """Bytes by number format as the backend holds them that would run here, and a clause on that backend."""
    from noria.backends.choice import chosen_backend
    from noria.backends.cpu.linear import BLOCK_KINDS
    from noria.backends.torch.linear import chosen_kernel
    from noria.loading.sizes import Storage, stored_bytes

    name = str(dtype).removeprefix("torch.")
    backend, reason = chosen_backend("auto", dtype, device, is_foreign=config.is_foreign)
    if config.is_foreign:
        return {name: num_parameters * dtype.itemsize}, reason
    if backend == "cpu":
        storage = Storage("float32", name, BLOCK_KINDS)
    else:
        storage = Storage(name, name, packs=chosen_kernel(dtype, device).packs)
    return stored_bytes(path, config, storage), reason


def _windows(config: "ModelConfig") -> str:
    if config.is_foreign:
        return "as transformers has them"
    found = Counter(window for window in config.layer_windows if window is not None)
    if not found:
        return "none"
    parts = [f"{window:,} tokens in {num} of {config.num_layers} layers" for window, num in found.items()]
    return f"{', '.join(parts)} (KV is kept whole)"


def _rope(config: "ModelConfig") -> str:
    rope = config.rope
    text = f"{rope.kind}, base {rope.theta:g}"
    if rope.factor != 1:
        text += f", factor {rope.factor:g}"
    if rope.kind in ("dynamic", "longrope"):
        original = rope.original_max_position_embeddings
        text += f"; --max-model-len {original} or less keeps the frequencies of the original context"
    if config.rotary_dim != config.head_dim:
        text += f"; {config.rotary_dim} of {config.head_dim} dimensions rotate"
    if config.local_rope is not None:
        text += f"; with a window: {config.local_rope.kind}, base {config.local_rope.theta:g}"
    return text


def _sampling(config: "ModelConfig") -> str:
    params = config.default_sampling_params
    return ", ".join(f"{name} {value:g}" for name, value in params.items()) or "the files give no defaults"


def _fitting(
    config: "ModelConfig", weight_bytes: int, token_bytes: int, budget: int | None, device: "torch.device"
) -> str:
    """What is left for KV once the weights are loaded, in contexts."""
    from noria.bench.report import format_bytes

    if budget is None:
        budget = _available(device)
        if budget is None:
            return "unknown: this system does not say how much memory is available; give --memory"
    left = budget - weight_bytes
    if left < token_bytes:
        return f"nothing: the weights alone need {format_bytes(weight_bytes)} of {format_bytes(budget)}"
    num_tokens = left // token_bytes
    longest = config.max_position_embeddings
    lengths = sorted({min(_SHORT_CONTEXT, longest), longest})
    contexts = " or ".join(f"{num_tokens // length:,} contexts of {length:,}" for length in lengths)
    return f"in {format_bytes(budget)}: {num_tokens:,} tokens of KV beside the weights, which is {contexts}"


def _available(device: "torch.device") -> int | None:
    from noria.memory import available_host_bytes

    if device.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return available_host_bytes()


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of `8GiB`, `500MB` or a plain number.

    Raises:
        ConfigError: it is none of these, or not above 0; names the flag.
    """
    lowered = text.strip().lower()
    number = lowered.rstrip("abcdefghijklmnopqrstuvwxyz ")
    unit = _UNITS.get(lowered[len(number) :].strip())
    try:
        num_bytes = 0 if unit is None else int(float(number) * unit)
    except (ValueError, OverflowError):
        num_bytes = 0
    if num_bytes < 1:
        raise ConfigError(f"{flag} is {text!r}; give a size as 8GiB or 500MB", name=flag, value=text)
    return num_bytes
