"""Hugging Face directories: config.json, and safetensors in one file or in shards."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from noria.errors import ModelError
from noria.models.config import ModelConfig, RopeConfig
from noria.models.registry import known_architecture

if TYPE_CHECKING:
    import torch

_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LEFTOVERS = ("rotary_emb.inv_freq",)
"""Endings of tensors that old checkpoints carry and that no forward reads."""


class JsonFields:
    """Values of a JSON object, each checked as it is read."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        self.path = path
        self.values = values
        self._prefix = prefix

    @classmethod
    def of_file(cls, path: Path) -> "JsonFields":
        """Reads a file that must hold one JSON object."""
        try:
            values = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror})") from None
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: not valid JSON ({error})") from None
        if not isinstance(values, dict):
            raise ModelError(f"{path}: a JSON object was expected, found a {type(values).__name__}")
        return cls(path, values)

    def error(self, key: str, expected: str) -> ModelError:
        """That a key's value is not what it should be."""
        value = self.values.get(key)
        found = "no such key" if value is None else f"found {value!r}"
        return ModelError(f"{self.path}: {self._prefix + key!r} should be {expected}, {found}")

    def has(self, key: str) -> bool:
        """Whether the key is there, and not null."""
        return self.values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(key, "a whole number of at least 1")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.error(key, "a number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none where the key is missing."""
        value = self.values.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(ids)

    def object(self, key: str) -> "JsonFields | None":
        """A nested object; None where the key is missing."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(self.path, value, f"{self._prefix}{key}.")


def read_hf_config(directory: Path) -> ModelConfig:
    """The configuration in a directory's config.json (and generation_config.json, for what ends an answer).

    Raises:
        ModelError: a file or a key is missing, of the wrong kind, or asks for what noria does not run.
    """
    fields = JsonFields.of_file(directory / "config.json")
    names = fields.values.get("architectures")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise fields.error("architectures", "a list of names")
    architecture = known_architecture(fields.path, names)
    _refuse_what_is_not_run(fields)

    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads = {num_heads}")
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads = {num_heads}")
    if head_dim % 2:
        raise ModelError(f"{fields.path}: head_dim should be even, found {head_dim}")
    max_position_embeddings = fields.integer("max_position_embeddings")

    eos = fields.token_ids("eos_token_id")
    generation = directory / "generation_config.json"
    if generation.exists():
        eos += JsonFields.of_file(generation).token_ids("eos_token_id")
    bos = fields.token_ids("bos_token_id")
    return ModelConfig(
        architecture=architecture,
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_read_rope(fields, max_position_embeddings),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=fields.boolean("attention_bias", False),
        mlp_bias=fields.boolean("mlp_bias", False),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        bos_token_id=bos[0] if bos else None,
    )


def _refuse_what_is_not_run(fields: JsonFields) -> None:
    activation = fields.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error("hidden_act", "'silu' (no other activation is supported)")
    if fields.has("quantization_config"):
        raise ModelError(
            f"{fields.path}: quantised checkpoints are not supported (it has 'quantization_config')"
        )


def _read_rope(fields: JsonFields, max_position_embeddings: int) -> RopeConfig:
    """From `rope_parameters` (transformers 5) or `rope_scaling` and `rope_theta` (before)."""
    rope = fields.object("rope_scaling") or fields.object("rope_parameters") or JsonFields(fields.path, {})
    partial = rope if rope.has("partial_rotary_factor") else fields
    if partial.number("partial_rotary_factor", 1.0) != 1.0:
        raise partial.error("partial_rotary_factor", "1 (rotating a part of a head is not supported)")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig("linear", theta, rope.number("factor"))
    if kind == "llama3":
        low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
        if low >= high:
            raise rope.error("low_freq_factor", f"below high_freq_factor = {high}")
        # transformers gives the key beside the dictionary the last word.
        original = rope.integer("original_max_position_embeddings", max_position_embeddings)
        original = fields.integer("original_max_position_embeddings", original)
        return RopeConfig("llama3", theta, rope.number("factor"), low, high, original)
    raise ModelError(
        f"{fields.path}: RoPE kind {kind!r} is not supported; supported: default, linear, llama3"
    )


class HfWeights:
    """The tensors of a directory's safetensors files, by their names there."""

    def __init__(self, directory: Path) -> None:
        """Opens every file and reads its header.

        Raises:
            ModelError: no safetensors; or a file is missing, truncated or malformed.
        """
        self.path = directory
        index = directory / "model.safetensors.index.json"
        single = directory / "model.safetensors"
        self._files: dict[str, Any] = {}  # file name -> safetensors' handle
        self._where: dict[str, str] = {}  # tensor -> file name
        if single.exists():
            self._open(single.name)
            self._where = dict.fromkeys(self._files[single.name].keys(), single.name)
        elif index.exists():
            self._open_shards(JsonFields.of_file(index))
        else:
            raise ModelError(
                f"{directory}: it has neither model.safetensors nor model.safetensors.index.json"
            )

    def _open(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open

        path = self.path / name
        try:
            self._files[name] = safe_open(path, framework="pt")
        except FileNotFoundError:
            raise ModelError(f"{path}: the file is missing") from None
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: truncated or not a safetensors file ({error})") from None

    def _open_shards(self, index: JsonFields) -> None:
        weight_map = index.object("weight_map")
        if weight_map is None:
            raise index.error("weight_map", "an object")
        for tensor, name in weight_map.values.items():
            if not isinstance(name, str) or Path(name).name != name:
                raise weight_map.error(tensor, "a file name in this directory")
            self._where[tensor] = name
        for name in sorted(set(self._where.values())):
            self._open(name)
            held = set(self._files[name].keys())
            for tensor in (tensor for tensor, where in self._where.items() if where == name):
                if tensor not in held:
                    raise ModelError(
                        f"{self.path / name}: tensor {tensor!r} is missing, which the index places there"
                    )

    def names(self) -> set[str]:
        """Tensors that a model should use up."""
        return {name for name in self._where if not name.endswith(_LEFTOVERS)}

    def file_of(self, name: str, /) -> Path:
        """The file to name in an error about this tensor."""
        return self.path / self._where.get(name, "")

    def shape(self, name: str) -> tuple[int, ...] | None:
        """A tensor's shape; None where there is no such tensor."""
        where = self._where.get(name)
        return None if where is None else tuple(self._files[where].get_slice(name).get_shape())

    def copy_into(self, name: str, out: "torch.Tensor") -> None:
        """Converts a tensor into `out`, of the same shape.

        Raises:
            ModelError: it is not of a floating-point type that noria reads.
        """
        handle = self._files[self._where[name]]
        dtype = handle.get_slice(name).get_dtype()
        if dtype not in _FLOAT_DTYPES:
            allowed = ", ".join(_FLOAT_DTYPES)
            raise ModelError(f"{self.file_of(name)}: tensor {name!r} should be of {allowed}, found {dtype}")
        out.copy_(handle.get_tensor(name))

    def close(self) -> None:
        """Lets go of the files."""
        self._files.clear()

    def __enter__(self) -> "HfWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
