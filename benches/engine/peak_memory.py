"""The peak memory of `noria generate`, beside what it has to hold.

Each run is a new process. The peak is the kernel's high-water mark of resident memory (VmHWM); its anonymous
share, without pages of files, is sampled every 10 ms. The limit: 1.3 times the weights and the KV pool, and
the peak of an interpreter that has imported torch. Weights are what the packed program holds.

    python benches/engine/peak_memory.py MODEL [--quantization int8] [--num-kv-blocks 64]
"""

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

FACTOR = 1.3
_MIB = 1 << 20
_HELD = """
import sys, torch
from pathlib import Path
from noria.models.model import load_model
model = load_model(Path(sys.argv[1]), dtype=sys.argv[2], device=torch.device("cpu"), backend="cpu",
                   quantization=sys.argv[3] or None)
print(model.program.core.num_bytes)
"""


def peak(command: list[str]) -> tuple[int, int, str]:
    """A process's peak of resident memory, and the most of it that was anonymous, in bytes; and what it said.

    Raises:
        SystemExit: it failed.
    """
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    status, anonymous = Path(f"/proc/{process.pid}/status"), 0
    while True:
        pid, code, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        anonymous = max(anonymous, int(fields.get("RssAnon", "0 kB").split()[0]) << 10)
        time.sleep(0.01)
    process.returncode = os.waitstatus_to_exitcode(code)
    said = process.stderr.read().decode(errors="replace")
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {said}")
    # The mark counts this process before it became the other: it is small.
    return usage.ru_maxrss << 10, anonymous, said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("--quantization", default="", help="int8, or none")
    parser.add_argument("--dtype", default="float32", help="(default: float32)")
    parser.add_argument("--num-kv-blocks", type=int, help="of 16 tokens (default: what generate takes)")
    parser.add_argument("--max-tokens", type=int, default=16, help="of the answer (default: 16)")
    arguments = parser.parse_args()
    options = ["--dtype", arguments.dtype]
    if arguments.quantization:
        options += ["--quantization", arguments.quantization]
    if arguments.num_kv_blocks is not None:
        options += ["--num-kv-blocks", str(arguments.num_kv_blocks)]
    generate = [sys.executable, "-m", "noria.cli", "generate", str(arguments.model), "The wheel turns"]
    generate += ["--max-tokens", str(arguments.max_tokens), "--temperature", "0", *options]
    held = [sys.executable, "-c", _HELD, str(arguments.model), arguments.dtype, arguments.quantization]
    weights = int(subprocess.run(held, check=True, capture_output=True, text=True).stdout)
    torch_bytes, _, _ = peak([sys.executable, "-c", "import torch"])
    most, anonymous, said = peak(generate)
    pool = float(re.findall(r"KV cache: .* = ([\d.]+) MiB", said)[0]) * _MIB
    limit = FACTOR * (weights + pool) + torch_bytes
    print(f"{arguments.model.name} {' '.join(options)}, MiB")
    print(f"weights {weights / _MIB:.0f}, KV pool {pool / _MIB:.0f}, import torch {torch_bytes / _MIB:.0f}")
    print(f"peak {most / _MIB:.0f}, of it anonymous at most {anonymous / _MIB:.0f}")
    above = most - torch_bytes
    print(
        f"above torch {above / _MIB:.0f}: {above / (weights + pool):.2f} x weights and pool, "
        f"{above / weights:.2f} x weights; limit {FACTOR} x, {limit / _MIB:.0f}"
    )


if __name__ == "__main__":
    main()
