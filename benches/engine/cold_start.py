"""How long a cold `noria generate` takes to its first token, beside `import torch` in turns.

Each run is a new process, timed from its start to the first byte of the answer on its standard output; the
model's file is in the page cache. The limit: what the interpreter takes to import torch, in the same round,
and 2 seconds. CPU time stands beside, as other work on the machine stretches wall time.

    python benches/engine/cold_start.py MODEL [--rounds 5] [-- --quantization int8]
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

LIMIT_S = 2.0


def run(command: list[str], *, waits_for_output: bool) -> tuple[float, float]:
    """Wall seconds to the first byte of output, or to the end; and CPU seconds of the whole process.

    Raises:
        SystemExit: the command failed.
    """
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    first = process.stdout.read(1)
    wall_s = time.perf_counter() - started
    said = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or (waits_for_output and not first):
        raise SystemExit(f"{' '.join(command)} failed: {said.decode(errors='replace')}")
    return wall_s, usage.ru_utime + usage.ru_stime


def cached(model: Path) -> None:
    """Puts a model's files into the page cache."""
    for path in [model] if model.is_file() else sorted(model.iterdir()):
        with path.open("rb") as file:
            while file.read(1 << 24):
                pass


def spread(values: list[float]) -> str:
    """The median, and the range."""
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a folder, or a GGUF file")
    parser.add_argument("--rounds", type=int, default=5, help="of both, in turns (default: 5)")
    parser.add_argument("flags", nargs="*", help="of noria generate, after --")
    arguments = parser.parse_args()
    generate = [sys.executable, "-m", "noria.cli", "generate", str(arguments.model), "The wheel turns"]
    generate += ["--max-tokens", "1", "--temperature", "0", *arguments.flags]
    imports = [sys.executable, "-c", "import torch"]
    cached(arguments.model)
    for command in (imports, generate):  # a first run reads the interpreter's own files
        run(command, waits_for_output=command is generate)
    torch_s, first_s, more_s, torch_cpu_s, first_cpu_s = [], [], [], [], []
    for _ in range(arguments.rounds):
        wall_s, cpu_s = run(imports, waits_for_output=False)
        torch_s.append(wall_s)
        torch_cpu_s.append(cpu_s)
        wall_s, cpu_s = run(generate, waits_for_output=True)
        first_s.append(wall_s)
        first_cpu_s.append(cpu_s)
        more_s.append(first_s[-1] - torch_s[-1])
    print(f"{arguments.model.name} {' '.join(arguments.flags)}: {arguments.rounds} rounds, seconds")
    print(f"import torch    {spread(torch_s)}, CPU {spread(torch_cpu_s)}")
    print(f"to first token  {spread(first_s)}, CPU of the whole {spread(first_cpu_s)}")
    print(f"above torch     {spread(more_s)}, limit {LIMIT_S:.2f}")


if __name__ == "__main__":
    main()
