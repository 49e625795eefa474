"""The KV cache's size, its memory, and which dtype a model computes in."""

from pathlib import Path

import pytest
import torch

from noria.errors import ConfigError
from noria.kv_cache import KvCache, kv_bytes_per_block, num_blocks_in
from noria.loading.dtype import chosen_dtype, has_bfloat16_flag
from noria.models import ModelConfig, RopeConfig

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    architecture="LlamaForCausalLM",
    num_layers=30,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rotary_dim=64,
    vocab_size=49152,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    tie_word_embeddings=True,
    eos_token_ids=(2,),
    bos_token_id=1,
)


def test_a_block_takes_both_k_and_v_of_every_layer() -> None:
    assert kv_bytes_per_block(CONFIG, 16, torch.float32) == 2 * 30 * 3 * 64 * 4 * 16
    assert kv_bytes_per_block(CONFIG, 16, torch.bfloat16) == 2 * 30 * 3 * 64 * 2 * 16


def test_a_budget_holds_block_0_too() -> None:
    block = kv_bytes_per_block(CONFIG, 16, torch.float32)
    assert num_blocks_in(10 * block, CONFIG, 16, torch.float32) == 9
    assert num_blocks_in(10 * block - 1, CONFIG, 16, torch.float32) == 8
    assert num_blocks_in(2 * block, CONFIG, 16, torch.float32) == 1
    with pytest.raises(ConfigError, match=f"is {2 * block - 1}; two blocks, the least, need {2 * block}"):
        num_blocks_in(2 * block - 1, CONFIG, 16, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_all_layers_are_views_of_one_zeroed_mapping(dtype: torch.dtype) -> None:
    kv = KvCache(CONFIG, 10, 16, dtype, CPU)
    assert kv.nbytes == 11 * kv_bytes_per_block(CONFIG, 16, dtype)
    pieces = [tensor for index in range(30) for tensor in kv.layer(index)]
    assert {tuple(tensor.shape) for tensor in pieces} == {(11, 16, 3, 64)}
    assert all(tensor.dtype == dtype and tensor.is_contiguous() for tensor in pieces)
    starts = sorted(tensor.data_ptr() for tensor in pieces)
    size = kv.nbytes // 60
    assert starts == [starts[0] + index * size for index in range(60)]
    assert not any(tensor.any() for tensor in pieces)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_is_taken_only_as_it_is_touched() -> None:
    before = resident_bytes()
    num_blocks = (2 << 30) // kv_bytes_per_block(CONFIG, 16, torch.float32)
    kv = KvCache(CONFIG, num_blocks, 16, torch.float32, CPU)
    assert resident_bytes() - before < 64 << 20
    kv.layer(0)[0][1:101] = 1.0
    assert resident_bytes() - before < 128 << 20


def test_moves_read_every_source_before_they_write() -> None:
    kv = KvCache(CONFIG, 5, 16, torch.float32, CPU)
    for index in range(30):
        for part, tensor in enumerate(kv.layer(index)):
            tensor[1:] = (torch.arange(1, 6) + 10 * part + 100 * index).view(5, 1, 1, 1).float()
    kv.move(torch.tensor([1, 2, 3]), torch.tensor([2, 3, 5]))
    for index in range(30):
        for part, tensor in enumerate(kv.layer(index)):
            found = (tensor[:, 0, 0, 0] - 10 * part - 100 * index).tolist()
            assert found[1:] == [1, 1, 2, 4, 3]
            assert not tensor[0].any()


def test_impossible_sizes_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_kv_blocks is 0; it must be at least 1"):
        KvCache(CONFIG, 0, 16, torch.float32, CPU)
    with pytest.raises(ConfigError, match="block_size is 0; it must be at least 1"):
        KvCache(CONFIG, 1, 0, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"the system does not give [0-9]+ bytes for a KV cache"):
        KvCache(CONFIG, 10**12, 16, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"the system does not give [0-9]+ bytes for a KV cache"):
        KvCache(CONFIG, 10**18, 16, torch.float32, CPU)


def test_a_dtype_is_taken_by_name_or_itself() -> None:
    assert chosen_dtype("float16", CPU) == (torch.float16, "float16, as asked for")
    assert chosen_dtype(torch.float64, CPU)[0] == torch.float64
    for wrong in ("float8", torch.int32):
        with pytest.raises(
            ConfigError, match="it must be auto or one of float64, float32, bfloat16, float16"
        ):
            chosen_dtype(wrong, CPU)


@pytest.mark.parametrize("has_units", [True, False])
def test_auto_is_bfloat16_only_where_the_cpu_computes_it(
    monkeypatch: pytest.MonkeyPatch, has_units: bool
) -> None:
    monkeypatch.setattr("noria.loading.dtype.cpu_computes_bfloat16", lambda: has_units)
    dtype, reason = chosen_dtype("auto", CPU)
    assert dtype == (torch.bfloat16 if has_units else torch.float32)
    assert reason.startswith("bfloat16, which this CPU" if has_units else "float32: this CPU has no")


@pytest.mark.parametrize(
    ("line", "has_units"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx2 avx512f avx512_vnni", False),
        ("model name\t: bf16", False),
    ],
)
def test_bfloat16_units_are_read_from_cpuinfo(tmp_path: Path, line: str, has_units: bool) -> None:
    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\n{line}\n\n")
    assert has_bfloat16_flag(tmp_path / "cpuinfo") == has_units
    assert not has_bfloat16_flag(tmp_path / "absent")
