"""Sizes: all of them where benches are timed, the smallest where each runs once."""

import pytest

SIZES = (64, 256, 1024, 4096)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "running" in metafunc.fixturenames:
        is_timed = metafunc.config.getoption("benchmark_enable")
        metafunc.parametrize("running", SIZES if is_timed else SIZES[:1])
