"""`noria models` of a hub's model: what it takes is said from the headers of its files."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from tiny_models import save_model, tiny_config

from noria.cli.models import about
from noria.cli.options import find_smollm2
from noria.errors import ModelError

DESCRIBE = """
import json
import sys
from noria.cli.models import about
from noria.errors import ModelError
from noria.loading import hub_headers
hub_headers._FIRST_BYTES = 100
hub_headers._FIRST_GGUF_BYTES = 2**16
for name in sys.argv[1:]:
    try:
        print(json.dumps(about(name, "float32", "auto", "cpu", 10**10)))
    except ModelError as error:
        print(json.dumps(str(error)))
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file, and shards."""
    config = tiny_config("qwen3", num_hidden_layers=2, vocab_size=5000, hidden_size=64)
    made = {name: tmp_path_factory.mktemp(name) for name in ("whole", "sharded")}
    save_model(made["whole"], config)
    save_model(made["sharded"], config, max_shard_size="400KB")
    return made


@pytest.fixture(scope="module")
def hub(folders: dict[str, Path]) -> Iterator[FakeHub]:
    repos = {
        f"some/{name}": {"main": {path.name: path.read_bytes() for path in folder.iterdir()}}
        for name, folder in folders.items()
    }
    broken = dict(repos["some/whole"]["main"])
    repos["some/broken"] = {"main": broken | {"model.safetensors": b"\xff" * 2000}}
    repos["some/empty"] = {"main": {"config.json": broken["config.json"]}}
    with contextlib.suppress(ModelError):
        gguf = find_smollm2().read_bytes()
        repos["some/gguf"] = {"main": {"a.gguf": gguf, "bad.gguf": b"GGUF" + bytes(200_000)}}
    with serving(repos) as served:
        yield served


NAMES = ("whole", "sharded", "nothing", "broken", "empty", "gguf/a.gguf", "gguf/bad.gguf")


def describe(hub: FakeHub, home: Path, *names: str, **environment: str) -> list[dict[str, str] | str]:
    """What is said of each name, in a process with a cache of its own."""
    hub.requests.clear()
    dropped = ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    variables = {key: value for key, value in os.environ.items() if key not in dropped}
    variables |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url} | environment
    command = [sys.executable, "-c", DESCRIBE, *(f"some/{name}" for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def told(hub: FakeHub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str] | str]:
    """What is said of each of `NAMES`; one process, as it takes long to begin."""
    home = tmp_path_factory.mktemp("home")
    told = dict(zip(NAMES, describe(hub, home, *NAMES), strict=True))
    assert not list(home.rglob("*.safetensors"))  # nothing is kept that could be taken for the model
    return told


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_headers_say_what_the_files_say(
    hub: FakeHub, folders: dict[str, Path], told: dict[str, dict[str, str] | str], name: str
) -> None:
    facts = about(str(folders[name]), "float32", "auto", "cpu", 10**10)
    assert told[name] == facts | {"model": f"some/{name}"}
    files = list(folders[name].glob("*.safetensors"))
    assert (len(files) > 1) == (name == "sharded")
    assert 0 < hub.num_bytes_sent[f"some/{name}"] < sum(file.stat().st_size for file in files) / 10


def test_a_gguf_header_is_read_until_it_ends(
    smollm2_path: Path, hub: FakeHub, told: dict[str, dict[str, str] | str]
) -> None:
    expected = about(str(smollm2_path), "float32", "auto", "cpu", 10**10) | {"model": "some/gguf/a.gguf"}
    assert told["gguf/a.gguf"] == expected
    assert hub.num_bytes_sent["some/gguf"] < smollm2_path.stat().st_size / 10
    assert "bad.gguf: big-endian GGUF is not supported" in told["gguf/bad.gguf"]


def test_what_has_no_header_gets_one_sentence(told: dict[str, dict[str, str] | str]) -> None:
    assert "is neither a path nor known to the hub" in told["nothing"]
    assert "some/broken/model.safetensors: not a safetensors file" in told["broken"]
    assert "model 'some/empty': the hub at" in told["empty"]


def test_what_is_in_the_cache_is_taken_from_there(
    hub: FakeHub, folders: dict[str, Path], tmp_path: Path
) -> None:
    fetch = "import sys; from noria.loading.hub import local_model; local_model(sys.argv[1])"
    variables = os.environ | {"HF_HOME": str(tmp_path), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
    subprocess.run([sys.executable, "-c", fetch, "some/whole"], env=variables, check=True, timeout=240)
    (facts,) = describe(hub, tmp_path, "whole", HF_HUB_OFFLINE="1")
    assert facts == about(str(folders["whole"]), "float32", "auto", "cpu", 10**10) | {"model": "some/whole"}
    assert not hub.requests
