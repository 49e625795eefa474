"""What the benchmarks count, without a model."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest

from noria.bench.lengths import longest_over_mean
from noria.bench.throughput import null_engines, run_batchings
from noria.bench.workload import Workload, synthetic_workload
from noria.config import EngineConfig

BATCHINGS = ("continuous", "padded", "gang")
VOCAB = 49_152


def run_null(
    workload: Workload,
    *,
    seats: int,
    depth: int,
    batchings: Sequence[str] = BATCHINGS,
    max_num_batched_tokens: int = 2048,
):
    configs = [
        EngineConfig(
            model="null",
            batching=name,
            max_num_seqs=seats,
            max_num_batched_tokens=max_num_batched_tokens,
            depth=depth,
        )
        for name in batchings
    ]
    start = null_engines(vocab_size=VOCAB, max_model_len=workload.static_reservation)
    return {run.batching: run for run in run_batchings(start, configs, workload)}


def test_padded_batches_take_the_steps_of_their_longest_member():
    workload = synthetic_workload(512, vocab_size=VOCAB)
    expected = longest_over_mean(workload.output_lengths, 16)
    for depth in (1, 2):
        runs = run_null(workload, seats=16, depth=depth, batchings=("continuous", "padded"))
        assert runs["continuous"].num_preemptions == runs["padded"].num_preemptions == 0
        ratio = runs["padded"].num_decode_steps / runs["continuous"].num_decode_steps
        print(f"depth {depth}: padded / continuous decode steps {ratio:.3f}, E[longest] / E {expected:.3f}")
        if depth == 1:
            assert ratio >= 0.92 * expected


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_batching_makes_the_same_tokens_and_only_padded_wastes_rows(depth):
    workload = synthetic_workload(40, vocab_size=VOCAB, seed=1)
    runs = run_null(workload, seats=8, depth=depth)
    for run in runs.values():
        assert run.num_output_tokens == workload.output_lengths.sum()
        assert run.num_wasted_tokens == 0
        assert 0 < run.seat_occupancy <= 1
    assert runs["padded"].num_ghost_rows > 0
    assert runs["padded"].num_padding_tokens > 0
    for name in ("continuous", "gang"):
        assert runs[name].num_ghost_rows == runs[name].num_padding_tokens == 0
        assert runs[name].num_rows_useful == runs[name].num_rows_computed
    assert runs["continuous"].seat_occupancy > runs["gang"].seat_occupancy


@pytest.mark.parametrize("seats", [3, 16])
def test_rows_are_useful_or_ghosts_or_padding_and_useful_ones_are_tokens_or_chunks(seats):
    workload = synthetic_workload(40, vocab_size=VOCAB, seed=1)
    runs = run_null(workload, seats=seats, depth=2, max_num_batched_tokens=200)
    for run in runs.values():
        wasted = run.num_ghost_rows + run.num_padding_rows
        assert run.num_rows_computed == run.num_rows_useful + wasted
        assert run.num_rows_useful == run.num_output_tokens + run.num_chunk_rows
        assert run.num_chunk_rows > 0
    assert runs["padded"].num_padding_rows > 0


def test_fixed_lengths_are_no_slower_in_a_static_batch():
    """Where static batching wins: nothing ends early, so nothing is refilled."""
    from noria.bench.lengths import LogNormalLengths

    fixed = LogNormalLengths(32, 0, 32, 32)
    workload = synthetic_workload(64, vocab_size=VOCAB, prompt_lengths=fixed, output_lengths=fixed)
    runs = run_null(workload, seats=16, depth=1)
    assert runs["padded"].num_decode_steps == runs["gang"].num_decode_steps == 4 * 32
    assert runs["padded"].num_decode_steps <= runs["continuous"].num_decode_steps


def test_one_batching_gives_its_figures_at_the_top_of_the_json(noria, tmp_path):
    path = tmp_path / "out.json"
    finished = noria(
        "bench", "throughput", "--null-runner", "--num-requests", "20", "--repeat", "3", "--output-json", path
    )
    assert finished.code == 0, finished.err
    report = json.loads(path.read_text())
    for name in (
        "output_tokens_per_s",
        "num_decode_steps",
        "num_rows_computed",
        "num_rows_useful",
        "seat_occupancy",
        "num_padding_tokens",
        "runner_idle_share",
    ):
        assert report[name] >= 0
    for latency in ("ttft_ms", "inter_token_ms", "e2e_ms"):
        values = report[latency]
        assert 0 <= values["p50"] <= values["p90"] <= values["p95"] <= values["p99"] <= values["max"]
    assert set(report["stage_s"]) == {"plan", "expand", "forward", "sample", "commit", "text"}
    assert report["machine"]["cpu_model"]
    assert report["torch"]["version"]
    assert report["runner"] == "null"
    assert [run["repeat"] for run in report["runs"]] == [0, 1, 2]
    spread = report["tokens_per_s"]["continuous"]
    assert spread["min"] <= spread["median"] == report["output_tokens_per_s"] <= spread["max"]


def test_several_batchings_run_in_turns_and_stand_side_by_side(noria, tmp_path):
    path = tmp_path / "out.json"
    finished = noria(
        *("bench", "throughput", "--null-runner", "--num-requests", "12", "--repeat", "2"),
        *("--batching", "continuous,padded,gang", "--output-json", path),
    )
    assert finished.code == 0, finished.err
    for word in ("continuous", "padded", "gang", "decode steps", "seat occupancy", "no model"):
        assert word in finished.out
    report = json.loads(path.read_text())
    assert [run["batching"] for run in report["runs"]] == ["continuous", "padded", "gang"] * 2
    assert "output_tokens_per_s" not in report


def test_a_dash_writes_json_and_nothing_else_to_standard_output(noria):
    finished = noria("bench", "throughput", "--null-runner", "--num-requests", "4", "--output-json", "-")
    assert json.loads(finished.out)["num_requests"] == 4
    assert "decode steps" in finished.err


def test_a_workload_file_is_run_as_it_is(noria, tmp_path):
    path, out = tmp_path / "workload.json", tmp_path / "out.json"
    entries = [{"prompt_token_ids": list(range(1, n + 2)), "max_tokens": n + 1} for n in range(5)]
    path.write_text(json.dumps(entries))
    argv = ("bench", "throughput", "--null-runner", "--workload", path, "--output-json", out)
    assert noria(*argv).code == 0
    assert json.loads(out.read_text())["num_output_tokens"] == 15
    assert noria(*argv, "--num-requests", "2").code == 0
    assert json.loads(out.read_text())["num_output_tokens"] == 3


def test_a_real_model_runs_the_same_counts_as_the_null_runner(noria, tmp_path, tiny_llama):
    reports = []
    for flags in ((str(tiny_llama),), (str(tiny_llama), "--null-runner")):
        path = tmp_path / "out.json"
        finished = noria(
            *("bench", "throughput", *flags, "--num-requests", "6", "--max-num-seqs", "3"),
            *("--output-max", "12", "--depth", "1", "--output-json", path),
        )
        assert finished.code == 0, finished.err
        reports.append(json.loads(path.read_text()))
    for name in ("num_decode_steps", "num_rows_computed", "num_output_tokens", "num_steps"):
        assert reports[0][name] == reports[1][name]
    assert reports[0]["runner"] in ("torch", "cpu")
    assert reports[0]["stage_s"]["forward"] > 0
    assert sum(reports[0]["forward_s"].values()) <= reports[0]["stage_s"]["forward"]
    assert reports[0]["forward_s"]["attention"] > 0
    assert 0 < reports[0]["limit_share"] < 1


def test_the_scheduler_bench_gives_a_row_a_size(noria, tmp_path):
    path = tmp_path / "out.json"
    finished = noria(
        *(
            "bench",
            "scheduler",
            "--running",
            "64,100",
            "--steps",
            "50",
            "--repeat",
            "2",
            "--output-json",
            path,
        )
    )
    assert finished.code == 0, finished.err
    assert "stored" in finished.out
    report = json.loads(path.read_text())
    first, second = report["rows"]
    assert (first["running"], second["running"]) == (64, 100)
    for row in report["rows"]:
        assert 0 < row["ns_per_sequence_min"] <= row["ns_per_sequence"] <= row["ns_per_sequence_max"]
        assert row["num_steps"] == 100
        assert 0.95 * row["running"] <= row["rows_per_step"] <= 1.05 * row["running"]
        assert 0.005 <= row["finished_share"] <= 0.015
        assert set(row["us_by_verb"]) == {"submit", "plan", "commit", "expand"}
    assert first["times_cheaper_than_vllm"] == pytest.approx(753 / first["us_per_step"])
    assert second["times_cheaper_than_vllm"] is None


@pytest.mark.skipif(os.name != "posix", reason="Ctrl-C is a signal on POSIX only")
def test_ctrl_c_exits_with_130_and_without_a_traceback():
    argv = ("bench", "throughput", "--null-runner", "--num-requests", "4000", "--repeat", "100")
    process = subprocess.Popen(
        [sys.executable, "-m", "noria.cli", *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    assert process.stderr.readline().startswith("running: continuous")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.strip().splitlines()[-1] == "interrupted"
    assert "Traceback" not in err
