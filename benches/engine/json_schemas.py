"""JSON schemas that nobody here wrote: does each answer parse and validate?

Packages carry real ones. FOLDERS are searched for `.json` files that are schemas; beside them stand those of
the Hugging Face hub's inference API, where pydantic is installed. Each schema is one request, and each answer
is parsed and held against its schema by jsonschema, formats included.

    uv pip install --no-deps --target DIR ocpp check-jsonschema nbformat jupyterlab-server \\
        cyclonedx-python-lib aws-sam-translator singer-sdk
    python benches/engine/json_schemas.py MODEL DIR [--most-of-a-package 60] [--max-tokens 1024]
"""

import argparse
import asyncio
import dataclasses
import importlib.util
import inspect
import json
import re
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema

from noria import AsyncEngine, EngineConfig, SamplingParams, SamplingParamsError
from noria.bench.machine import detect_machine
from noria.outputs import CompletionOutput
from noria.sampling import StructuredOutputsParams
from noria.sampling.grammar import grammar_of

_KEYWORD = re.compile(r"the keyword (?P<quoted>'.*'?)[,( ]|Unknown (?P<format>format)|(?P<remote>Resource)")


@dataclass(frozen=True, slots=True)
class Found:
    """A schema, the package that carries it, and a name that a prompt may call it by."""

    package: str
    name: str
    schema: dict[str, Any]


@dataclass(slots=True)
class Counts:
    """What became of the schemas of one package."""

    found: int = 0
    refused: int = 0
    taken: int = 0
    valid: int = 0
    invalid: int = 0
    cut: int = 0


def schemas_in(folder: Path) -> list[Found]:
    """Every `.json` file below a folder that is a JSON schema of something."""
    found = []
    for path in sorted(folder.rglob("*.json")):
        try:
            schema = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            continue
        if isinstance(schema, dict) and ("$schema" in schema or isinstance(schema.get("properties"), dict)):
            found.append(Found(path.relative_to(folder).parts[0], path.name.removesuffix(".json"), schema))
    return found


def schemas_of_the_hub() -> list[Found]:
    """The inference API's inputs and outputs, as pydantic derives their schemas from dataclasses."""
    if importlib.util.find_spec("pydantic") is None:
        return []
    import huggingface_hub.inference._generated.types as types
    import pydantic

    return [
        Found("huggingface_hub", name, pydantic.TypeAdapter(made).json_schema())
        for name, made in sorted(vars(types).items())
        if inspect.isclass(made) and dataclasses.is_dataclass(made)
    ]


def spread(found: list[Found], most: int) -> list[Found]:
    """At most so many schemas of a package, evenly spread over it."""
    by_package: dict[str, list[Found]] = defaultdict(list)
    for one in found:
        by_package[one.package].append(one)
    return [
        of[index * len(of) // min(most, len(of))]
        for of in by_package.values()
        for index in range(min(most, len(of)))
    ]


def refusal(schema: dict[str, Any]) -> str | None:
    """What a request with this schema is refused for; None if it is taken."""
    try:
        grammar_of(StructuredOutputsParams(json=schema))
    except SamplingParamsError as error:
        return str(error)
    return None


def fault(answer: CompletionOutput, schema: dict[str, Any], error: str | None) -> str | None:
    """What is wrong with an answer that was not cut; None if it is valid."""
    if answer.finish_reason != "stop":
        return f"{answer.finish_reason}: {error}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(answer.text))
    except (ValueError, jsonschema.ValidationError) as raised:
        return str(raised).partition("\n")[0]
    return None


def keyword_of(message: str) -> str:
    """The keyword that a refusal names."""
    match = _KEYWORD.search(message)
    if match is None:
        return message.partition("refused: ")[2][:80]
    if match["quoted"]:
        return match["quoted"].rstrip(" ,(")
    return "format (unknown)" if match["format"] else "$ref to another document"


async def ask(taken: list[Found], counts: dict[str, Counts], arguments: argparse.Namespace) -> int:
    """One answer to each schema, all at once; tells of each when it is done.

    Returns:
        Tokens of all answers.
    """
    config = EngineConfig(
        model=arguments.model,
        dtype="float32",
        max_num_seqs=arguments.max_num_seqs,
        max_model_len=arguments.max_tokens + 256,
    )

    async def answer(engine: AsyncEngine, seed: int, one: Found) -> int:
        said = f"Write a short example of {one.name} as JSON, with few fields."
        params = SamplingParams(
            temperature=arguments.temperature,
            frequency_penalty=arguments.frequency_penalty,
            presence_penalty=arguments.presence_penalty,
            repetition_penalty=arguments.repetition_penalty,
            seed=seed,
            max_tokens=arguments.max_tokens,
            structured_outputs=StructuredOutputsParams(json=one.schema, disable_any_whitespace=True),
        )
        stream = engine.chat([{"role": "user", "content": said}], params, output_kind="final")
        output = await stream.last()
        (completion,) = output.outputs
        of = counts[one.package]
        of.taken += 1
        what, more = "valid", ""
        if completion.finish_reason == "length":
            of.cut += 1
            what, more = "cut", f": … {' '.join(completion.text[-60:].split())}"
        else:
            wrong = fault(completion, one.schema, output.error)
            of.valid += wrong is None
            of.invalid += wrong is not None
            if wrong is not None:
                what, more = "INVALID", f": {wrong}: {completion.text[:200]}"
        print(f"{what:<8}{len(completion.token_ids):>5} tokens  {one.package} {one.name}{more}", flush=True)
        return len(completion.token_ids)

    async with AsyncEngine(config) as engine:
        return sum(await asyncio.gather(*(answer(engine, seed, one) for seed, one in enumerate(taken))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a folder or .gguf file with a chat template")
    parser.add_argument("folders", nargs="*", type=Path, help="where packages are")
    parser.add_argument(
        "--most-of-a-package", type=int, default=60, help="schemas, spread over it evenly (default: 60)"
    )
    parser.add_argument("--max-tokens", type=int, default=1024, help="of an answer (default: 1024)")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="answered at once (default: 64)")
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.3,
        help="a small model's texts wander at 1, and most answers are cut (default: 0.3)",
    )
    parser.add_argument(
        "--frequency-penalty", type=float, default=0.3, help="what ends repetitions (default: 0.3)"
    )
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument("--output-json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    found = [one for folder in arguments.folders for one in schemas_in(folder)] + schemas_of_the_hub()
    counts: dict[str, Counts] = defaultdict(Counts)
    refused: Counter[str] = Counter()
    accepted = []
    for one in found:
        counts[one.package].found += 1
        message = refusal(one.schema)
        if message is None:
            accepted.append(one)
        else:
            counts[one.package].refused += 1
            refused[keyword_of(message)] += 1
    taken = spread(accepted, arguments.most_of_a_package)
    started = time.perf_counter()
    num_tokens = asyncio.run(ask(taken, counts, arguments))
    tell(counts, refused, num_tokens, time.perf_counter() - started)
    if arguments.output_json:
        report = {
            "counts": {package: asdict(of) for package, of in counts.items()},
            "refused": dict(refused),
            "machine": asdict(detect_machine()),
        }
        arguments.output_json.write_text(json.dumps(report, indent=2, default=str), encoding="utf-8")


def tell(counts: dict[str, Counts], refused: Counter[str], num_tokens: int, elapsed_s: float) -> None:
    """Prints a line a package, their sum, and what was refused."""
    names = [field.name for field in dataclasses.fields(Counts)]
    total = Counts(*(sum(getattr(of, name) for of in counts.values()) for name in names))
    print(f"{'package':<24}" + "".join(f"{name:>9}" for name in names))
    for package, of in [*sorted(counts.items()), ("all", total)]:
        print(f"{package:<24}" + "".join(f"{getattr(of, name):>9}" for name in names))
    print(f"{num_tokens} tokens in {elapsed_s:.0f} s; cut by length: {total.cut / max(total.taken, 1):.1%}")
    for keyword, num in refused.most_common():
        print(f"refused {num:>4}  {keyword}")


if __name__ == "__main__":
    main()
