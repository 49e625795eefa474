"""The engine on noria-cpu: the same tokens whatever shares a batch, and a real model's."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch_harness import (
    Answer,
    Ask,
    TorchBench,
    Watched,
    answers_alone,
    expected_reason,
    make_asks,
    reference_answer,
    tiny_config,
)

from noria import LLM, SamplingParams, _core
from noria.backends.choice import chosen_backend
from noria.backends.cpu.threads import chosen_threads
from noria.bench.machine import detect_machine
from noria.errors import ConfigError
from noria.models import Model, load_model
from noria.runner.base import HostMasks, PendingIds, Ready
from noria.runner.step import StepView
from noria.runner.torch_runner import TorchExecutor

ASKS = make_asks(15, longest=300, max_tokens=16, seed=5)
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["float32", "bfloat16", "int8"])
def model(request: pytest.FixtureRequest, tiny_directory: Path) -> Model:
    dtype = torch.bfloat16 if request.param == "bfloat16" else torch.float32
    quantization = "int8" if request.param == "int8" else None
    return load_model(tiny_directory, dtype=dtype, device=CPU, backend="cpu", quantization=quantization)


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Answer]:
    return answers_alone(model, ASKS)


# In the other formats weights are rounded, and the reference's are not.
@pytest.mark.parametrize("model", ["float32"], indirect=True, scope="module")
def test_float32_answers_are_the_dense_references(
    tiny_directory: Path, model: Model, alone: list[Answer]
) -> None:
    for ask, (ids, reason) in zip(ASKS, alone, strict=True):
        assert ids == reference_answer(tiny_directory, model, ask, ids)
        assert reason == expected_reason(ask, ids)
    assert len({token for ids, _ in alone for token in ids}) > 40, "a model that repeats itself hides faults"


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("chunk", [1, 7, 0])
def test_chunks_and_depth_change_no_token(model: Model, alone: list[Answer], chunk: int, depth: int) -> None:
    config = tiny_config(depth=depth, long_prefill_token_threshold=chunk, max_partial_prefills=4)
    run = TorchBench(model, config, fill_kv=float("nan")).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_rows > run.stats.num_sample_rows, "no prompt was cut"


class ChoosesByTheSampler(Watched):
    """Has no row be plain, so that the general way is taken; and may spoil a step's first logits."""

    def __init__(self, inner: TorchExecutor, *, is_general: bool, spoiled: dict[int, float]) -> None:
        super().__init__(inner)
        self.is_general, self.spoiled, self.num_steps = is_general, spoiled, 0

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        self.num_steps += 1
        logits = self.inner._logits
        assert isinstance(logits, np.ndarray)
        if view.num_sample_rows and self.num_steps in self.spoiled:
            logits[0, 5] = self.spoiled[self.num_steps]
        if self.is_general:
            self.inner._sampler.is_plain[:] = False
        pending = super().sample(view, masks)
        assert isinstance(pending, Ready) != self.is_general or not view.num_sample_rows
        return pending


@pytest.mark.parametrize("spoiled", [{}, {9: float("nan"), 15: float("inf"), 20: float("-inf")}])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_greedy_steps_choose_as_the_sampler_does(model: Model, depth: int, spoiled: dict[int, float]) -> None:
    greedy = SamplingParams(temperature=0, seed=1, max_tokens=12)
    asks = [Ask(ask.prompt, greedy, ask.stop_token_ids) for ask in ASKS]

    def answers(is_general: bool) -> tuple[list[Answer], list[str | None]]:
        def wrap(inner: TorchExecutor) -> ChoosesByTheSampler:
            return ChoosesByTheSampler(inner, is_general=is_general, spoiled=spoiled)

        run = TorchBench(model, tiny_config(depth=depth), wrap=wrap).run(asks)
        return run.answers, run.causes

    by_the_sampler = answers(is_general=True)
    assert answers(is_general=False) == by_the_sampler
    assert any("not finite" in (cause or "") for cause in by_the_sampler[1]) == bool(spoiled)


def test_preemption_changes_no_token(model: Model) -> None:
    asks = make_asks(9, longest=50, max_tokens=40, seed=2)
    one = tiny_config(depth=1, max_num_seqs=1, enable_prefix_caching=False)
    alone = [TorchBench(model, one).run([ask]).answers[0] for ask in asks]
    config = tiny_config(block_size=4, num_kv_blocks=30, enable_prefix_caching=False, watermark=0.0)
    run = TorchBench(model, config).run(asks)
    assert run.answers == alone
    assert run.stats.num_preemptions > 0


def test_prefix_hits_change_no_token(model: Model, alone: list[Answer]) -> None:
    run = TorchBench(model, tiny_config(num_kv_blocks=60)).run([*ASKS, *ASKS])
    assert run.answers == [*alone, *alone]
    assert run.stats.num_prefix_hit_tokens > 300


def test_static_batches_change_no_token(model: Model, alone: list[Answer]) -> None:
    run = TorchBench(model, tiny_config(batching="padded", max_num_batched_tokens=2048)).run(ASKS)
    assert run.answers == alone
    assert run.stats.num_ghost_rows > 0
    assert run.stats.num_padding_tokens > 0


@pytest.mark.parametrize("block_size", [1, 5, 32])
def test_the_block_size_changes_no_token(model: Model, alone: list[Answer], block_size: int) -> None:
    config = tiny_config(block_size=block_size, num_kv_blocks=1200 // block_size, max_num_batched_tokens=50)
    assert TorchBench(model, config).run(ASKS).answers == alone


@pytest.mark.parametrize(
    "options", [{}, {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}]
)
def test_logprobs_are_the_same_bits_wherever_prompts_are_cut(
    tiny_directory: Path, options: dict[str, str]
) -> None:
    lengths = [1, 65, 130, 505]
    prompts = [[3 + (i * i + seed) % 90 for i in range(length)] for seed, length in enumerate(lengths)]
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=1, ignore_eos=True)

    def scored(budget: int) -> list[object]:
        asked = {"dtype": "float32", "backend": "cpu", "skip_tokenizer_init": True, "num_kv_blocks": 60}
        asked |= {"max_num_batched_tokens": budget, "max_num_seqs": min(budget, 4), **options}
        with LLM(tiny_directory, **asked) as llm:  # type: ignore[arg-type]
            outputs = llm.generate(prompts, params)
            return [(output.prompt_logprobs, output.outputs[0].logprobs) for output in outputs]

    whole = scored(1024)
    for budget in (1, 5, 65):
        assert scored(budget) == whole


def test_an_llm_says_which_backend_it_took(tiny_directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for asked, dtype, taken in [
        ("auto", "float32", "cpu"),
        ("auto", "float64", "torch"),
        ("torch", "float32", "torch"),
    ]:
        options = {"dtype": dtype, "backend": asked, "num_kv_blocks": 20, "skip_tokenizer_init": True}
        with LLM(tiny_directory, **options) as llm:  # type: ignore[arg-type]
            (output,) = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=3))
            assert len(output.outputs[0].token_ids) == 3
            assert llm.model.backend == taken
            assert f"backend: {llm.model.backend_reason}; " in capsys.readouterr().err


def test_what_noria_cpu_does_not_compute_is_refused_or_left_to_torch() -> None:
    with pytest.raises(ConfigError, match=r"backend is 'cpu': it computes float32 and bfloat16, .* float16"):
        chosen_backend("cpu", torch.float16, CPU)
    with pytest.raises(ConfigError, match="backend is 'cpu': it runs on CPUs, and the device is cuda"):
        chosen_backend("cpu", torch.float32, torch.device("cuda"))
    with pytest.raises(ConfigError, match="backend is 'gpu'; it must be auto, torch or cpu"):
        chosen_backend("gpu", torch.float32, CPU)
    name, reason = chosen_backend("auto", torch.float64, CPU)
    assert name == "torch"
    assert "float64" in reason


def test_a_quantization_that_nobody_computes_is_refused(tiny_directory: Path) -> None:
    with pytest.raises(ConfigError, match="quantization is 'int4'; it must be int8, or not given"):
        LLM(tiny_directory, quantization="int4")
    with pytest.raises(ConfigError, match="quantization is 'int8'; the cpu backend computes it, and this is"):
        LLM(tiny_directory, quantization="int8", backend="torch", skip_tokenizer_init=True)


def test_a_forced_instruction_set_is_used_or_named(
    monkeypatch: pytest.MonkeyPatch, tiny_directory: Path
) -> None:
    monkeypatch.setenv("NORIA_CPU_ISA", "portable")
    model = load_model(tiny_directory, dtype=torch.float32, device=CPU, backend="cpu")
    assert "portable kernels" in model.backend_reason
    config = tiny_config(max_num_seqs=1, max_num_batched_tokens=512)
    answers = TorchBench(model, config).run(ASKS[:4]).answers
    assert all(len(ids) for ids, _ in answers)
    monkeypatch.setenv("NORIA_CPU_ISA", "mmx")
    with pytest.raises(ConfigError, match="NORIA_CPU_ISA is mmx, but must be portable, avx2, avx-vnni, "):
        load_model(tiny_directory, dtype=torch.float32, device=CPU, backend="cpu")


def test_threads_follow_the_variable_and_else_the_cpus_that_may_be_used() -> None:
    machine = detect_machine()
    assert chosen_threads({"OMP_NUM_THREADS": "3,2"}, machine) == (3, "OMP_NUM_THREADS is 3,2")
    num_threads, reason = chosen_threads({}, machine)
    assert num_threads == max(1, int(machine.num_usable_cpus))
    assert reason == machine.usable_cpus_reason
    with pytest.raises(ConfigError, match="OMP_NUM_THREADS is 'two'; it must be a number from 1 to 1024"):
        chosen_threads({"OMP_NUM_THREADS": "two"}, machine)


@pytest.mark.skipif(sys.platform != "linux", reason="the system binds no threads")
def test_as_many_threads_as_cpus_are_bound_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    num_cpus = len(os.sched_getaffinity(0))
    monkeypatch.delenv("OMP_PROC_BIND", raising=False)
    assert _core.cpu_is_bound(num_cpus) == (num_cpus > 1)
    assert not _core.cpu_is_bound(num_cpus + 1)
    monkeypatch.setenv("OMP_PROC_BIND", "FALSE")
    assert not _core.cpu_is_bound(num_cpus)


def test_a_step_that_does_not_fit_is_a_value_error(tiny_directory: Path) -> None:
    model = load_model(tiny_directory, dtype=torch.float32, device=CPU, backend="cpu")
    assert model.program is not None
    bench = TorchBench(model, tiny_config())
    step = {
        "input_ids": np.array([97]),
        "positions": np.array([0]),
        "slot_mapping": np.array([16]),
        "cu_seqlens_q": np.array([0, 1], dtype=np.int32),
        "context_lens": np.array([1], dtype=np.int32),
        "row_seats": np.array([0]),
        "block_tables": np.array([[1]], dtype=np.int32),
        "logits_indices": np.array([0]),
        "kv": bench.kv.memory.view(torch.uint8).numpy(),
        "kv_dtype": "float32",
        "logits": np.zeros((1, 97), dtype=np.float32),
    }
    with pytest.raises(ValueError, match="input_ids has a 97, but must be from 0 to 96"):
        model.program.core.run(**step)  # type: ignore[arg-type]
    model.program.core.run(**(step | {"input_ids": np.array([96])}))  # type: ignore[arg-type]
    assert np.abs(step["logits"]).max() > 0
    bench.engine.close()


def test_the_machines_limits_are_measured_by_threads_and_for_a_time() -> None:
    for measure in (_core.measure_bandwidth, _core.measure_fma, _core.measure_int8):
        assert measure(0.0, 1) > 0
    assert _core.measure_fma(0.0) > 0
    with pytest.raises(ConfigError, match="seconds is -1, but must be a number of seconds from 0 on"):
        _core.measure_bandwidth(-1.0)
    with pytest.raises(ConfigError, match="num_threads is 0, but must be 1 or more"):
        _core.measure_int8(0.0, 0)


def test_a_programs_time_is_told_by_product_and_by_op(tiny_directory: Path) -> None:
    model = load_model(tiny_directory, dtype=torch.float32, device=CPU, backend="cpu")
    assert model.program is not None
    assert not any(model.program.stage_us.values())
    TorchBench(model, tiny_config()).run(ASKS[:4])
    times = model.program.stage_us
    assert {"attention", "rotate and store", "add and norm"} <= times.keys()
    assert sum(us for name, us in times.items() if name.startswith("linear ")) > 0
    assert sum(us for name, us in times.items() if name.startswith("head ")) > 0
    assert times["attention"] > 0
