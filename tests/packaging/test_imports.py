"""What noria imports, and when: only what it declares, and torch only where tensors are meant."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "noria"
OF_EXTRAS = {("models/foreign.py", "transformers")}
"""What is imported where it is wanted, and found missing by a sentence."""

DRIVERS = {
    "bench/peers/drive_llama_cpp.py",
    "bench/peers/drive_noria.py",
    "bench/peers/drive_transformers.py",
    "bench/peers/drive_vllm.py",
    "bench/peers/drive_vllm_scheduler.py",
}
"""Scripts that each run in a peer's own environment, with their folder as the path."""


def imported_modules(source: str) -> set[str]:
    """Top-level names of the modules that `source` imports anywhere, in functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module is not None:
            names.add(node.module.partition(".")[0])
    return names


def declared_modules() -> set[str]:
    """Names of the runtime dependencies; each is also the name of its module, but for hyphens."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {requirement.partition(">")[0].strip() for requirement in project["dependencies"]}
    return {name.replace("-", "_") for name in names}


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_every_module_that_noria_imports_is_a_declared_dependency() -> None:
    foreign = {
        (path.relative_to(PACKAGE).as_posix(), name)
        for path in PACKAGE.rglob("*.py")
        for name in imported_modules(path.read_text()) - sys.stdlib_module_names - {"noria"}
        if path.relative_to(PACKAGE).as_posix() not in DRIVERS
    }
    assert {"torch", "numpy"} <= {name for _, name in foreign}
    declared = declared_modules()
    assert {(path, name) for path, name in foreign if name not in declared} == OF_EXTRAS


def test_the_drivers_are_all_there_and_nothing_of_the_package_imports_one() -> None:
    assert {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("drive_*.py")} == DRIVERS
    names = {Path(driver).stem for driver in DRIVERS}
    assert not any(f"import {name}" in path.read_text() for path in PACKAGE.rglob("*.py") for name in names)


def test_every_declared_dependency_is_imported() -> None:
    used = set().union(*(imported_modules(path.read_text()) for path in PACKAGE.rglob("*.py")))
    assert declared_modules() - used == set()


@pytest.mark.parametrize("module", ["noria", "noria.cli"])
def test_torch_is_not_imported_before_a_model_is_wanted(module: str) -> None:
    printed = run(f"import sys, {module}; print({{'torch', 'transformers', 'triton'}} & set(sys.modules))")
    assert printed.strip() == "set()"


def test_help_does_not_import_torch() -> None:
    printed = run("import sys, noria.cli; print(noria.cli.main(['--help']), 'torch' in sys.modules)")
    assert "generate" in printed
    assert printed.splitlines()[-1] == "0 False"
