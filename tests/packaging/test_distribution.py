"""What the wheel and the source distribution hold, each built here from this tree."""

import os
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from importlib.metadata import version
from pathlib import Path

import pytest

from noria import _core

ROOT = Path(__file__).parents[2]


def maturin(*args: str) -> None:
    """Runs this environment's maturin on the tree; a core that `make install` has compiled is taken."""
    subprocess.run(
        [sys.executable, "-m", "maturin", *args], cwd=ROOT, check=True, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    maturin("build", "--release", "--out", str(folder))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def source_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    folder = tmp_path_factory.mktemp("sdist")
    maturin("sdist", "--out", str(folder))
    (path,) = folder.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def test_one_wheel_serves_every_python_from_3_11(wheel: Path) -> None:
    assert wheel.name.startswith(f"noria-{_core.__version__}-cp311-abi3-")


def test_the_wheel_holds_every_python_file_the_stub_and_the_core(wheel: Path) -> None:
    package = ROOT / "python"
    tracked = {
        path.relative_to(package).as_posix()
        for path in (package / "noria").rglob("*")
        if path.suffix in {".py", ".pyi", ".typed"}
    }
    assert {"noria/__init__.py", "noria/_core.pyi", "noria/py.typed"} <= tracked
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names - tracked == {"noria/_core.abi3.so"}
    assert tracked - names == set()


def test_the_wheel_needs_neither_transformers_nor_a_kernel_package(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist") or []
    always = {requirement for requirement in requirements if "extra ==" not in requirement}
    assert "torch>=2.9" in always
    assert not [requirement for requirement in always if requirement.startswith(("transformers", "noria"))]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_payload()


def test_the_wheel_runs_without_the_source_tree(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = "import noria, noria._core as core; print(noria.__file__, core.__file__, core.__version__)"
    printed = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [Path(path).is_relative_to(tmp_path) for path in printed[:2]] == [True, True]
    assert printed[2] == _core.__version__


def test_the_source_distribution_holds_all_that_a_build_reads(source_names: set[str]) -> None:
    crates = {
        path.relative_to(ROOT).as_posix()
        for folder in ("rust/core", "rust/binding")
        for path in [ROOT / folder / "Cargo.toml", *(ROOT / folder / "src").rglob("*.rs")]
    }
    package = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "python").rglob("*.py*")
        if path.suffix != ".pyc"
    }
    assert len(crates) > 4
    assert len(package) > 4
    needed = crates | package | {"Cargo.toml", "Cargo.lock", "pyproject.toml", "README.md", "LICENSE"}
    assert needed - source_names == set()


def test_the_source_distribution_carries_nothing_built(source_names: set[str]) -> None:
    assert not [name for name in source_names if name.endswith((".so", ".pyc")) or name.startswith("target/")]


def test_the_installed_version_is_the_cores() -> None:
    assert version("noria") == _core.__version__
