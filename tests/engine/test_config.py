"""Configurations are checked once, and resolved once against a model."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from noria.config import ADMISSIONS, SCHEDULING_POLICIES, EngineConfig, model_path, torch_device
from noria.errors import ConfigError, ModelError
from noria.memory import available_host_bytes


@dataclass
class Model:
    """SmolLM2-135M's figures."""

    num_layers: int = 30
    num_kv_heads: int = 3
    head_dim: int = 64
    max_position_embeddings: int = 8192
    vocab_size: int = 49152
    layer_windows: tuple[int | None, ...] = (None,) * 30


TOKEN_BYTES = 2 * 30 * 3 * 64 * 4


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("dtype", "int8", "auto, float64"),
        ("scheduling_policy", "lifo", "fcfs, priority"),
        ("admission", "hopeful", "peak, reserve, optimistic"),
        ("peak_percent", 99, "from 100 to 1000"),
        ("max_queued_tokens", 0, "from 1"),
        ("fair_input_weight", 0, "from 1 to 65536"),
        ("batching", "dynamic", "continuous, padded, gang"),
        ("depth", 0, "from 1 to 3"),
        ("depth", 4, "from 1 to 3"),
        ("max_num_seqs", 0, "from 1"),
        ("max_num_seqs", True, "an integer"),
        ("max_num_batched_tokens", 63, "at least max_num_seqs, 64"),
        ("block_size", 0, "from 1 to 4096"),
        ("block_size", 16.0, "an integer"),
        ("max_model_len", 1, "from 2"),
        ("num_kv_blocks", 0, "from 1"),
        ("kv_cache_memory_bytes", -1, "from 1"),
        ("max_partial_prefills", 0, "from 1"),
        ("long_prefill_token_threshold", -1, "from 0"),
        ("watermark", 1.0, "from 0 to below 1"),
        ("watermark", float("nan"), "from 0 to below 1"),
        ("watermark", "a", "from 0 to below 1"),
        ("device", 3, "auto, cpu, cuda"),
        ("enable_prefix_caching", "no", "True or False"),
        ("skip_tokenizer_init", 1, "True or False"),
        ("seed", -1, "from 0"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_its_limit(name: str, value: object, limit: str) -> None:
    with pytest.raises(ConfigError) as raised:
        EngineConfig(model="m", **{name: value})  # type: ignore[arg-type]
    assert raised.value.name == name
    assert raised.value.value == value or value != value
    text = str(raised.value)
    assert text.startswith(f"{name} is {value!r}" if isinstance(value, str) else f"{name} is {value}")
    assert limit in text


def test_blocks_and_bytes_are_not_both_given() -> None:
    with pytest.raises(ConfigError, match="give one of them"):
        EngineConfig(model="m", num_kv_blocks=3, kv_cache_memory_bytes=10**9)


def test_the_kv_cache_is_no_larger_than_all_seats_can_use() -> None:
    resolved = EngineConfig(model="m", max_num_seqs=2, max_model_len=100).resolve(
        Model(), torch.float32, 10**12
    )
    assert resolved.num_kv_blocks == 2 * 7  # blocks of 16
    assert resolved.max_model_len == 100


def test_the_kv_cache_fits_its_budget_with_the_padding_block() -> None:
    budget = 40 * 16 * TOKEN_BYTES
    resolved = EngineConfig(model="m").resolve(Model(), torch.float32, budget)
    assert resolved.num_kv_blocks == 39
    assert (
        EngineConfig(model="m", kv_cache_memory_bytes=budget).resolve(Model(), torch.float32, 1).num_kv_blocks
        == 39
    )


def test_the_size_of_the_kv_cache_is_shown_as_a_product() -> None:
    resolved = EngineConfig(model="m", num_kv_blocks=64, max_model_len=512).resolve(Model(), torch.float32)
    assert resolved.notes == ("KV cache: 2 · 30 layers · 3 kv heads · 64 · 4 bytes · 1024 tokens = 45 MiB",)


def test_a_context_that_was_not_asked_for_is_lowered_to_the_pool_with_a_note() -> None:
    resolved = EngineConfig(model="m", num_kv_blocks=10).resolve(Model(), torch.float32)
    assert resolved.max_model_len == 160
    assert resolved.notes[0] == (
        "max_model_len: lowered to 160 tokens from 8192, as the KV cache of 10 blocks of 16 holds 160"
    )


def test_a_context_that_was_asked_for_must_fit_the_pool_and_the_model() -> None:
    with pytest.raises(ConfigError, match="max_model_len is 200; the KV cache of 10 blocks of 16 holds 160"):
        EngineConfig(model="m", num_kv_blocks=10, max_model_len=200).resolve(Model(), torch.float32)
    with pytest.raises(ConfigError, match="max_model_len is 9000; the model's context is 8192"):
        EngineConfig(model="m", max_model_len=9000).resolve(Model(), torch.float32, 10**12)


def test_a_budget_below_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"kv_cache_memory_bytes is 1000; .* need {2 * 16 * TOKEN_BYTES}"):
        EngineConfig(model="m", kv_cache_memory_bytes=1000).resolve(Model(), torch.float32)
    with pytest.raises(ConfigError, match="must be given"):
        EngineConfig(model="m").resolve(Model(), torch.float32, None)


def test_the_watermark_is_a_share_of_the_pool() -> None:
    config = EngineConfig(model="m", num_kv_blocks=1000, watermark=0.05)
    assert config.resolve(Model(), torch.float32).watermark_blocks == 50


def test_a_core_has_the_configurations_values() -> None:
    config = EngineConfig(model="m", max_num_seqs=3, max_num_batched_tokens=40, block_size=8, num_kv_blocks=9)
    layout = config.resolve(Model(), torch.float32).core(max_drafts=2).layout
    assert (layout.max_num_seqs, layout.max_num_batched_tokens, layout.block_size) == (3, 40, 8)
    assert (layout.num_blocks, layout.max_drafts) == (9, 2)


@pytest.mark.parametrize("batching", ["continuous", "padded", "gang"])
@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize("admission", ADMISSIONS)
def test_every_choice_makes_a_core(batching: str, policy: str, admission: str) -> None:
    config = EngineConfig(model="m", batching=batching, scheduling_policy=policy, admission=admission)
    config.resolve_without_model(vocab_size=10, max_model_len=64).core()


# ---- models and devices


@pytest.mark.parametrize(
    "name", ["nothing-here", "/no/such/folder", "./no/folder", "a/b/c", "none.gguf", "x/y.gguf"]
)
def test_a_model_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        model_path(name)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match=r"does not end in \.gguf"):
        model_path(str(path))
    assert model_path(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["gpu", "cpu:0", "cuda:x", "mps", ""])
def test_a_device_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda"):
        torch_device(name)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPUs here"):
        torch_device("cuda:99")
    assert torch_device("cpu").type == "cpu"


# ---- memory


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_memory_is_what_linux_says(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert available_host_bytes(tmp_path) == 4000 * 1024
    assert available_host_bytes(tmp_path / "nowhere") is None


def test_a_control_groups_limit_counts_less_what_it_can_drop(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 4000 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/a/b/memory.current", "500\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.max", "1000000\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.current", "700000\n")
    write(tmp_path, "sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 50000\n")
    assert available_host_bytes(tmp_path) == 350_000


def test_the_older_kind_of_control_group_is_read_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable: 4000 kB\n")
    write(tmp_path, "proc/self/cgroup", "5:memory:/docker/x\n1:cpu,cpuacct:/docker/x\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.limit_in_bytes", "900000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.usage_in_bytes", "400000\n")
    write(tmp_path, "sys/fs/cgroup/memory/memory.stat", "total_inactive_file 1000\n")
    assert available_host_bytes(tmp_path) == 501_000


def test_this_machine_has_memory() -> None:
    available = available_host_bytes()
    assert available is None or available > 2**20


def test_every_option_is_in_the_readmes_table() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    options = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert len(options) > 30
    assert options <= told
