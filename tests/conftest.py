"""The real model that tests share, where its package is installed."""

from pathlib import Path

import pytest

from noria.cli.options import find_smollm2
from noria.errors import ModelError


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct, a GGUF file."""
    try:
        return find_smollm2()
    except ModelError as error:
        pytest.skip(str(error))
