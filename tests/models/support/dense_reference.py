"""A Llama written out in float64: dense, uncached, one sequence, nothing shared with noria but the file.

It is the specification that the paged forward is held against; no line of it is there for speed.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file


def load_tensors(directory: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return {name: tensor.double() for name, tensor in tensors.items()}


def dense_logits(directory: Path, token_ids: list[int]) -> torch.Tensor:
    """Logits after each token, `[len(token_ids), vocab_size]` float64."""
    config = json.loads((directory / "config.json").read_text())
    w = load_tensors(directory)
    num_heads = config["num_attention_heads"]
    num_kv_heads = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    frequencies = rope_frequencies(config, head_dim)
    n = len(token_ids)

    def project(x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ w[f"{name}.weight"].T
        return y + w[f"{name}.bias"] if f"{name}.bias" in w else y

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    angles = torch.arange(n).double()[:, None] * torch.tensor(frequencies, dtype=torch.float64)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]  # [n, 1, head_dim / 2]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    x = w["model.embed_tokens.weight"][token_ids]
    for index in range(config["num_hidden_layers"]):
        at = f"model.layers.{index}"
        h = norm(x, f"{at}.input_layernorm")
        q = rotate(project(h, f"{at}.self_attn.q_proj").view(n, num_heads, head_dim))
        k = rotate(project(h, f"{at}.self_attn.k_proj").view(n, num_kv_heads, head_dim))
        v = project(h, f"{at}.self_attn.v_proj").view(n, num_kv_heads, head_dim)
        attended = torch.empty_like(q)
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / math.sqrt(head_dim)
            scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -math.inf)
            attended[:, head] = torch.softmax(scores, -1) @ v[:, kv_head]
        x = x + project(attended.reshape(n, -1), f"{at}.self_attn.o_proj")
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = project(h, f"{at}.mlp.gate_proj")
        x = x + project(
            gate / (1 + torch.exp(-gate)) * project(h, f"{at}.mlp.up_proj"), f"{at}.mlp.down_proj"
        )
    x = norm(x, "model.norm")
    head_name = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    return x @ w[head_name].T


def rope_frequencies(config: dict[str, object], head_dim: int) -> list[float]:
    """Radians per position; the llama3 rule as Meta's llama_models (`apply_scaling`) has it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    assert isinstance(rope, dict)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    plain = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if kind == "default":
        return plain
    if kind == "linear":
        return [frequency / rope["factor"] for frequency in plain]
    assert kind == "llama3"
    low, high, old = (
        rope["low_freq_factor"],
        rope["high_freq_factor"],
        rope["original_max_position_embeddings"],
    )
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
