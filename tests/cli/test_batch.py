"""`noria batch` on a tiny random model: OpenAI's batch format, errors of lines, resuming, Ctrl-C."""

import json
import signal
import subprocess
import sys
import time

import pytest

from noria import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with LLM(tiny_llama) as llm:
        yield llm


def chat(custom_id, **body):
    values = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": values}


def completion(custom_id, **body):
    values = {"prompt": "the wheel", "max_tokens": 8, "temperature": 0} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": values}


def write(path, asked):
    lines = [line if isinstance(line, str) else json.dumps(line) for line in asked]
    path.write_text("\n".join(lines) + "\n")


def read(path):
    results = [json.loads(line) for line in path.read_text().splitlines()]
    return {result["custom_id"] or result["id"]: result for result in results}


@pytest.fixture
def batch(noria, tiny_llama, tmp_path):
    """Runs a batch; its results by custom_id."""

    def run(asked, *flags):
        write(tmp_path / "in.jsonl", asked)
        finished = noria("batch", tiny_llama, tmp_path / "in.jsonl", tmp_path / "out.jsonl", *flags)
        assert finished.code == 0, finished.err
        assert finished.out == ""
        return read(tmp_path / "out.jsonl"), finished.err

    return run


def test_answers_are_those_of_the_library_in_openai_s_shape(batch, llm):
    results, err = batch(
        [
            chat("a"),
            chat("b", n=2, temperature=1, seed=3, model="mine"),
            chat("c", logprobs=True, top_logprobs=2),
            completion("d"),
            completion("e", prompt=["the", "water falls"], n=2, temperature=1, seed=4),
            completion("f", prompt=[5, 6, 7], logprobs=1, stop=["e"]),
        ]
    )
    assert "6 of 6 requests are done" in err
    for result in results.values():
        assert result["error"] is None
        assert result["response"]["status_code"] == 200
    bodies = {name: result["response"]["body"] for name, result in results.items()}
    greedy = SamplingParams(temperature=0, max_tokens=8)
    (said,) = llm.chat([{"role": "user", "content": "hello"}], greedy)
    (choice,) = bodies["a"]["choices"]
    assert bodies["a"]["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": said.outputs[0].text, "refusal": None}
    assert choice["finish_reason"] == said.outputs[0].finish_reason
    usage = bodies["a"]["usage"]
    assert usage["prompt_tokens"] == len(said.prompt_token_ids)
    assert usage["completion_tokens"] == len(said.outputs[0].token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert bodies["b"]["model"] == "mine"
    assert [choice["index"] for choice in bodies["b"]["choices"]] == [0, 1]
    told = bodies["c"]["choices"][0]["logprobs"]["content"]
    assert len(told) == usage["completion_tokens"]
    for place in told:
        first, second = place["top_logprobs"]
        assert place["logprob"] == first["logprob"] >= second["logprob"]
        assert bytes(place["bytes"]).decode() == place["token"]
    texts = [choice["text"] for choice in bodies["e"]["choices"]]
    sampled = SamplingParams(temperature=1, max_tokens=8, seed=4, n=2)
    outputs = llm.generate(["the", "water falls"], sampled)
    assert texts == [answer.text for output in outputs for answer in output.outputs]
    assert bodies["d"]["choices"][0]["text"] == llm.generate("the wheel", greedy)[0].outputs[0].text
    stopped = SamplingParams(temperature=0, max_tokens=8, stop=["e"], logprobs=1)
    (answer,) = llm.generate([5, 6, 7], stopped)[0].outputs
    (choice,) = bodies["f"]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (answer.text, answer.finish_reason)
    assert len(choice["logprobs"]["tokens"]) == len(answer.token_ids)


def test_a_bad_line_is_its_own_error(batch):
    results, err = batch(
        [
            chat("good"),
            "{torn",
            "[1]",
            {"method": "POST"},
            chat("good"),
            chat("url") | {"url": "/v1/embeddings"},
            chat("method") | {"method": "GET"},
            chat("key") | {"priority": 1},
            chat("body") | {"body": []},
            "",
            chat("temperature", temperature=-1),
            chat("unknown", temprature=1),
            chat("messages", messages=[]),
            chat("stream", stream=True),
            chat("tools", tools=[{"type": "function"}]),
            chat("schema", response_format={"type": "json_schema"}),
            completion("prompt", prompt=None),
            completion("echo", echo=True),
            completion("long", prompt="w " * 3000),
            completion("token", prompt=[10**6]),
            completion("bias", logit_bias={"a": 1}),
        ]
    )
    assert "20 of 20 requests are done, 19 with an error" in err
    invalid = {
        "batch_req_2": "line 2 is not valid JSON",
        "batch_req_3": "line 3 must be an object with custom_id, method, url, body",
        "batch_req_4": "line 4: custom_id must be a text; got None",
        "url": "line 6: url is '/v1/embeddings'; it must be /v1/chat/completions or /v1/completions",
        "method": "line 7: method is 'GET'; it must be POST",
        "key": "line 8 has the key 'priority'",
        "body": "line 9: body must be an object",
    }
    for name, text in invalid.items():
        assert results[name]["response"] is None
        assert text in results[name]["error"]["message"]
    refused = {
        "temperature": ("temperature", None),
        "unknown": ("'temprature' is not a parameter that noria knows", "temprature"),
        "messages": ("messages must be a list of at least one message", "messages"),
        "stream": ("stream is true", "stream"),
        "tools": ("tools[0] must be", "tools"),
        "schema": ("response_format.json_schema must have a schema", "response_format"),
        "prompt": ("prompt must be a text", "prompt"),
        "echo": ("echo is not supported", "echo"),
        "long": ("tokens", None),
        "token": ("1000000", None),
        "bias": ("logit_bias has the key 'a'", "logit_bias"),
    }
    for name, (text, param) in refused.items():
        assert results[name]["error"] is None
        assert results[name]["response"]["status_code"] == 400
        error = results[name]["response"]["body"]["error"]
        assert text in error["message"]
        assert error["param"] == param


def test_a_second_line_of_one_name_is_an_error_and_leaves_the_first(batch, tmp_path):
    batch([chat("a"), chat("a", max_tokens=2)])
    first, second = sorted(
        map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines()), key=lambda result: result["id"]
    )
    assert first["response"]["status_code"] == 200
    assert second["error"]["message"] == "line 2: custom_id 'a' is that of line 1 too"


def test_an_answer_in_json_obeys_its_schema(batch):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    rule = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": schema | {"additionalProperties": False}},
    }
    results, _ = batch([chat("a", response_format=rule, max_tokens=64, logit_bias={"1": -100})])
    (choice,) = results["a"]["response"]["body"]["choices"]
    assert json.loads(choice["message"]["content"])["a"] in (1, 2)


def test_a_run_goes_on_where_it_was_stopped(batch, tmp_path):
    asked = [
        *(completion(f"r{index}", prompt=[5, index + 2]) for index in range(6)),
        "{torn",
        completion("r0"),
    ]
    whole, _ = batch(asked)
    out = tmp_path / "out.jsonl"
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:25])
    again, err = batch(asked)
    assert "8 of 8 requests are done, 3 of them before" in err
    kept = out.read_bytes().splitlines(keepends=True)
    assert kept[:3] == lines[:3]
    assert len(kept) == 8
    texts = {
        name: result["response"] and result["response"]["body"]["choices"] for name, result in whole.items()
    }
    for name, result in again.items():
        assert (result["response"] and result["response"]["body"]["choices"]) == texts[name]
    before = out.read_bytes()
    _, err = batch(asked)
    assert "8 of 8 requests are done, 8 of them before" in err
    assert out.read_bytes() == before


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(tiny_llama, tmp_path):
    asked = [
        completion(f"r{index}", prompt=[5, 2 + index % 90], max_tokens=900, ignore_eos=True)
        for index in range(200)
    ]
    asked[0]["body"]["max_tokens"] = 2
    write(tmp_path / "in.jsonl", asked)
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "noria.cli", "batch", tiny_llama, tmp_path / "in.jsonl", out]
    with subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not (out.exists() and out.read_bytes().endswith(b"\n")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert " of 200 requests are done; the same command goes on from there" in err
    assert "Traceback" not in err
    assert "r0" in read(out)


def test_bad_files_are_one_sentence(noria, tiny_llama, tmp_path):
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    assert f"{asked}: No such file" in noria("batch", tiny_llama, asked, out).complaint
    assert not out.exists()
    write(asked, [chat("a")])
    assert "are the same file" in noria("batch", tiny_llama, asked, asked).complaint
    out.write_text("notes of mine\n")
    assert (
        "line 1 is no result of a batch; give another RESULTS"
        in noria("batch", tiny_llama, asked, out).complaint
    )
    assert out.read_text() == "notes of mine\n"
    assert "Is a directory" in noria("batch", tiny_llama, asked, tmp_path).complaint
