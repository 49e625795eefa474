"""The decision core: scheduler, KV block pool, prefix cache, step buffers.

Times are microseconds on any monotonic clock; the core has none of its own.
"""

from typing import Final, final

import numpy as np
import numpy.typing as npt

__version__: Final[str]

# Event kinds (column 1 of `Core.events`).
ADMITTED: Final[int]
TOKEN: Final[int]
FINISHED: Final[int]
PREEMPTED: Final[int]
RESUMED: Final[int]

# Kinds of KV events (column 0 of `Core.kv_events`).
KV_STORED: Final[int]
KV_REMOVED: Final[int]
KV_MOVED: Final[int]

# Finish reasons (column 2 of a FINISHED event).
STOP: Final[int]
LENGTH: Final[int]
ABORT: Final[int]
ERROR: Final[int]
EXPIRED: Final[int]

# Row flags.
SAMPLES: Final[int]
HOST_MASKED: Final[int]
LISTED: Final[int]
PADDING: Final[int]
GHOST: Final[int]
DEVICE_START: Final[int]
DRAFTS: Final[int]
DRAFT_IDS: Final[int]

# Words of a step buffer's header.
H_STEP_LOW: Final[int]
H_STEP_HIGH: Final[int]
H_NUM_LOST: Final[int]
H_NUM_GAINED: Final[int]
H_NUM_GAINED_BLOCKS: Final[int]
H_NUM_TABLE_CHANGES: Final[int]
H_NUM_MOVES: Final[int]
H_NUM_ROWS: Final[int]
H_NUM_TOKENS: Final[int]
H_NUM_LISTED_IDS: Final[int]
H_NUM_SAMPLE_ROWS: Final[int]
H_NUM_LOGITS: Final[int]
H_NUM_SEAT_ROWS: Final[int]
H_MAX_CONTEXT: Final[int]
H_NUM_HOST_MASKED: Final[int]
H_MAX_COUNT: Final[int]
H_NUM_SWAP_OUT: Final[int]
H_NUM_SWAP_IN: Final[int]

@final
class StepLayout:
    """Where each section of a step buffer lies; in int32 words.

    `offset_x` is the first word of section `x`, `capacity_x` its entries.
    """

    size: int
    max_num_seqs: int
    max_rows: int
    max_num_batched_tokens: int
    max_blocks_per_seq: int
    block_size: int
    num_blocks: int
    max_drafts: int
    window: int
    max_logits: int
    max_events: int
    offset_lost: int
    offset_gained: int
    offset_gained_blocks: int
    offset_table_changes: int
    offset_moves: int
    offset_swap_out: int
    offset_swap_in: int
    offset_row_seat: int
    offset_row_start: int
    offset_row_count: int
    offset_row_flags: int
    offset_row_ids: int
    offset_cu_seqlens_q: int
    offset_listed_ids: int
    capacity_gained_blocks: int
    capacity_table_changes: int
    capacity_moves: int
    capacity_swaps: int

@final
class Plan:
    """What `Core.plan` decided."""

    STEP: Final[int]
    """A step was planned: its buffer is written."""
    IDLE: Final[int]
    """Nothing to do until a submit or an update."""
    WAITING: Final[int]
    """Nothing to do until step `step` is committed (or fails)."""

    kind: int
    step: int
    """The planned step (STEP), the awaited one (WAITING), else 0."""
    num_events: int
    """Rows written to `Core.events` by this call."""

@final
class KvFigures:
    """How KV memory lies at one moment; blocks, but for `num_unused_slots`."""

    num_blocks: int
    """In all; while the pool shrinks, also those that are still to be moved."""
    num_free: int
    num_cached: int
    num_held: int
    num_free_runs: int
    """Runs that the free blocks lie in."""
    longest_free_run: int
    num_sequences: int
    """Sequences that hold blocks."""
    num_table_blocks: int
    """Table entries of all sequences; a shared block counts for each."""
    num_runs: int
    """Runs that those lie in."""
    num_unused_slots: int
    """Slots of held blocks without a token, steps in flight included."""

@final
class Core:
    """The six verbs. Not thread-safe: one thread owns it.

    Raises:
        noria.errors.ConfigError: a value is out of its range.
        noria.errors.ArrayError: of any method that takes arrays: one has other numbers, dimensions or order.
    """

    def __new__(
        cls,
        *,
        num_blocks: int,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int = 2048,
        vocab_size: int = 2147483647,
        depth: int = 2,
        max_drafts: int = 0,
        max_partial_prefills: int = 1,
        long_prefill_token_threshold: int = 0,
        enable_prefix_caching: bool = True,
        watermark_blocks: int = 0,
        scheduling_policy: str = "fcfs",
        admission: str = "peak",
        peak_percent: int = 100,
        share: str = "decode-first",
        step_target_us: int = 0,
        max_adapters: int = 0,
        max_prefix_waits: int = 4,
        max_queued: int = 1048576,
        max_queued_tokens: int = 1099511627776,
        ageing_steps: int = 1024,
        max_bypasses: int = 64,
        max_preemptions: int = 4,
        fair_input_weight: int = 1,
        fair_output_weight: int = 2,
        hash_seed: int = 0,
        num_records: int = 4096,
        max_moves: int = 64,
        forced_moves: int = 0,
        contiguous: bool = False,
        num_kv_events: int = 0,
        window: int = 0,
        num_swap_blocks: int = 0,
        record: bool = False,
    ) -> Core: ...
    @property
    def layout(self) -> StepLayout: ...
    @property
    def events(self) -> npt.NDArray[np.int64]:
        """`[max_events, 4]`: handle, kind, and two values; see DESIGN.md chapter 1.

        `plan` and `commit` overwrite its first rows. Read the property after each call: a burst of `finish`
        and `fail` may have made it a longer array.
        """
    def submit(
        self,
        now_us: int,
        prompt_token_ids: npt.NDArray[np.int32],
        max_tokens: int,
        *,
        priority: int = 0,
        tenant: int = 0,
        expected_tokens: int | None = None,
        ttft_target_us: int = 1000000,
        itl_target_us: int = 100000,
        stop_token_ids: npt.NDArray[np.int32] | None = None,
        cache_salt: bytes | None = None,
        adapter: int = 0,
        expires_us: int | None = None,
        parked: bool = False,
        host_masked: bool = False,
        reads_prefix_cache: bool = True,
    ) -> int:
        """Queues a request and returns its handle.

        `tenant`: an unsigned 64-bit number. `expected_tokens`: a guess of its output's length; it moves order
        and admission, and nothing else. The targets are what `deadline` goes by.

        `max_tokens` is cut to what `max_model_len` leaves after the prompt. `cache_salt`: at most 16
        bytes (hash a longer one); requests with different salts never share KV. `adapter`: an unsigned 64-bit
        number, 0 for none; at most `max_adapters` of them run at once, and KV is shared only within one.
        `expires_us`: the first plan at that time or later ends it as `EXPIRED`.

        Raises:
            noria.errors.EmptyPromptError, TokenOutOfRangeError, PromptTooLongError, MaxTokensError,
            NeverFitsError, QueueFullError: all are `RejectedError`.
        """
    def plan(
        self,
        now_us: int,
        buffer: npt.NDArray[np.int32],
        draft_handles: npt.NDArray[np.int64] | None = None,
        draft_counts: npt.NDArray[np.int32] | None = None,
        draft_ids: npt.NDArray[np.int32] | None = None,
    ) -> Plan:
        """Plans one step into `buffer` (`[layout.size]`, C-contiguous).

        Drafts: `draft_counts[i]` tokens for `draft_handles[i]`; their ids lie one after another in
        `draft_ids`, or are made on the device where it is None.
        """
    def commit(
        self,
        step: int,
        num_ids: npt.NDArray[np.int32],
        ids: npt.NDArray[np.int32],
        device_us: int,
        now_us: int,
    ) -> int:
        """Takes a step's sampled ids: `num_ids[row]` of them a row, one after another in `ids`.

        Steps are committed in the order planned; one that `fail` discarded is ignored.

        Returns:
            Rows written to `events`.

        Raises:
            noria.errors.CommitError: out of order, or the ids do not match the step's rows.
        """
    def fail(self, step: int, now_us: int) -> None:
        """Discards `step` and every later one in flight; their requests run again."""
    def finish(self, handle: int, num_output_tokens: int, reason: int, now_us: int) -> bool:
        """Ends a request from outside; False if it had ended already. Its FINISHED event comes with
        the next `plan` or `commit`."""
    @property
    def num_changed(self) -> int:
        """Rows that `take_changed` would give, and requests that have left the line since."""
    def take_changed(self) -> npt.NDArray[np.int64]:
        """`[n, len(FACT_FIELDS)]`: under the policy `own`, requests that have got in line since the last call
        and wait still. Each is to be given a score before the next plan."""
    def set_scores(self, handles: npt.NDArray[np.int64], scores: npt.NDArray[np.int64], now_us: int) -> None:
        """Under the policy `own`: each request's place in its band, lower first. Others are ignored."""
    @property
    def next_expiry_us(self) -> int | None:
        """When the next request expires."""
    @property
    def step_cost_ns(self) -> tuple[int, int, int]:
        """What a step takes, as fitted for `step_target_us`: in any case, a token, 1,024 attended keys."""
    def unpark(self, handle: int, now_us: int) -> bool: ...
    def expire(self, handle: int, now_us: int) -> bool: ...
    def reset_prefix_cache(self, now_us: int) -> int:
        """Forgets every cached block that nobody holds, and hides the held and pinned ones; blocks freed."""
    def resize(self, num_blocks: int, now_us: int) -> None:
        """Gives the pool another size. Cached blocks beyond it are forgotten, held ones moved by plans.

        Raises:
            noria.errors.ConfigError: out of range, less than an accepted request and pins may need, a block
                beyond is pinned, or batches are static.
        """
    def pin(
        self,
        now_us: int,
        token_ids: npt.NDArray[np.int32],
        *,
        cache_salt: bytes | None = None,
        adapter: int = 0,
    ) -> tuple[int, npt.NDArray[np.int32]]:
        """Pins the leading full blocks of `token_ids`, as far as the prefix cache holds them: the pin, and
        its blocks in order of position (`[num_blocks]`, at least one).

        They count as held, and are neither evicted nor moved until `unpin`. What a step in flight still fills
        is not pinned yet. Requests that would not fit beside what is pinned are rejected.

        Raises:
            noria.errors.PinError: no block is found, or the watermark and accepted requests leave too few.
        """
    def unpin(self, pin: int, now_us: int) -> bool:
        """Gives up a pin; what nobody else holds is cached again. False if there is no such pin."""
    @property
    def num_pinned_blocks(self) -> int:
        """Distinct blocks that are pinned."""
    @property
    def is_shrinking(self) -> bool:
        """Whether a block beyond the new size is still in use. The steps in flight when this turns false
        still read such blocks."""
    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, as last set; block 0 is not counted."""
    def kv_figures(self) -> KvFigures:
        """Counts how KV memory lies; O(table entries)."""
    @property
    def num_kv_events(self) -> int:
        """KV events ever."""
    def kv_events(self, first: int) -> tuple[int, npt.NDArray[np.int64]]:
        """KV events from number `first` on.

        Returns:
            How many of them were dropped, and `[n, 8 + block_size]` the others: kind, block, where it
            was, hash (low, high), the prefix's before it (low, high), number of tokens, tokens (−1
            behind them).
        """
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_parked(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_in_flight(self) -> int:
        """Steps planned and not yet committed."""
    @property
    def num_free_blocks(self) -> int: ...
    @property
    def num_cached_blocks(self) -> int:
        """Blocks that no request holds and whose content can still be found."""
    @property
    def num_held_blocks(self) -> int: ...
    def records(self) -> npt.NDArray[np.int64]:
        """`[n, len(RECORD_FIELDS)]`: the last committed steps, oldest first."""
    def recording(self) -> bytes:
        """Every verb so far, if built with `record=True`."""
    def check(self) -> None:
        """Recounts every invariant from scratch. Raises AssertionError on the first broken one."""

RECORD_FIELDS: Final[tuple[str, ...]]
FACT_FIELDS: Final[tuple[str, ...]]

def replay(recording: bytes) -> list[int]:
    """Runs a recording in a fresh core; a 64-bit digest of each planned buffer, in order."""

@final
class Expander:
    """A runner's seat state, and the arrays that a model reads; DESIGN.md chapter 2.2.

    Every array is allocated once, and is overwritten by each `expand`.
    """

    def __new__(cls, layout: StepLayout) -> Expander: ...
    layout: StepLayout
    input_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    cu_seqlens_q: npt.NDArray[np.int32]
    context_lens: npt.NDArray[np.int32]
    row_seats: npt.NDArray[np.int64]
    logits_indices: npt.NDArray[np.int64]
    sample_rows: npt.NDArray[np.int64]
    block_tables: npt.NDArray[np.int32]
    last_token: npt.NDArray[np.int64]
    num_computed_tokens: npt.NDArray[np.int64]
    num_prompt_tokens: npt.NDArray[np.int64]
    def expand(self, buffer: npt.NDArray[np.int32]) -> None:
        """Applies lost and gained seats and table changes, then expands the rows."""

    def choose_greedy(
        self,
        logits: npt.NDArray[np.float32],
        num_rows: int,
        num_sample_rows: int,
        is_plain: npt.NDArray[np.bool_],
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
        """Samples the most likely token of each row, the lowest of equals, and keeps it as its seat's last.

        A row whose largest logit is NaN or infinite samples none; its seat's last token is 0 then, which any
        model can embed.

        Args:
            logits: `[num_sample_rows, vocab_size]`, of the step that was expanded last; the GIL is released.
            num_rows: of the step.
            num_sample_rows: of those that sample.
            is_plain: `[max_num_seqs]`: seats that want just that.

        Returns:
            How many tokens each row sampled, `[num_rows]`, and these in row order; None, and nothing is done,
            if a row that samples is not plain.

        Raises:
            ArrayError: an array has other numbers, dimensions or order than its kind.
            ValueError: an array is shorter than the step needs.
        """

def draw(
    weights: npt.NDArray[np.float32],
    masses: npt.NDArray[np.int64],
    seeds: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    attempt: int,
    rows: npt.NDArray[np.int64] | None = None,
    floor: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.int64]:
    """`noria.sampling.draw.draw`, on the host; `floor` is `[n]` here.

    Raises:
        ArrayError: an array has other numbers, dimensions or order than its kind.
        ValueError: arrays do not fit each other.
    """

def cpu_is_bound(num_threads: int) -> bool:
    """Whether each of so many threads of a program runs on a CPU of its own.

    So it is on Linux, where this thread may use just as many CPUs, unless `OMP_PROC_BIND` is false.
    """

def cpu_isa() -> str:
    """The instruction set of noria-cpu's kernels here: portable, avx2, avx-vnni, avx512 or avx512-vnni.

    Raises:
        ConfigError: `NORIA_CPU_ISA` names none, or one that this CPU does not have.
    """

def measure_bandwidth(seconds: float, num_threads: int | None = None) -> float:
    """Memory that threads read, in GB/s: the best of all rounds of 256 MiB that fit in a time, two at least.

    Args:
        seconds: for how long.
        num_threads: None: as many as there are CPUs for this process.

    Raises:
        ConfigError: no threads, no such time, or `NORIA_CPU_ISA` is wrong.
    """

def measure_fma(seconds: float, num_threads: int | None = None) -> float:
    """float32 multiply-adds of the instruction set, GFLOP/s (two in each); as `measure_bandwidth`."""

def measure_int8(seconds: float, num_threads: int | None = None) -> float:
    """What 8-bit weights are multiplied by, GOP/s (two a product); as `measure_bandwidth`."""

@final
class CpuBuilder:
    """Records a model's forward for noria-cpu.

    Parameters and values are numbers that the builder gives; heads are (query heads, KV heads, head size).
    Each op is the one of that name in `noria.backends.ops`, and panics on what does not fit.
    """

    def __new__(cls) -> CpuBuilder: ...
    def table(self, numbers: npt.NDArray[np.float32]) -> int: ...
    def vector(self, numbers: npt.NDArray[np.float32]) -> int: ...
    def matrix(
        self, weight: npt.NDArray[np.float32], bias: npt.NDArray[np.float32] | None, *, storage: str
    ) -> int:
        """Packs a linear map, `[out_features, in_features]`, stored as float32, bfloat16 or int8."""

    def matrix_of_blocks(
        self,
        rows: npt.NDArray[np.uint8],
        in_features: int,
        bias: npt.NDArray[np.float32] | None,
        *,
        storage: str,
    ) -> int:
        """Packs the rows of a GGUF tensor as they are, `[out_features, bytes]`: Q8_0, Q4_0 or Q4_1."""

    def embed(self, table: int) -> int: ...
    def linear(self, x: int, matrix: int) -> int: ...
    def rms_norm(self, x: int, weight: int, eps: float) -> int: ...
    def qk_norm(
        self, qkv: int, q_weight: int, k_weight: int, eps: float, heads: tuple[int, int, int]
    ) -> int: ...
    def add(self, x: int, y: int) -> int: ...
    def scale(self, x: int, factor: float) -> int: ...
    def softcap(self, x: int, cap: float) -> int: ...
    def rope(self, qkv: int, frequencies: int, scale: float, heads: tuple[int, int, int]) -> int: ...
    def attention(
        self,
        qkv: int,
        layer: int,
        heads: tuple[int, int, int],
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> int: ...
    def silu_mul(self, gate_up: int) -> int: ...
    def gelu_mul(self, gate_up: int) -> int: ...
    def logits(self, x: int, head: int) -> int: ...
    def build(self, result: int, *, num_threads: int) -> CpuProgram:
        """Ends the recording: the program that computes `result`, which is logits."""

@final
class CpuProgram:
    """A model's forward over its own parameters and threads."""

    @property
    def num_threads(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def num_logits_columns(self) -> int: ...
    @property
    def stage_ns(self) -> list[tuple[str, int]]:
        """What each stage does, in order, and its nanoseconds since the program was built.

        A product is "linear IN to OUT" or "head IN to OUT"; others are "attention" or an op on rows.
        """

    def run(
        self,
        *,
        input_ids: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        slot_mapping: npt.NDArray[np.int64],
        cu_seqlens_q: npt.NDArray[np.int32],
        context_lens: npt.NDArray[np.int32],
        row_seats: npt.NDArray[np.int64],
        block_tables: npt.NDArray[np.int32],
        logits_indices: npt.NDArray[np.int64],
        kv: npt.NDArray[np.uint8],
        kv_dtype: str,
        logits: npt.NDArray[np.float32],
    ) -> None:
        """Computes a step into `logits`, `[num_logits, columns]`; the GIL is released.

        Args:
            kv: `[layers, 2, blocks, block size, KV heads, bytes of a head]`.
            kv_dtype: `float32`, `bfloat16`, `float16`, or `int8`, whose heads begin with a float32 scale.

        Raises:
            ConfigError: `kv_dtype` is none of these.
            ArrayError: an array has other numbers, dimensions or order than its kind.
            ValueError: an array does not fit the program, the cache or the others; nothing was computed.
        """

    def run_expanded(
        self,
        expander: Expander,
        *,
        num_tokens: int,
        num_rows: int,
        num_logits: int,
        kv: npt.NDArray[np.uint8],
        kv_dtype: str,
        logits: npt.NDArray[np.float32],
    ) -> None:
        """As `run`, of the step that was expanded last: so many of each array's first entries are its."""
