"""The executor that runs a model with torch, on any of its devices."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from noria import _core
from noria._core import Expander, StepLayout
from noria.backends.ops import StepInputs
from noria.errors import ConfigError
from noria.kv_cache import KvCache
from noria.models import Model
from noria.runner.base import DeviceLostError, HostMasks, PendingIds, Ready, SampledIds, SeatInit
from noria.runner.scores import HeadTap, PendingScores, PromptScorer, to_host
from noria.runner.step import StepView
from noria.sampling.sampler import Sampler

_log = logging.getLogger(__name__)

_NO_LOGITS = torch.empty(0)
_NONE = -1  # in place of the token of a row that could not be sampled


class TorchExecutor:
    """An `Executor` over a model, its KV cache and a sampler.

    Args:
        model: on the device where steps are to run.
        kv: on the same device, of the core's number and size of blocks.
        layout: of the buffers.

    Raises:
        ConfigError: the core would plan drafts, which this executor does not verify.
    """

    def __init__(self, model: Model, kv: KvCache, layout: StepLayout) -> None:
        if layout.max_drafts:
            raise ConfigError(
                f"max_drafts is {layout.max_drafts}; the torch runner verifies no drafts, so it must be 0",
                name="max_drafts",
                value=layout.max_drafts,
            )
        self.expander = Expander(layout)
        self._model = model
        self._program = model.program
        self._kv = kv
        self._device = model.device
        self._on_host = model.device.type == "cpu"
        self._block_size = layout.block_size
        self._sampler = Sampler(layout.max_num_seqs, model.config.vocab_size, model.device)
        self._prompt_scorer = PromptScorer(layout.max_num_seqs, model.config.vocab_size, model.device)
        self._logits: torch.Tensor | npt.NDArray[np.float32] = _NO_LOGITS
        self._prompt_scores: PendingScores | None = None
        self._started = _mark(self._device)

        # Each shares its memory with the expander's array.
        self._input_ids = torch.from_numpy(self.expander.input_ids)
        self._positions = torch.from_numpy(self.expander.positions)
        self._slot_mapping = torch.from_numpy(self.expander.slot_mapping)
        self._cu_seqlens_q = torch.from_numpy(self.expander.cu_seqlens_q)
        self._context_lens = torch.from_numpy(self.expander.context_lens)
        self._row_seats = torch.from_numpy(self.expander.row_seats)
        self._block_tables = torch.from_numpy(self.expander.block_tables)
        self._logits_indices = torch.from_numpy(self.expander.logits_indices)
        # By seat. On the host it is the expander's own. Elsewhere the sampled ids stay on the device, so that
        # the next step need not wait until the host has seen them; `forward` puts them in their places.
        self._last_token = torch.from_numpy(self.expander.last_token)
        if not self._on_host:
            self._last_token = torch.zeros_like(self._last_token, device=self._device)

    def expand(self, view: StepView, inits: Sequence[SeatInit]) -> None:
        self.expander.expand(view.buffer)
        if not inits and not view.has_copies:
            return
        with torch.inference_mode(), _device_errors():
            if inits:
                self._sampler.set_seats(
                    view.gained_seats.tolist(),
                    [init.sampling_params for init in inits],
                    [init.seed for init in inits],
                    [init.context for init in inits],
                )
                self._prompt_scorer.set_seats(view.gained_seats, inits)
            # In this order: a block copied to the host may be given to another, and moved, in the same step.
            for pairs, copy in (
                (view.swap_out, self._kv.swap_out),
                (view.swap_in, self._kv.swap_in),
                (view.moves, self._kv.move),
            ):
                if len(pairs):
                    src, dst = torch.from_numpy(pairs.T.astype(np.int64))
                    copy(src, dst)

    def forward(self, view: StepView) -> None:
        self._prompt_scores = None  # those of a step whose sample never came
        targets = self._prompt_scorer.targets(view, self.expander)
        if targets is None and self._program is not None:
            self._logits = self._program.run_expanded(self.expander, view, self._kv)
            return
        with torch.inference_mode(), _device_errors():
            self._started = _mark(self._device)
            if targets is None:
                self._logits = self._model.forward(self._inputs(view), self._kv)
                return
            inputs = self._inputs(view)
            if self._model.has_open_head:
                ops = HeadTap(inputs, self._kv, self._model.attention)
                self._logits = self._model.network.forward(ops)
                softcap = self._model.config.logits_softcap
                self._prompt_scores = self._prompt_scorer.score(
                    targets, lambda tokens: ops.logits_of(tokens, softcap)
                )
                return

            def forward(tokens: torch.Tensor) -> torch.Tensor:
                return self._model.forward(replace(inputs, logits_indices=tokens), self._kv)

            self._logits, self._prompt_scores = self._prompt_scorer.score_recomputed(
                targets, inputs.logits_indices, forward
            )

    def sample(self, view: StepView, masks: HostMasks | None) -> PendingIds:
        chosen = self._choose_plain(view)
        if chosen is not None:
            return Ready(chosen)
        with torch.inference_mode(), _device_errors():
            logits = torch.as_tensor(self._logits)  # [num_logits, vocab_size]
            self._logits = _NO_LOGITS
            prompt_scores, self._prompt_scores = self._prompt_scores, None
            expander = self.expander
            rows = expander.sample_rows[: view.num_sample_rows]
            seats = expander.row_seats[rows]
            last_tokens = expander.logits_indices[: len(rows)]  # without drafts, one token's logits a row
            outputs = expander.positions[last_tokens] + 1 - expander.num_prompt_tokens[seats]
            if not len(rows):
                nothing = torch.empty(0, dtype=torch.int64)
                return _Pending(view.num_rows, rows, nothing, self._started, None, prompt_scores, None)
            is_supplied, interrupt = _apply_masks(view, rows, logits, masks)
            # Seats go in on the host: the sampler reads there which operations the step needs.
            sampled = self._sampler.sample(
                logits, torch.from_numpy(seats), self._moved(torch.from_numpy(outputs))
            )
            ok = sampled.ok
            if is_supplied is not None:
                ok = ok & self._moved(torch.from_numpy(is_supplied))
            self._last_token.index_copy_(0, self._moved(torch.from_numpy(seats)), sampled.ids)
            ids = torch.where(ok, sampled.ids, _NONE)
            scores = None
            at = sampled.logprob_rows
            if sampled.logprobs is not None and at is not None:
                scores = PendingScores.of(rows[at], outputs[at], sampled.logprobs)
            return _Pending(view.num_rows, rows, ids, self._started, scores, prompt_scores, interrupt)

    def _choose_plain(self, view: StepView) -> SampledIds | None:
        """The tokens of a program's step, if its rows want nothing but their most likely ones.

        It makes no call of torch. After a pass over the weights caches are cold, and each of the two dozen
        calls that `sample` makes takes tens of microseconds then: with one row, a tenth of a step.
        """
        if not isinstance(self._logits, np.ndarray) or view.num_host_masked:
            return None
        chosen = self.expander.choose_greedy(
            self._logits, view.num_rows, view.num_sample_rows, self._sampler.is_plain
        )
        return None if chosen is None else SampledIds(*chosen)

    def _inputs(self, view: StepView) -> StepInputs:
        num_tokens, num_rows, num_seat_rows = view.num_tokens, view.num_rows, view.num_seat_rows
        input_ids = self._moved(self._input_ids[:num_tokens])
        row_seats = self._moved(self._row_seats[:num_rows])
        if not self._on_host and num_seat_rows:
            input_ids[:num_seat_rows] = self._last_token[row_seats[:num_seat_rows]]  # one token each
        is_padding = (view.row_flags & _core.PADDING) != 0
        return StepInputs(
            input_ids=input_ids,
            positions=self._moved(self._positions[:num_tokens]),
            slot_mapping=self._moved(self._slot_mapping[:num_tokens]),
            cu_seqlens_q=self._moved(self._cu_seqlens_q[: num_rows + 1]),
            context_lens=self._moved(self._context_lens[:num_rows]),
            row_seats=row_seats,
            block_tables=self._moved(self._block_tables),
            logits_indices=self._moved(self._logits_indices[: view.num_logits]),
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_decode_rows=num_seat_rows,
            max_context=view.max_context,
            block_size=self._block_size,
            num_padding_tokens=int(view.row_count[is_padding].sum()),
        )

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; pageable memory is read by the call, so it may be overwritten at once."""
        return tensor if self._on_host else tensor.to(self._device, non_blocking=True)


def _mark(device: torch.device) -> torch.cuda.Event | None:
    """A mark in the device's stream of work; None on the host, where nothing lags behind."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


class _Pending:
    """Sampled ids on their way to the host.

    Args:
        num_rows: of the step.
        rows: `[n]` int64: the rows that sample; copied.
        ids: `[n]` int64 on the device; −1 where there is none.
        started: when the step's forward began.
        output_scores: of the ids, where asked for.
        prompt_scores: of prompt tokens, where asked for.
        interrupt: what a logits edit raised that its caller is to hear of.
    """

    __slots__ = (
        "_copied",
        "_ids",
        "_interrupt",
        "_num_rows",
        "_output_scores",
        "_prompt_scores",
        "_rows",
        "_started",
    )

    def __init__(
        self,
        num_rows: int,
        rows: npt.NDArray[np.int64],
        ids: torch.Tensor,
        started: torch.cuda.Event | None,
        output_scores: PendingScores | None,
        prompt_scores: PendingScores | None,
        interrupt: KeyboardInterrupt | None,
    ) -> None:
        self._interrupt = interrupt
        self._num_rows = num_rows
        self._rows = rows.copy()
        self._ids = to_host(ids)
        self._output_scores = output_scores
        self._prompt_scores = prompt_scores
        self._started = started
        self._copied = _mark(ids.device)

    def wait(self) -> SampledIds:
        device_us: int | None = None  # on the host, the runner's own clock says it
        if self._copied is not None and self._started is not None:
            with _device_errors():
                self._copied.synchronize()
                device_us = round(self._started.elapsed_time(self._copied) * 1000)
        ids = self._ids.numpy()
        is_sampled = ids >= 0
        num_ids = np.zeros(self._num_rows, dtype=np.int32)
        num_ids[self._rows] = is_sampled
        return SampledIds(
            num_ids,
            ids[is_sampled].astype(np.int32),
            device_us,
            None if self._output_scores is None else self._output_scores.wait(),
            None if self._prompt_scores is None else self._prompt_scores.wait(),
            self._interrupt,
        )


def _apply_masks(
    view: StepView, rows: npt.NDArray[np.int64], logits: torch.Tensor, masks: HostMasks | None
) -> tuple[npt.NDArray[np.bool_] | None, KeyboardInterrupt | None]:
    """Edits the logits of masked rows in place.

    Args:
        view: of the step.
        rows: `[num_sample_rows]`: its rows that sample, ascending.
        logits: `[num_sample_rows, vocab_size]`.
        masks: what the host supplied.

    Returns:
        `[num_sample_rows]`: false for a masked row without a mask: it samples nothing; None if no row is
        masked. And a KeyboardInterrupt that an edit raised.
    """
    interrupt: KeyboardInterrupt | None = None
    if not view.num_host_masked:
        return None, None
    is_supplied: npt.NDArray[np.bool_] = (view.row_flags[rows] & _core.HOST_MASKED) == 0
    if masks is None:
        return is_supplied, None
    if len(masks.rows):
        at = np.searchsorted(rows, masks.rows)
        allowed = torch.from_numpy(masks.allowed).to(logits.device)
        there = torch.from_numpy(at).to(logits.device)
        logits[there] = logits[there].masked_fill(~allowed, -torch.inf)
        is_supplied[at] = True
    for row, edit in masks.edits.items():  # a user's Python, one request each
        at_row = int(np.searchsorted(rows, row))
        try:
            logits[at_row] = edit(logits[at_row].clone())
        except BaseException as error:  # noqa: BLE001  whatever it is ends its own request, not the step
            _log.warning("a logits edit failed; its request ends", exc_info=True)
            if isinstance(error, KeyboardInterrupt):
                interrupt = error
            is_supplied[at_row] = False
            continue
        is_supplied[at_row] = True
    return is_supplied, interrupt


@contextmanager
def _device_errors() -> Iterator[None]:
    """Tells a device that computes no more from a step that failed. Running out of memory is the latter."""
    try:
        yield
    except torch.AcceleratorError as error:
        raise DeviceLostError(f"the device failed: {error}") from error
