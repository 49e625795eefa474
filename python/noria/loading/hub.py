"""Models by their name on a hub: fetched once, then read from huggingface_hub's cache.

The environment says where and how, as for every user of huggingface_hub: `HF_ENDPOINT`, `HF_HOME`,
`HF_TOKEN`, and `HF_HUB_OFFLINE=1`, with which only the cache is read.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from noria.errors import ModelError

_HUB_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(/(?P<file>[^@]+\.gguf))?(@(?P<revision>[\w./-]+))?", re.ASCII
)
WEIGHTS = ("*.safetensors",)
DESCRIPTION = (
    "config.json",
    "generation_config.json",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "chat_template.jinja",
)
_UNWANTED = ("*/*", "consolidated*")
"""Folders of other formats, and Mistral's own format beside the common one."""
_MAX_NAMED = 5
_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on a hub.

    Attributes:
        repo: `owner/name`.
        file: a GGUF file in it; None: a folder of safetensors.
        revision: a branch, a tag or a commit; None: the main branch.
    """

    repo: str
    file: str | None = None
    revision: str | None = None


def parse_hub_name(text: str) -> HubName | None:
    """`owner/name`, `owner/name/file.gguf`, either with `@revision`; None if it is neither."""
    match = _HUB_NAME.fullmatch(text)
    if match is None or match["repo"].endswith(".gguf"):  # a file in a folder
        return None
    return HubName(match["repo"], match["file"], match["revision"])


def local_model(text: str) -> Path:
    """The folder or file of a model: a path that exists, or what a hub has by that name, fetched.

    Raises:
        ModelError: it is neither a path nor a hub's name, or the hub does not give it.
    """
    found = path_or_name(text)
    return found if isinstance(found, Path) else fetch_model(found)


def path_or_name(text: str) -> Path | HubName:
    """What a user means: a model's path that exists, or else its name on a hub.

    Raises:
        ModelError: it is neither.
    """
    try:
        path = Path(text).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError):  # a name too long for a file; the home of a user who is not there
        raise ModelError(f"model {text[:_MAX_SHOWN]!r} does not exist") from None
    if is_folder or (is_file and path.suffix.lower() == ".gguf"):
        return path
    if is_file:
        raise ModelError(
            f"model {text!r} is a file that does not end in .gguf; give that, or a model's folder"
        )
    name = parse_hub_name(text)
    if name is None or path.is_absolute() or text.startswith(("./", "../", "~")):
        raise ModelError(
            f"model {text!r} does not exist; give a model's folder, a .gguf file, or a hub's owner/name"
        )
    return name


def fetch_model(name: HubName, patterns: Sequence[str] = (*DESCRIPTION, *WEIGHTS)) -> Path:
    """Downloads what is not yet in the cache.

    Args:
        name: of a folder or a file.
        patterns: which of a folder's files.

    Raises:
        ModelError: the hub has no such model, or does not give it, or cannot be reached.
    """
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    with hub_errors(name):
        if name.file is not None:
            return Path(hf_hub_download(name.repo, name.file, revision=name.revision))
        folder = Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=list(patterns),
                ignore_patterns=list(_UNWANTED),
            )
        )
    if not (folder / "config.json").exists():
        raise ModelError(f"model {_shown(name)!r} on the hub has no config.json{_gguf_files(name)}")
    return folder


@contextmanager
def hub_errors(name: HubName) -> Iterator[None]:
    """What a hub's library raises, as a `ModelError` of one sentence."""
    from huggingface_hub import errors

    try:
        yield
    # Its own errors are of the first two kinds; what the line says may be its HTTP library's, which changed.
    except (OSError, ValueError, vars(errors)["HTTPError"]) as error:
        raise ModelError(_reason(name, error)) from None


def _shown(name: HubName) -> str:
    file = "" if name.file is None else f"/{name.file}"
    return f"{name.repo}{file}" + ("" if name.revision is None else f"@{name.revision}")


def _reason(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    model = f"model {_shown(name)!r}"
    if constants.HF_HUB_OFFLINE and isinstance(
        error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    ):
        return f"{model} is neither a path nor in the cache, and HF_HUB_OFFLINE forbids to ask a hub"
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated: accept its terms on the hub, and set HF_TOKEN to a token that may read it"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{model}: the hub has no revision {name.revision!r} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model} is neither a path nor known to the hub at {constants.ENDPOINT}; "
            "if it is private, set HF_TOKEN to a token that may read it"
        )
    if isinstance(error, errors.LocalEntryNotFoundError):
        return f"{model} is not a path, and the hub at {constants.ENDPOINT} cannot be reached to look for it"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{model}: the hub has no such file{_gguf_files(name)}"
    first_line = str(error).strip().partition("\n")[0]
    return f"{model}: the hub at {constants.ENDPOINT} does not give it ({type(error).__name__}: {first_line})"


def _gguf_files(name: HubName) -> str:
    """The GGUF files that could be meant, as the rest of a sentence."""
    from huggingface_hub import list_repo_files

    try:
        files = [
            file for file in list_repo_files(name.repo, revision=name.revision) if file.endswith(".gguf")
        ]
    except (OSError, ValueError):
        return ""
    if not files:
        return ""
    named = ", ".join(f"{name.repo}/{file}" for file in files[:_MAX_NAMED])
    more = f" and {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return f"; it has GGUF files, so give one of {named}{more}"
