"""`noria env`: what noria finds here, and what it will use."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

EXAMPLES = """Examples:

  noria env
  noria env --output-json env.json
"""


def env(
    *,
    output_json: Annotated[
        Path | None,
        Parameter(
            allow_leading_hyphen=True,
            help="Write the same to this file; - writes it to standard output instead.",
        ),
    ] = None,
) -> None:
    """Show machine, instruction sets, memory and versions, and what 'auto' means here.

    Everything is detected when the command runs; put its output into a bug report.
    """
    from noria.bench.report import check_writable, write_json

    if output_json is not None:
        check_writable(output_json)
    facts = environment()
    if output_json is None or output_json != Path("-"):
        width = max(len(name) for name in facts)
        for name, value in facts.items():
            print(f"{name:<{width}}  {value}")
    if output_json is not None:
        write_json(output_json, facts)


def environment() -> dict[str, str]:
    """Everything found, by name, in words."""
    import torch

    from noria import _core
    from noria.backends.choice import chosen_backend
    from noria.bench.machine import detect_machine, torch_facts
    from noria.bench.report import format_bytes
    from noria.cli.app import version
    from noria.config import torch_device
    from noria.loading.dtype import chosen_dtype

    machine, torch_used = detect_machine(), torch_facts()
    memory = "unknown" if machine.memory_bytes is None else format_bytes(machine.memory_bytes)
    if machine.memory_available_bytes is not None:
        memory += f", {format_bytes(machine.memory_available_bytes)} available"
    if machine.memory_limit_bytes is not None:
        memory += f", control group limit {format_bytes(machine.memory_limit_bytes)}"
    device = torch_device("auto")
    dtype, dtype_reason = chosen_dtype("auto", device)
    _, backend_reason = chosen_backend("auto", dtype, device)
    kernels = f"{torch_used.num_threads} threads, CPU kernels for {torch_used.cpu_capability}"
    return {
        "noria": f"{version()} (core {_core.__version__})",
        "python": machine.python_version,
        "system": machine.system,
        "cpu": machine.cpu_model,
        "instruction sets": machine.isa_summary,
        "cores usable": f"{machine.num_usable_cpus:g} of {machine.num_cpus} ({machine.usable_cpus_reason})",
        "memory": memory,
        "torch": f"{torch_used.version}, {kernels}",
        "gpu": _gpus(torch.cuda.device_count()),
        "device 'auto'": str(device),
        "dtype 'auto'": dtype_reason,
        "backend 'auto'": backend_reason,
        "demo model": _demo_model(),
    }


def _gpus(num_gpus: int) -> str:
    import torch

    names = [torch.cuda.get_device_properties(number) for number in range(num_gpus)]
    if not names:
        built = (
            "this torch is built without CUDA"
            if torch.version.cuda is None
            else f"CUDA {torch.version.cuda} build"
        )
        return f"none found ({built})"
    from noria.bench.report import format_bytes

    return "; ".join(
        f"{gpu.name}, {format_bytes(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}"
        for gpu in names
    )


def _demo_model() -> str:
    from noria.cli.options import find_smollm2
    from noria.errors import ModelError

    try:
        return str(find_smollm2())
    except ModelError as error:
        return str(error)
