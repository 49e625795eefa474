"""What a reader holds of a request."""

import weakref
from typing import Self

from noria.async_engine.growing import GrowingOutput
from noria.async_engine.thread import Abort, Commands
from noria.errors import NoriaError
from noria.outputs import RequestOutput


class OutputStream:
    """Outputs of one prompt, for `async for`; made by `AsyncEngine.generate`.

    Its request is aborted when nobody can read on: a task is cancelled that waits for it, the loop over it
    is left, or it is closed or dropped. A slow reader holds nobody up: what it has missed comes at once.

    Args:
        output: what is read.
        commands: to the engine's thread.
        keeps: lives as long as the stream.
    """

    def __init__(self, output: GrowingOutput, commands: Commands, keeps: object) -> None:
        self._output = output
        self._keeps = keeps
        self._is_over = False
        self._abandon = weakref.finalize(self, _abandon, output, commands)
        self._abandon.atexit = False  # the engine ends then, and all its requests

    @property
    def request_id(self) -> str:
        """Its name, which `AsyncEngine.abort` takes."""
        return self._output.request_id

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output.

        Raises:
            RejectedError: the prompt, or what is asked for it, is bad.
            EngineDeadError: the engine was closed, or has died.
            NoriaError: another task reads it.
        """
        if self._is_over:
            raise StopAsyncIteration
        if self._output.is_being_read:
            raise NoriaError(
                f"request {self.request_id!r} is being read by another task; a stream has one reader"
            )
        try:
            await self._output.news()
            output = self._output.read()
        except BaseException:
            self.close()
            raise
        if output.finished:
            self._is_over = True
            self._abandon.detach()
        return output

    async def last(self) -> RequestOutput:
        """Reads to the end; the last output, which holds the whole answers unless the outputs are deltas.

        Raises:
            NoriaError: it was read to its end before.
        """
        last: RequestOutput | None = None
        async for output in self:
            last = output
        if last is None:
            raise NoriaError(f"request {self.request_id!r} was read to its end, or closed")
        return last

    def close(self) -> None:
        """Ends it, and its request. Idempotent."""
        self._is_over = True
        self._abandon()

    async def aclose(self) -> None:
        """`close`, for `contextlib.aclosing`."""
        self.close()


def _abandon(output: GrowingOutput, commands: Commands) -> None:
    # On any thread, and inside any other code: a collector may call it.
    output.is_abandoned = True
    commands.put(Abort(output))
