"""Models by their name on a hub, against one on loopback; each look-up in a process of its own.

huggingface_hub reads its environment once, when it is imported.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import FakeHub, serving
from tiny_models import save_model, tiny_config

from noria.errors import ModelError
from noria.loading.hub import HubName, local_model, parse_hub_name

FIND = """
import sys
from noria.errors import ModelError
from noria.loading.hub import local_model
for name in sys.argv[1:]:
    try:
        print(local_model(name))
    except ModelError as error:
        print("refused:", error)
assert "torch" not in sys.modules
"""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHub]:
    folder = tmp_path_factory.mktemp("repo")
    save_model(folder, tiny_config("qwen3", num_hidden_layers=1))
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    extra = {"pytorch_model.bin": b"x", "onnx/model.safetensors": b"x", "README.md": b"x"}
    repos = {
        "some/tiny-Qwen3": {"main": files | extra, "v1": {"config.json": files["config.json"]}},
        "some/secret": {"main": files},
        "some/tiny-GGUF": {"main": {"tiny.Q4_0.gguf": b"GGUF", "tiny.Q8_0.gguf": b"GGUF"}},
    }
    with serving(repos) as served:
        served.private.add("some/secret")
        yield served


def find(hub: FakeHub | None, home: Path, *names: str, **environment: str) -> list[str]:
    """What each name is found to be, in a process with a cache of its own."""
    hub.requests.clear() if hub else None
    dropped = ("HF_HUB_OFFLINE", "HF_TOKEN", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
    variables = {key: value for key, value in os.environ.items() if key not in dropped}
    variables |= {"HF_HOME": str(home), "HF_ENDPOINT": hub.url if hub else "http://127.0.0.1:9"} | environment
    command = [sys.executable, "-c", FIND, *names]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_is_fetched_once_without_what_is_not_read(hub: FakeHub, tmp_path: Path) -> None:
    (folder,) = find(hub, tmp_path, "some/tiny-Qwen3")
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    fetched = [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert len(fetched) == 3
    again = find(hub, tmp_path, "some/tiny-Qwen3")
    assert again == [folder]
    assert not [path for method, path, _ in hub.requests if method == "GET" and "/resolve/" in path]
    assert find(None, tmp_path, "some/tiny-Qwen3", HF_HUB_OFFLINE="1") == [folder]


def test_revisions_tokens_and_single_files_are_heeded(hub: FakeHub, tmp_path: Path) -> None:
    names = ["some/tiny-Qwen3@v1", "some/tiny-GGUF/tiny.Q8_0.gguf", "some/secret"]
    old, file, secret = find(hub, tmp_path, *names, HF_TOKEN=hub.token)
    assert [path.name for path in Path(old).iterdir()] == ["config.json"]
    assert Path(file).read_bytes() == b"GGUF"
    assert Path(file).name == "tiny.Q8_0.gguf"
    assert (Path(secret) / "model.safetensors").exists()
    assert {token for _, path, token in hub.requests if "secret" in path} == {hub.token}


def test_what_a_hub_does_not_give_gets_one_sentence(hub: FakeHub, tmp_path: Path) -> None:
    names = [
        "some/nothing",
        "some/secret",
        "some/tiny-Qwen3@v9",
        "some/tiny-GGUF",
        "some/tiny-GGUF/none.gguf",
    ]
    nothing, secret, revision, folder, file = find(hub, tmp_path, *names)
    for line in (nothing, secret):
        assert f"is neither a path nor known to the hub at {hub.url}" in line
        assert "HF_TOKEN" in line
    assert revision == "refused: model 'some/tiny-Qwen3@v9': the hub has no revision 'v9' of it"
    given = "it has GGUF files, so give one of some/tiny-GGUF/tiny.Q4_0.gguf, some/tiny-GGUF/tiny.Q8_0.gguf"
    assert folder == f"refused: model 'some/tiny-GGUF' on the hub has no config.json; {given}"
    assert file == f"refused: model 'some/tiny-GGUF/none.gguf': the hub has no such file; {given}"


def test_no_hub_and_no_leave_to_ask_one_are_said(tmp_path: Path) -> None:
    (line,) = find(None, tmp_path, "some/model", HF_HUB_OFFLINE="1")
    assert line == "refused: model 'some/model' is neither a path nor in the cache, and " + (
        "HF_HUB_OFFLINE forbids to ask a hub"
    )
    (line,) = find(None, tmp_path, "some/model", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert "is not a path, and the hub at http://127.0.0.1:9 cannot be reached" in line


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-0.6B", HubName("Qwen/Qwen3-0.6B")),
        ("Qwen/Qwen3-0.6B@refs/pr/1", HubName("Qwen/Qwen3-0.6B", None, "refs/pr/1")),
        ("a/b/c/d.gguf@v1", HubName("a/b", "c/d.gguf", "v1")),
        ("a/b.gguf", None),
        ("a", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/b@", None),
    ],
)
def test_names_are_taken_apart(text: str, name: HubName | None) -> None:
    assert parse_hub_name(text) == name


def test_a_path_comes_before_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert local_model("some/model") == Path("some/model")
    for name in ("~no-such-user/model", "x" * 5000):
        with pytest.raises(ModelError, match="does not exist"):
            local_model(name)
    with pytest.raises(ModelError, match=r"'\./some/other' does not exist; give a model's folder"):
        local_model("./some/other")
