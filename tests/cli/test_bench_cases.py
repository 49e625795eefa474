"""`noria bench cases`: noria's core and vLLM's scheduler on the same scripts."""

import dataclasses
import json
import sys

import pytest

from noria.bench.cases import VLLM_FIGURES, CaseRow, run_cases
from noria.bench.peers import VARIABLE, read_environments
from noria.bench.peers.case_scripts import SCRIPTS
from noria.bench.peers.scheduler import measure_vllm
from noria.errors import NoriaError


@pytest.fixture
def fake_python(tmp_path):
    """An interpreter that runs a script of its own, whatever it is given."""

    def write(script):
        code, python = tmp_path / "script.py", tmp_path / "python"
        code.write_text(script)
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {code}\n")
        python.chmod(0o755)
        return str(python)

    return write


def answers(figures):
    lines = [{"about": "vLLM 9.9"}]
    lines += [{"script": script, "figures": told} for script, told in figures.items()]
    return "\n".join(f"print({json.dumps(line)!r}, flush=True)" for line in lines)


def test_every_case_that_is_counted_meets_its_bar():
    rows = run_cases()
    cases = ["A", "B", "C", "D", "E", "F", "F", "G", "H", "I", "K", "K", "L", "N", "own"]
    assert [row.case for row in rows] == cases
    missed = [row for row in rows if not row.is_met and row.case not in "HIKL"]  # those are times
    assert not missed
    assert set(VLLM_FIGURES) == set(SCRIPTS)


def test_figures_of_an_environment_stand_in_the_table_as_measured(noria, fake_python, monkeypatch):
    figures = {**VLLM_FIGURES, "A": {"waited": 123, "ran": 1}, "I": {"us": 1e9}}
    row = CaseRow("A", "seats full", "", "waits 9 steps", "the next step", is_met=True)
    monkeypatch.setattr(
        "noria.bench.cases.run_cases",
        lambda vllm, _tell: [dataclasses.replace(row, vllm=f"{vllm['A']['waited']} and {vllm['I']['us']}")],
    )
    monkeypatch.setenv(VARIABLE, f"vllm={fake_python(answers(figures))}")
    ran = noria("bench", "cases")
    assert ran.code == 0, ran.err
    assert "vLLM 9.9 (measured here)" in " ".join(ran.out.split())
    assert "123 and 1000000000.0" in ran.out
    assert "was measured just now: vLLM 9.9" in ran.out


def test_without_an_environment_the_table_says_that_figures_are_stored(noria, monkeypatch, capsys):
    monkeypatch.delenv(VARIABLE, raising=False)
    missed = CaseRow("A", "seats full", "waits 299 steps", "waits 9 steps", "the next step", is_met=False)
    monkeypatch.setattr("noria.bench.cases.run_cases", lambda _figures, _tell: [missed])
    with pytest.raises(SystemExit) as ended:
        noria("bench", "cases")
    assert ended.value.code == 1
    told = capsys.readouterr().out
    assert "vLLM (stored)" in told
    assert "vLLM's side is stored: vLLM 0.32.0" in told
    assert "Not met: A." in told


def test_a_driver_that_dies_is_told_with_what_it_said_last(noria, fake_python, monkeypatch):
    half = {script: VLLM_FIGURES[script] for script in ("A", "B")}
    script = answers(half) + "\nraise SystemExit('no such scheduler')"
    monkeypatch.setenv(VARIABLE, f"vllm={fake_python(script)}")
    assert "vLLM's scheduler ended: no such scheduler" in noria("bench", "cases").complaint


def test_what_comes_next_is_told(fake_python):
    told = []
    measured = measure_vllm(fake_python(answers(VLLM_FIGURES)), told.append)
    assert measured.about == "vLLM 9.9"
    assert measured.figures == VLLM_FIGURES
    assert told[:3] == ["starting vLLM's scheduler", "vLLM 9.9, case A", "vLLM 9.9, case B"]


def test_one_that_answers_nothing_is_told():
    with pytest.raises(NoriaError, match="it said nothing"):
        measure_vllm("/bin/true")


@pytest.mark.skipif("vllm" not in read_environments(), reason=f"{VARIABLE} names no environment of vLLM")
def test_vllm_takes_the_steps_that_are_stored():
    measured = measure_vllm(read_environments()["vllm"])
    counted = [script for script in SCRIPTS if script[0] in "ABCDEFGN"]
    for script in counted:
        assert measured.figures[script] == pytest.approx(VLLM_FIGURES[script], abs=1e-3)
