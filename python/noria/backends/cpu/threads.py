"""How many threads the CPU backend computes on."""

import os
from collections.abc import Mapping

from noria.bench.machine import Machine, detect_machine
from noria.errors import ConfigError

VARIABLE = "OMP_NUM_THREADS"


def chosen_threads(
    environment: Mapping[str, str] = os.environ, machine: Machine | None = None
) -> tuple[int, str]:
    """How many, and a clause that says why.

    Args:
        environment: where `OMP_NUM_THREADS` may be set; the first of its comma-separated numbers counts.
        machine: whose affinity and control group's quota count otherwise; None: this one.

    Raises:
        ConfigError: the variable is no number from 1 to 1024.
    """
    text = environment.get(VARIABLE, "").strip()
    if text:
        first = text.split(",")[0].strip()
        if not (first.isascii() and first.isdigit()) or not 1 <= int(first) <= 1024:
            raise ConfigError(
                f"{VARIABLE} is {text!r}; it must be a number from 1 to 1024", name=VARIABLE, value=text
            )
        return int(first), f"{VARIABLE} is {text}"
    machine = machine or detect_machine()
    return max(1, int(machine.num_usable_cpus)), machine.usable_cpus_reason
