"""`noria bench peers`: engines in processes of their own."""

import json
import sys

import pytest

from noria.bench.peers import KINDS, VARIABLE, parse_entrant, read_environments
from noria.errors import ConfigError


def test_noria_and_transformers_answer_the_same_requests_in_turns(noria, tiny_llama, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, f"transformers={sys.executable}")
    report = tmp_path / "peers.json"
    runs = "noria:float32,transformers:static,transformers"
    ran = noria(
        "bench", "peers", "--hf", tiny_llama, "--run", runs, "--num-requests", 3, "--repeat", 2,
        "--max-num-seqs", 2, "--output-json", report,
    )  # fmt: skip
    assert ran.code == 0, ran.err
    measured = json.loads(report.read_text())
    assert [run["name"] for run in measured["runs"]] == runs.split(",")
    assert "generate, batches of 2" in measured["runs"][1]["about"]
    assert "continuous batching" in measured["runs"][2]["about"]
    num_tokens = measured["workload"]["num_output_tokens"]
    for run in measured["runs"]:
        rates = [pytest.approx(num_tokens / wall_s) for wall_s in run["wall_s"]]
        assert len(rates) == 2
        assert run["tokens_per_s"] == rates


def test_an_engine_that_dies_is_named_with_what_it_said_last(noria, tiny_llama, monkeypatch, tmp_path):
    shouts = tmp_path / "python"
    shouts.write_text("#!/bin/sh\necho starting >&2\necho 'no such device' >&2\nexit 1\n")
    shouts.chmod(0o755)
    monkeypatch.setenv(VARIABLE, f"vllm={shouts}")
    ran = noria("bench", "peers", "--hf", tiny_llama, "--run", "vllm", "--num-requests", 1)
    assert "vllm ended: no such device" in ran.complaint


def test_smollm2_stands_for_its_file(noria, monkeypatch, tmp_path):
    file = tmp_path / "packaged.gguf"
    file.touch()
    monkeypatch.setattr("noria.cli.options.find_smollm2", lambda: file)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    ran = noria("bench", "peers", "--gguf", "smollm2", "--run", "llama.cpp")
    assert "no environment" in ran.complaint, "the file was found"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("sglang=/bin/sh", ["'sglang=/bin/sh'", ", ".join(KINDS)]),
        ("vllm", ["'vllm'", "NAME=PYTHON"]),
        ("vllm=/nowhere/python", ["/nowhere/python", "no program"]),
    ],
)
def test_an_environment_that_cannot_be_is_refused(value, words):
    with pytest.raises(ConfigError) as refused:
        read_environments(value)
    assert all(word in str(refused.value) for word in [VARIABLE, *words])


@pytest.mark.parametrize(
    ("entrant", "words"),
    [
        ("sglang", ["'sglang'", ", ".join(KINDS)]),
        ("noria:fp4", ["'fp4'", "int8"]),
        ("llama.cpp:0", ["'0'", "a number of slots"]),
        ("transformers", ["no environment", VARIABLE]),
        ("vllm", ["--hf"]),
        ("llama.cpp:16", ["--gguf"]),
    ],
)
def test_an_entrant_that_cannot_run_is_refused(entrant, words):
    environments = {"noria": sys.executable, "vllm": sys.executable, "llama.cpp": sys.executable}
    with pytest.raises(ConfigError) as refused:
        parse_entrant(entrant, environments, "", "")
    assert all(word in str(refused.value) for word in words)


def test_each_engine_loads_the_kind_of_model_that_it_reads():
    environments = {"noria": "python", "vllm": "python", "llama.cpp": "python"}
    models = {
        name: parse_entrant(name, environments, "folder", "file.gguf").model
        for name in ("noria", "vllm", "llama.cpp")
    }
    assert models == {"noria": "folder", "vllm": "folder", "llama.cpp": "file.gguf"}
    assert parse_entrant("noria:int8", environments, "", "file.gguf").model == "file.gguf"
