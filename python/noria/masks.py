"""Asking for masks and logits edits, and knowing afterwards for whom that went wrong."""

import logging
from functools import partial
from typing import TYPE_CHECKING

from noria.errors import NoriaError
from noria.runner.base import HostMasks, MaskProvider, MaskRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_log = logging.getLogger(__name__)


class MaskKeeper:
    """Asks a mask provider, and remembers what it, or an edit that it gave, raised.

    The edits run on the runner's thread, before the result of their step is handed over, and causes are taken
    after it: nothing here needs a lock.

    Args:
        provider: of the engine.
    """

    def __init__(self, provider: MaskProvider) -> None:
        self._provider = provider
        self._causes: dict[int, str] = {}  # by handle; of the step that was asked about last

    def masks(self, request: MaskRequest) -> HostMasks | None:
        """What the provider gives; None if it raises, which ends the requests it was asked about."""
        handles = request.handles.tolist()
        self._causes.clear()  # every earlier step is committed, or failed and its rows run again
        try:
            masks = self._provider(request)
        except Exception as error:  # noqa: BLE001  whatever it raises ends the requests it was asked about
            _log.warning("the mask provider failed; %d requests end", len(handles), exc_info=True)
            self._causes.update(dict.fromkeys(handles, f"its mask provider failed: {_told(error)}"))
            return None
        if not masks.edits:
            return masks
        of_row = dict(zip(request.rows.tolist(), handles, strict=True))
        edits = {row: partial(self._edit, of_row.get(row), edit) for row, edit in masks.edits.items()}
        return HostMasks(masks.rows, masks.allowed, edits)

    def take_cause(self, handle: int) -> str | None:
        """Why a request that has ended could not be masked or edited, once; None if that did not fail."""
        return self._causes.pop(handle, None)

    def _edit(
        self,
        handle: int | None,
        edit: "Callable[[torch.Tensor], torch.Tensor]",
        logits: "torch.Tensor",
    ) -> "torch.Tensor":
        try:
            return edit(logits)
        except BaseException as error:
            if handle is not None:
                self._causes[handle] = f"its logits processor failed: {_told(error)}"
            raise


def _told(error: BaseException) -> str:
    """The kind of an error, and what it says, if it says anything; noria's own say enough without."""
    if isinstance(error, NoriaError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
