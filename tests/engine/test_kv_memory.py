"""Blocks that move and a cache that is resized change no token, and memory really goes back."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch_harness import Answer, TorchBench, answers_alone, make_asks, tiny_config

from noria.config import EngineConfig
from noria.engine import Engine
from noria.errors import ConfigError
from noria.kv_stats import MOVED, REMOVED, STORED, KvEvents
from noria.models import Model

ASKS = make_asks(11, longest=120, max_tokens=24, seed=3)


@pytest.fixture(scope="module")
def alone(tiny_model: Model) -> list[Answer]:
    return answers_alone(tiny_model, ASKS)


@pytest.mark.parametrize("depth", [2, 3])
def test_a_forced_move_every_step_changes_no_token(
    tiny_model: Model, alone: list[Answer], depth: int
) -> None:
    config = tiny_config(depth=depth, num_kv_blocks=600, block_size=4 * depth)
    run = TorchBench(tiny_model, config, forced_moves=2).run([*ASKS, *ASKS])
    assert run.answers == [*alone, *alone]
    assert run.stats.num_moves >= run.stats.num_steps
    assert run.stats.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_resizes_amid_requests_change_no_token(tiny_model: Model, alone: list[Answer], depth: int) -> None:
    bench = TorchBench(tiny_model, tiny_config(depth=depth, num_kv_blocks=60, watermark=0.0))
    sizes = {3: 12, 12: 70, 16: 11, 30: 90}
    reached = []

    def on_turn(turn: int, _: object) -> None:
        if turn in sizes:
            bench.engine.resize_kv_cache(sizes[turn])
            bench.num_blocks = sizes[turn]
        if bench.kv.num_blocks not in reached:
            reached.append(bench.kv.num_blocks)

    run = bench.run(ASKS, on_turn)
    assert run.answers == alone
    assert reached == [60, 12, 70, 11, 90]
    assert run.stats.num_moves > 0


def test_a_size_below_what_a_request_may_need_is_refused_in_one_sentence(tiny_model: Model) -> None:
    bench = TorchBench(tiny_model, tiny_config(watermark=0.0))
    bench.submit(ASKS[0])
    with pytest.raises(ConfigError, match=r"^num_blocks is 1, but must be at least \d+, which a request"):
        bench.engine.resize_kv_cache(1)
    with pytest.raises(ConfigError, match="num_blocks is 0; it must be at least 1"):
        bench.engine.resize_kv_cache(0)
    assert bench.core.num_blocks == bench.kv.num_blocks == 200
    bench.engine.close()


def findable(engine: Engine) -> dict[int, int]:
    """By block, the hash of the prefix that it ends: what a router learns from all events."""
    found: dict[int, int] = {}
    events: KvEvents = engine.kv_events()
    assert events.num_missed == 0
    columns = (events.kinds.tolist(), events.blocks.tolist(), events.from_blocks.tolist(), events.hashes)
    for kind, block, from_block, key in zip(*columns, strict=True):
        if kind == STORED:
            found[block] = key
        elif kind == REMOVED:
            assert found.pop(block) == key
        else:
            assert kind == MOVED
            assert found.pop(from_block) == key
            found[block] = key
    return found


def test_a_router_learns_from_events_what_is_cached(tiny_model: Model) -> None:
    bench = TorchBench(tiny_model, tiny_config(num_kv_blocks=60), forced_moves=1, num_kv_events=4096)
    bench.run(ASKS)
    events = bench.engine.kv_events()
    assert {STORED, MOVED} <= set(events.kinds.tolist())
    assert len(findable(bench.engine)) == bench.core.num_cached_blocks
    stored = [index for index, kind in enumerate(events.kinds) if kind == STORED]
    assert all(len(events.token_ids[index]) == 16 for index in stored)
    # A chain: each parent is no prefix, or one that was stored before.
    known = {0}
    for index in stored:
        assert events.parents[index] in known
        known.add(events.hashes[index])
    later = bench.engine.kv_events(events.next_event)
    assert len(later.kinds) == 0
    first = next(ask for ask in ASKS if len(ask.prompt) >= 16)
    assert any(np.array_equal(ids, first.prompt[:16]) for ids in events.token_ids)


def test_events_that_were_dropped_are_counted(tiny_model: Model) -> None:
    bench = TorchBench(tiny_model, tiny_config(num_kv_blocks=60), num_kv_events=4)
    bench.run(ASKS)
    events = bench.engine.kv_events()
    assert len(events.kinds) == 4
    assert events.num_missed == events.next_event - 4 > 0


_SHRINKING = """
import sys
from pathlib import Path
import torch
from noria.kv_cache import KvCache
sys.path.append(sys.argv[1])
from test_kv_cache import CONFIG

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

kv = KvCache(CONFIG, 400, 16, torch.float32, torch.device("cpu"))
for layer in range(CONFIG.num_layers):
    for part in kv.layer(layer):
        part[1:] = 1.0
full, size = resident(), kv.nbytes
kv.resize(100)
print(size, full - resident(), kv.nbytes)
assert all(bool((part[1:] == 1).all()) for part in kv.layer(7))
kv.resize(400)
assert resident() - full < -size // 2
assert all(bool((part[1:101] == 1).all()) and not bool(part[110:].any()) for part in kv.layer(7))
kv.resize(600)
assert all(bool((part[1:101] == 1).all()) and len(part) == 601 for part in kv.layer(29))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_memory_of_a_smaller_cache_goes_back_to_the_system() -> None:
    models = Path(__file__).parents[1] / "models"
    done = subprocess.run(
        [sys.executable, "-c", _SHRINKING, str(models)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    size, fallen, left = (int(word) for word in done.stdout.split())
    assert fallen > (size - left) * 9 // 10


@pytest.mark.parametrize("max_moves", [0, 64])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_contiguous_sequences_that_slide_change_no_token(
    tiny_model: Model, alone: list[Answer], depth: int, max_moves: int
) -> None:
    config = tiny_config(
        depth=depth,
        num_kv_blocks=26,
        block_size=8,
        contiguous=True,
        enable_prefix_caching=False,
        max_moves=max_moves,
    )
    bench = TorchBench(tiny_model, config)
    runs_per_sequence = []
    run = bench.run([*ASKS, *ASKS], lambda *_: runs_per_sequence.append(bench.engine.kv_stats()))
    assert run.answers == [*alone, *alone]
    assert max(stats.num_sequences for stats in runs_per_sequence) > 1
    assert all(stats.num_runs == stats.num_sequences for stats in runs_per_sequence)
    assert run.stats.num_run_misses > 0
    assert (run.stats.num_moves > 0) == (max_moves > 0)


def test_contiguous_sequences_of_a_cache_that_is_resized_change_no_token(
    tiny_model: Model, alone: list[Answer]
) -> None:
    config = tiny_config(num_kv_blocks=60, contiguous=True, enable_prefix_caching=False, watermark=0.0)
    bench = TorchBench(tiny_model, config)
    sizes = {3: 14, 14: 40}

    def on_turn(turn: int, _: object) -> None:
        if turn in sizes:
            bench.engine.resize_kv_cache(sizes[turn])
            bench.num_blocks = sizes[turn]

    run = bench.run(ASKS, on_turn)
    assert run.answers == alone
    assert bench.kv.num_blocks == 40
    assert run.stats.num_moves > 0


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"contiguous": True}, r"contiguous is True, and so is enable_prefix_caching; "),
        (
            {"contiguous": True, "enable_prefix_caching": False, "batching": "padded"},
            r"contiguous is True, and batching is 'padded'; it must be 'continuous' with it",
        ),
        ({"contiguous": 1}, "contiguous is 1; it must be True or False"),
        ({"max_moves": -1}, "max_moves is -1; it must be an integer from 0 to 65536"),
    ],
)
def test_options_of_moves_that_do_not_go_together_are_refused(
    changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        EngineConfig(model="tiny", **changes)  # type: ignore[arg-type]


def test_a_core_that_may_not_move_blocks_cannot_shrink_while_they_are_held(
    tiny_model: Model, alone: list[Answer]
) -> None:
    bench = TorchBench(tiny_model, tiny_config(num_kv_blocks=60, max_moves=0, watermark=0.0))

    def on_turn(turn: int, _: object) -> None:
        if turn == 3:
            bench.engine.resize_kv_cache(12)
            bench.num_blocks = 12

    run = bench.run(ASKS, on_turn)
    assert run.answers == alone
    assert run.stats.num_moves == 0
    assert bench.kv.num_blocks == 12  # once those that held blocks beyond had ended
