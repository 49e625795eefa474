"""What an engine is built from: given once, checked once, resolved once against the model."""

import secrets
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from noria._core import Core
from noria.errors import ConfigError
from noria.policy import PolicyFunction

if TYPE_CHECKING:
    import torch

    from noria.models import ModelConfig

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")
SCHEDULING_POLICIES = ("fcfs", "priority", "sjf", "deadline", "fair", "prefix")
SHARES = ("decode-first", "prefill-first")
ADMISSIONS = ("peak", "reserve", "optimistic")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8")
BACKENDS = ("auto", "torch", "cpu")
QUANTIZATIONS = (None, "int8")
BATCHINGS = ("continuous", "padded", "gang")
MAX_NUM_SEQS = 2**20
_MAX_STEP_MS = 2**20


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user chooses, under vLLM's names where it has one.

    Attributes:
        model: a folder with `config.json` and safetensors, a `.gguf` file, or a hub's `owner/name`.
        dtype: of weights and activations: `auto`, `float64`, `float32`, `bfloat16` or `float16`. `auto` is
            bfloat16 where the hardware computes it, else float32.
        kv_cache_dtype: of the KV cache: `auto` (the model's), `float32`, `bfloat16`, `float16` (infinite
            beyond 65,504) or `int8`: 8 bits, with a scale for each head of a token.
        device: `auto` (a GPU if there is one), `cpu`, `cuda` or `cuda:<n>`.
        backend: which ops run: `torch`, `cpu` (noria-cpu's own kernels and threads) or `auto`: cpu on a CPU,
            in a dtype that it computes.
        quantization: `int8`: linear maps in 8 bits, a scale for each output, on the cpu backend; None: as the
            file has them.
        max_model_len: tokens of a request, prompt and output together; None: as many as the model
            was made for and the KV cache can hold.
        max_num_seqs: seats: requests that run at once.
        max_num_batched_tokens: tokens of a step; at least `max_num_seqs`.
        block_size: tokens of a KV block.
        num_kv_blocks: blocks of the KV cache; None: what `kv_cache_memory_bytes` holds.
        kv_cache_memory_bytes: memory of the KV cache; None: half of what is available on a CPU, 80%
            of what is free on a GPU, and never more than all seats can use.
        enable_prefix_caching: whether prompts that begin alike share their KV.
        max_moves: KV blocks that a step moves, at most: to make the cache smaller or, where sequences are
            contiguous, to bring free blocks together; 0: none is ever moved.
        contiguous: whether each request's KV is one run of blocks, reserved for its longest when it enters;
            not together with the prefix cache.
        num_swap_blocks: KV blocks of the host's memory beside the KV cache: a preempted request's KV is
            copied there, and back when it resumes; where there is no room its tokens are computed again.
        scheduling_policy: who is next. `fcfs`: first come; `priority`: requests of lower `priority` first;
            `sjf`: the shortest remaining output, hinted or learned; `deadline`: the earliest due token;
            `fair`: the tenant that was served least; `prefix`: the most tokens in the prefix cache. All
            but `fcfs` put `priority` before their own order.
        policy: a policy of your own instead of those: a function from `WaitingRequests` to an integer for
            each, lower first, behind `priority`. It is asked about a request when that gets in line; if it
            raises, those requests end with an error. `EngineStats.policy_us` says what it cost.
        admission: when a request may enter a continuous batch. `peak`: when the peak that KV use will
            reach, by predicted lengths, fits; `reserve`: when all that it may ever need fits, so that
            growth preempts nobody; `optimistic`: when its prompt fits.
        peak_percent: how high that peak may be, in hundredths of the KV cache; above 100, some tokens are
            computed twice for fewer steps in all.
        share: who gets a step's tokens first: `decode-first`, or `prefill-first`: prompts, while what decodes
            pauses for at most eight steps in a row.
        step_target_ms: how long a step should take at most, as learned from the steps before: prompts are cut
            to it; 0: no such target.
        max_adapters: distinct adapters among requests that run at once; 0: no limit.
        max_prefix_waits: under `prefix`, how many steps a request lets pass while another computes its next
            block.
        max_queued_requests: requests that may wait; more are refused.
        max_queued_tokens: prompt tokens that may wait.
        ageing_steps: steps after which a waiting request goes to the front, past all bands; 0: never.
        max_bypasses: requests of its band that may enter before one for which there is no room.
        max_preemptions: preemptions after which a request goes to the front; 0: never.
        fair_input_weight: what a computed prompt token weighs in a tenant's account.
        fair_output_weight: what an output token weighs in it.
        batching: `continuous`, or one of two baselines to compare with: `padded` and `gang`.
        depth: steps in flight, 1 to 3; above 1, the next step is planned while one computes.
        max_partial_prefills: prompts that one step may leave half computed.
        long_prefill_token_threshold: prompt tokens that one request may take of a step; 0: all.
        watermark: share of the KV cache that an admission leaves free while something runs.
        seed: of every request that brings none.
        skip_tokenizer_init: token ids in, token ids out; no tokenizer is read.
    """

    model: str
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    backend: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    max_moves: int = 64
    contiguous: bool = False
    num_swap_blocks: int = 0
    scheduling_policy: str = "fcfs"
    policy: PolicyFunction | None = None
    admission: str = "peak"
    peak_percent: int = 100
    share: str = "decode-first"
    step_target_ms: float = 0.0
    max_adapters: int = 0
    max_prefix_waits: int = 4
    max_queued_requests: int = 2**20
    max_queued_tokens: int = 2**40
    ageing_steps: int = 1024
    max_bypasses: int = 64
    max_preemptions: int = 4
    fair_input_weight: int = 1
    fair_output_weight: int = 2
    batching: str = "continuous"
    depth: int = 2
    max_partial_prefills: int = 1
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    seed: int = 0
    skip_tokenizer_init: bool = False

    def __post_init__(self) -> None:
        model_text(self.model)
        _require_choice("dtype", self.dtype, DTYPES)
        _require_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _require_choice("backend", self.backend, BACKENDS)
        if self.quantization not in QUANTIZATIONS:
            raise ConfigError(
                f"quantization is {self.quantization!r}; it must be int8, or not given",
                name="quantization",
                value=self.quantization,
            )
        _require_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        _require_choice("admission", self.admission, ADMISSIONS)
        if self.policy is not None:
            self._check_policy()
        _require_choice("share", self.share, SHARES)
        is_number = isinstance(self.step_target_ms, int | float) and not isinstance(self.step_target_ms, bool)
        if not is_number or not 0 <= self.step_target_ms <= _MAX_STEP_MS:
            raise ConfigError(
                f"step_target_ms is {self.step_target_ms!r}; it must be a number from 0 to {_MAX_STEP_MS}",
                name="step_target_ms",
                value=self.step_target_ms,
            )
        _require_int("max_adapters", self.max_adapters, 0, 2**32 - 1)
        _require_int("max_prefix_waits", self.max_prefix_waits, 0, 2**32 - 1)
        _require_choice("batching", self.batching, BATCHINGS)
        _require_int("peak_percent", self.peak_percent, 100, 1000)
        _require_int("max_queued_requests", self.max_queued_requests, 1, 2**30)
        _require_int("max_queued_tokens", self.max_queued_tokens, 1, 2**62)
        _require_int("ageing_steps", self.ageing_steps, 0, 2**32 - 1)
        _require_int("max_bypasses", self.max_bypasses, 0, 2**32 - 1)
        _require_int("max_preemptions", self.max_preemptions, 0, 2**32 - 1)
        _require_int("fair_input_weight", self.fair_input_weight, 1, 2**16)
        _require_int("fair_output_weight", self.fair_output_weight, 1, 2**16)
        _require_bool("enable_prefix_caching", self.enable_prefix_caching)
        _require_bool("contiguous", self.contiguous)
        _require_int("max_moves", self.max_moves, 0, 2**16)
        _require_int("num_swap_blocks", self.num_swap_blocks, 0, 2**30)
        if self.num_swap_blocks and (self.contiguous or self.batching != "continuous"):
            raise ConfigError(
                f"num_swap_blocks is {self.num_swap_blocks}; it must be 0 where sequences are contiguous or "
                "batches are static",
                name="num_swap_blocks",
                value=self.num_swap_blocks,
            )
        if self.contiguous and self.enable_prefix_caching:
            raise ConfigError(
                "contiguous is True, and so is enable_prefix_caching; blocks of a run are not shared, so one "
                "of them must be False",
                name="contiguous",
                value=True,
            )
        if self.contiguous and self.batching != "continuous":
            raise ConfigError(
                f"contiguous is True, and batching is {self.batching!r}; it must be 'continuous' with it",
                name="contiguous",
                value=True,
            )
        _require_bool("skip_tokenizer_init", self.skip_tokenizer_init)
        if not isinstance(self.device, str):
            raise ConfigError(
                f"device is {self.device!r}; it must be a name: auto, cpu, cuda or cuda:<n>",
                name="device",
                value=self.device,
            )
        if self.max_model_len is not None:
            _require_int("max_model_len", self.max_model_len, 2, 2**30)
        _require_int("max_num_seqs", self.max_num_seqs, 1, MAX_NUM_SEQS)
        _require_int("max_num_batched_tokens", self.max_num_batched_tokens, 1, 2**30)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs, "
                f"{self.max_num_seqs}, as each running request decodes one token a step",
                name="max_num_batched_tokens",
                value=self.max_num_batched_tokens,
            )
        _require_int("block_size", self.block_size, 1, 4096)
        if self.num_kv_blocks is not None:
            # Slots are 32-bit numbers.
            _require_int("num_kv_blocks", self.num_kv_blocks, 1, min(2**30, (2**31 - 1) // self.block_size))
        if self.kv_cache_memory_bytes is not None:
            _require_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, 2**62)
            if self.num_kv_blocks is not None:
                raise ConfigError(
                    f"num_kv_blocks is {self.num_kv_blocks} and kv_cache_memory_bytes is "
                    f"{self.kv_cache_memory_bytes}; give one of them",
                    name="num_kv_blocks",
                    value=self.num_kv_blocks,
                )
        _require_int("depth", self.depth, 1, 3)
        _require_int("max_partial_prefills", self.max_partial_prefills, 1, 2**30)
        _require_int("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, 2**30)
        is_number = isinstance(self.watermark, int | float) and not isinstance(self.watermark, bool)
        if not is_number or not 0 <= self.watermark < 1:
            raise ConfigError(
                f"watermark is {self.watermark!r}; it must be from 0 to below 1",
                name="watermark",
                value=self.watermark,
            )
        _require_int("seed", self.seed, 0, 2**63 - 1)

    def _check_policy(self) -> None:
        if not callable(self.policy):
            raise ConfigError(
                f"policy is {self.policy!r}; it must be a function from WaitingRequests to an integer each",
                name="policy",
                value=self.policy,
            )
        if self.scheduling_policy != "fcfs":
            raise ConfigError(
                f"policy is {self.policy!r} and scheduling_policy is {self.scheduling_policy!r}; "
                "give one of them",
                name="policy",
                value=self.policy,
            )

    def resolve(
        self, model: "ModelConfig", dtype: "torch.dtype", memory_budget: int | None = None
    ) -> "ResolvedConfig":
        """Settles what depends on the model.

        Args:
            model: its configuration.
            dtype: of the model.
            memory_budget: bytes for the KV cache if the user gave neither bytes nor blocks; None if
                the system does not say.

        Raises:
            ConfigError: the context is longer than the model's or than the KV cache, or the KV cache
                holds nothing.
        """
        from noria.kv_cache import kv_bytes_per_block
        from noria.kv_format import kv_dtype, stored_formula

        limit = model.max_position_embeddings
        if self.max_model_len is not None and self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len is {self.max_model_len}; the model's context is {limit} tokens",
                name="max_model_len",
                value=self.max_model_len,
            )
        max_model_len = limit if self.max_model_len is None else self.max_model_len
        notes: list[str] = []
        window = self._window(model, notes)
        stored = kv_dtype(self.kv_cache_dtype, dtype)
        num_blocks = self._num_blocks(max_model_len, window, model, stored, memory_budget)
        num_kv_tokens = num_blocks * self.block_size
        if self._blocks_of_one(max_model_len, window) > num_blocks:
            held = f"the KV cache of {num_blocks} blocks of {self.block_size} holds {num_kv_tokens}"
            if self.max_model_len is not None or num_kv_tokens < 2:
                raise ConfigError(
                    f"max_model_len is {max_model_len}; {held}", name="max_model_len", value=max_model_len
                )
            notes.append(f"max_model_len: lowered to {num_kv_tokens} tokens from {limit}, as {held}")
            max_model_len = num_kv_tokens
        mib = kv_bytes_per_block(model, self.block_size, stored) * num_blocks / 2**20
        asked = "" if self.kv_cache_dtype == "auto" else f" ({self.kv_cache_dtype}, as asked for)"
        notes.append(
            f"KV cache: 2 · {model.num_layers} layers · {model.num_kv_heads} kv heads · "
            f"{stored_formula(model.head_dim, stored)} · {num_kv_tokens} tokens = "
            f"{mib:.{0 if mib >= 10 else 2}f} MiB{asked}"
        )
        resolved = self._resolved(model.vocab_size, max_model_len, num_blocks, notes, window)
        return replace(resolved, kv_dtype=stored)

    def resolve_without_model(self, *, vocab_size: int, max_model_len: int) -> "ResolvedConfig":
        """Settles a configuration for the null runner, whose KV cache takes no memory.

        Args:
            vocab_size: token ids are below this.
            max_model_len: tokens of a request, if the configuration does not say; without
                `num_kv_blocks` there are enough for all seats to hold this many.
        """
        if self.max_model_len is not None:
            max_model_len = self.max_model_len
        num_blocks = self.num_kv_blocks or self.max_num_seqs * -(-max_model_len // self.block_size)
        return self._resolved(vocab_size, max_model_len, num_blocks, [])

    def _window(self, model: "ModelConfig", notes: list[str]) -> int:
        """Tokens that a token sees in every layer, so that KV behind them is given back; 0: all is kept."""
        windows = [window for window in model.layer_windows if window is not None]
        if not windows:
            return 0
        if len(windows) < model.num_layers:
            kept = f"{model.num_layers - len(windows)} of {model.num_layers} layers see all tokens"
        elif self.contiguous or self.batching != "continuous":
            kept = "contiguous sequences and static batches keep what they reserve"
        else:
            notes.append(f"window: KV more than {max(windows)} tokens back is given back")
            return max(windows)
        notes.append(f"window: KV behind it is kept, as {kept}")
        return 0

    def _blocks_of_one(self, num_tokens: int, window: int) -> int:
        """Blocks that a request of so many tokens holds at once; as the core counts them."""
        num_blocks = -(-num_tokens // self.block_size)
        if not window:
            return num_blocks
        return min(num_blocks, -(-(window - 1 + self.max_num_batched_tokens) // self.block_size) + 1)

    def _resolved(
        self, vocab_size: int, max_model_len: int, num_blocks: int, notes: list[str], window: int = 0
    ) -> "ResolvedConfig":
        return ResolvedConfig(
            engine=self,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_kv_blocks=num_blocks,
            watermark_blocks=int(self.watermark * num_blocks),
            window=window,
            notes=tuple(notes),
        )

    def _num_blocks(
        self,
        max_model_len: int,
        window: int,
        model: "ModelConfig",
        stored: "torch.dtype",
        memory_budget: int | None,
    ) -> int:
        from noria.kv_cache import num_blocks_in

        if self.num_kv_blocks is not None:
            return self.num_kv_blocks
        budget = memory_budget if self.kv_cache_memory_bytes is None else self.kv_cache_memory_bytes
        if budget is None:
            raise ConfigError(
                "kv_cache_memory_bytes must be given: this system does not say how much memory is available",
                name="kv_cache_memory_bytes",
                value=None,
            )
        num_held = num_blocks_in(budget, model, self.block_size, stored)
        return min(num_held, self.max_num_seqs * self._blocks_of_one(max_model_len, window))


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """A configuration that fits its model.

    Attributes:
        engine: what was asked for.
        vocab_size: token ids are below this.
        max_model_len: tokens of a request, prompt and output together.
        num_kv_blocks: blocks of the KV cache, block 0 not counted.
        watermark_blocks: blocks that an admission leaves free while something runs.
        window: tokens that a token sees in every layer; KV behind them is given back. 0: all is kept.
        notes: lines to show when the engine starts.
        kv_dtype: of the KV cache; None where there is no model.
    """

    engine: EngineConfig
    vocab_size: int
    max_model_len: int
    num_kv_blocks: int
    watermark_blocks: int
    window: int = 0
    notes: tuple[str, ...] = ()
    kv_dtype: "torch.dtype | None" = None

    def core(
        self, *, max_drafts: int = 0, forced_moves: int = 0, num_kv_events: int = 0, record: bool = False
    ) -> Core:
        """A core of this configuration.

        Args:
            max_drafts: draft tokens a row; only the null runner verifies drafts.
            forced_moves: for tests: KV blocks that each step moves though nothing is gained by it.
            num_kv_events: KV events kept for a router; 0 for none.
            record: whether it keeps every verb for `replay`.
        """
        engine = self.engine
        return Core(
            num_blocks=self.num_kv_blocks,
            block_size=engine.block_size,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            depth=engine.depth,
            max_drafts=max_drafts,
            forced_moves=forced_moves,
            num_kv_events=num_kv_events,
            max_moves=engine.max_moves,
            contiguous=engine.contiguous,
            window=self.window,
            num_swap_blocks=engine.num_swap_blocks,
            max_partial_prefills=engine.max_partial_prefills,
            long_prefill_token_threshold=engine.long_prefill_token_threshold,
            enable_prefix_caching=engine.enable_prefix_caching,
            watermark_blocks=self.watermark_blocks,
            scheduling_policy="own" if engine.policy is not None else engine.scheduling_policy,
            admission=engine.admission if engine.batching == "continuous" else engine.batching,
            peak_percent=engine.peak_percent,
            share=engine.share,
            step_target_us=round(engine.step_target_ms * 1000),
            max_adapters=engine.max_adapters,
            max_prefix_waits=engine.max_prefix_waits,
            max_queued=engine.max_queued_requests,
            max_queued_tokens=engine.max_queued_tokens,
            ageing_steps=engine.ageing_steps,
            max_bypasses=engine.max_bypasses,
            max_preemptions=engine.max_preemptions,
            fair_input_weight=engine.fair_input_weight,
            fair_output_weight=engine.fair_output_weight,
            # Secret, so that nobody can make prompts whose hashes collide; no token depends on it.
            hash_seed=secrets.randbits(64),
            record=record,
        )


def model_text(model: object) -> str:
    """A model's path or name, as `EngineConfig` takes it.

    Raises:
        ConfigError: it is neither.
    """
    if not isinstance(model, str | Path):
        raise ConfigError(
            f"model is {model!r}; it must be the path of a folder or of a .gguf file, or a hub's owner/name",
            name="model",
            value=model,
        )
    return str(model)


def model_path(model: str) -> Path:
    """The folder or file of a model, fetched from a hub where it is no path.

    Raises:
        ModelError: there is none.
    """
    from noria.loading.hub import local_model

    return local_model(model)


def torch_device(name: str) -> "torch.device":
    """The device of that name.

    Raises:
        ConfigError: there is none.
    """
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if (
        kind not in ("cpu", "cuda")
        or (number and not (number.isascii() and number.isdigit()))
        or (kind == "cpu" and number)
    ):
        raise ConfigError(
            f"device is {name!r}; it must be auto, cpu, cuda or cuda:<n>", name="device", value=name
        )
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device is {name!r}; torch finds {torch.cuda.device_count()} GPUs here",
            name="device",
            value=name,
        )
    return torch.device(name)


def _require_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        message = f"{name} is {value!r}; it must be an integer from {low} to {high}"
        raise ConfigError(message, name=name, value=value)


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name} is {value!r}; it must be True or False", name=name, value=value)


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        message = f"{name} is {value!r}; it must be one of {', '.join(choices)}"
        raise ConfigError(message, name=name, value=value)
