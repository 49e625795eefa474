"""Loading keeps to the memory that the model will hold: files are mapped, and converted piece by piece."""

import json
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file
from tiny_models import save_model, tiny_config

from noria.loading.gguf import gguf_name
from noria.models.registry import GGUF_ARCHITECTURES

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}
# Anonymous memory, which files that are mapped are no part of; looked at every millisecond.
MEASURE = """
import json, sys, threading, time
from pathlib import Path
import torch
import gguf.quants, safetensors
from noria.backends.torch.linear import chosen_kernel
from noria.models import load_model

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

device = torch.device("cpu")
load_model(Path(sys.argv[2]), dtype=torch.float32, device=device)  # what a first load brings with it
before = peak = anonymous()
is_done = False

def watch():
    global peak
    while not is_done:
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
model = load_model(Path(sys.argv[1]), dtype=torch.float32, device=device)
is_done = True
thread.join()
print(json.dumps({"held": anonymous() - before, "peak": peak - before}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("larger")
    save_model(directory, tiny_config("qwen2", **SHAPE), dtype=torch.bfloat16)
    return directory


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    writer = gguf.GGUFWriter(str(folder / "model.gguf"), "qwen2")
    sizes = {
        "context_length": 512,
        "embedding_length": 512,
        "feed_forward_length": 1408,
        "block_count": 10,
        "attention.head_count": 8,
        "attention.head_count_kv": 4,
    }
    for key, value in sizes.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-5)
    for name, tensor in load_file(folder / "model.safetensors").items():
        kind = Kind.Q8_0 if tensor.ndim == 2 else Kind.F32
        data = gguf.quants.quantize(tensor.float().numpy(), kind)
        writer.add_tensor(gguf_name(name, GGUF_ARCHITECTURES["qwen2"]), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells anonymous memory apart")
@pytest.mark.parametrize("kind", ["folder", "file"])
def test_the_peak_is_little_more_than_what_is_held(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str
) -> None:
    path: Path = request.getfixturevalue(kind)
    save_model(tmp_path, tiny_config("qwen2"), dtype=torch.float32)
    command = [sys.executable, "-c", MEASURE, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    tensors = load_file((path if kind == "folder" else path.parent) / "model.safetensors")
    num_bytes = 4 * sum(tensor.numel() for tensor in tensors.values())
    assert found["held"] > 0.95 * num_bytes
    assert found["peak"] <= 1.2 * num_bytes
