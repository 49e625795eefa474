"""Each family written out in float64: dense, uncached, one sequence, nothing shared with noria but the file.

It is the specification that the paged forward is held against; no line of it is there for speed.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

Config = dict[str, Any]


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    text = "model.language_model."  # of a model that sees images too
    return {name.replace(text, "model."): tensor.double() for name, tensor in tensors.items()}


def read_config(directory: Path) -> Config:
    config: Config = json.loads((directory / "config.json").read_text())
    return config | config["text_config"] if "text_config" in config else config


def dense_logits(directory: Path, token_ids: list[int], seq_len: int = 0) -> torch.Tensor:
    """Logits after each token, `[len(token_ids), vocab_size]` float64.

    Args:
        directory: of the checkpoint.
        token_ids: the text.
        seq_len: the context that RoPE's frequencies are chosen for, where its kind depends on one.
    """
    config = read_config(directory)
    w = load_tensors(directory)
    is_gemma = config["model_type"].startswith("gemma")
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    n = len(token_ids)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = w[f"{name}.weight"] + 1 if is_gemma else w[f"{name}.weight"]
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * weight

    def attention(x: torch.Tensor, index: int) -> torch.Tensor:
        at = f"model.layers.{index}.self_attn"
        sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        if f"{at}.qkv_proj.weight" in w:
            q, k, v = project(x, f"{at}.qkv_proj").split(sizes, 1)
        else:
            q, k, v = (project(x, f"{at}.{name}_proj") for name in "qkv")
        q, k, v = (y.reshape(n, -1, head_dim) for y in (q, k, v))
        if f"{at}.q_norm.weight" in w:
            q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
        window = layer_window(config, index)
        frequencies, scale = rope(config, head_dim, seq_len, window is not None)
        q, k = rotate(q, frequencies, scale), rotate(k, frequencies, scale)
        softcap = config.get("attn_logit_softcapping")
        attended = torch.empty_like(q)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = q[:, head] @ k[:, kv_head].T * config.get("query_pre_attn_scalar", head_dim) ** -0.5
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            for i in range(n):
                scores[i, i + 1 :] = -math.inf
                if window is not None and i >= window:
                    scores[i, : i - window + 1] = -math.inf
            attended[:, head] = torch.softmax(scores, -1) @ v[:, kv_head]
        return project(attended.reshape(n, -1), f"{at}.o_proj")

    def mlp(x: torch.Tensor, at: str) -> torch.Tensor:
        if f"{at}.gate_up_proj.weight" in w:
            gate, up = project(x, f"{at}.gate_up_proj").chunk(2, 1)
        else:
            gate, up = project(x, f"{at}.gate_proj"), project(x, f"{at}.up_proj")
        if is_gemma:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            return project(0.5 * gate * (1 + torch.tanh(inner)) * up, f"{at}.down_proj")
        return project(gate / (1 + torch.exp(-gate)) * up, f"{at}.down_proj")

    x = w["model.embed_tokens.weight"][token_ids]
    if is_gemma:
        x = x * math.sqrt(config["hidden_size"])
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        y = attention(norm(x, f"{at}.input_layernorm"), index)
        if is_gemma:
            x = x + norm(y, f"{at}.post_attention_layernorm")
            y = mlp(norm(x, f"{at}.pre_feedforward_layernorm"), f"{at}.mlp")
            x = x + norm(y, f"{at}.post_feedforward_layernorm")
        else:
            x = x + y
            x = x + mlp(norm(x, f"{at}.post_attention_layernorm"), f"{at}.mlp")
    x = norm(x, "model.norm")
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    logits = x @ w[head_name].T
    cap = config.get("final_logit_softcapping")
    return cap * torch.tanh(logits / cap) if cap else logits


def layer_window(config: Config, index: int) -> int | None:
    """How many tokens a token of a layer sees, itself included; None: all."""
    if config["model_type"] in ("mistral", "phi3"):
        window: int | None = config.get("sliding_window")
        return window
    if config.get("use_sliding_window") is False or not config.get("layer_types"):
        return None
    return config["sliding_window"] if config["layer_types"][index] == "sliding_attention" else None


def rotate(x: torch.Tensor, frequencies: list[float], scale: float) -> torch.Tensor:
    """`x` `[n, heads, head_dim]` rotated by its positions; the dimensions past the frequencies stay."""
    half = len(frequencies)
    angles = torch.arange(len(x)).double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = scale * angles.cos()[:, None], scale * angles.sin()[:, None]  # [n, 1, half]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def rope(config: Config, head_dim: int, seq_len: int, is_local: bool) -> tuple[list[float], float]:
    """Frequencies and scale of a layer's RoPE."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "full_attention" in parameters:
        parameters = parameters["sliding_attention" if is_local else "full_attention"]
    config = config | {"rope_parameters": parameters}
    return rope_frequencies(config, head_dim, seq_len), rope_scale(config)


def rope_scale(config: Config) -> float:
    """What yarn (arXiv 2309.00071, 3.4) and longrope (2402.13753) multiply cosines and sines by."""
    rope = config["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor"):
        factor: float = rope["attention_factor"]
        return factor
    old = rope["original_max_position_embeddings"]
    scale = rope.get("factor") or config["max_position_embeddings"] / old
    if kind == "yarn":
        return 0.1 * math.log(scale) + 1
    return math.sqrt(1 + math.log(scale) / math.log(old))


def rope_frequencies(config: Config, head_dim: int, seq_len: int = 0) -> list[float]:
    """Radians per position; the llama3 rule as Meta's llama_models (`apply_scaling`) has it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if kind == "dynamic":
        longest = config["max_position_embeddings"]
        grown = rope["factor"] * max(seq_len, longest) / longest - (rope["factor"] - 1)
        theta *= grown ** (dim / (dim - 2))
    plain = [theta ** (-2 * pair / dim) for pair in range(dim // 2)]
    if kind in ("default", "dynamic"):
        return plain
    if kind == "linear":
        return [frequency / rope["factor"] for frequency in plain]
    old = rope["original_max_position_embeddings"]
    if kind == "longrope":
        divisors = rope["long_factor"] if seq_len > old else rope["short_factor"]
        return [frequency / divisor for frequency, divisor in zip(plain, divisors, strict=True)]
    if kind == "yarn":
        return yarn_frequencies(rope, plain, theta, dim)
    assert kind == "llama3"
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < old / high:
            scaled.append(frequency)
        elif wavelength > old / low:
            scaled.append(frequency / rope["factor"])
        else:
            smooth = (old / wavelength - low) / (high - low)
            scaled.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return scaled


def yarn_frequencies(rope: Config, plain: list[float], theta: float, dim: int) -> list[float]:
    """By the ramp over dimensions of yarn's own code (jquesnelle/yarn), not over wavelengths."""
    old = rope["original_max_position_embeddings"]
    bounds = [
        dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
        for turns in (rope.get("beta_fast", 32), rope.get("beta_slow", 1))
    ]
    low, high = max(math.floor(bounds[0]), 0), min(math.ceil(bounds[1]), dim - 1)
    mixed = []
    for pair, frequency in enumerate(plain):
        ramp = min(max((pair - low) / (high - low), 0.0), 1.0)
        mixed.append(frequency / rope["factor"] * ramp + frequency * (1 - ramp))
    return mixed
