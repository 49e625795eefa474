"""The engine's own thread: takes commands, turns, and hands on what happened."""

import asyncio
import logging
import queue
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from noria import _core
from noria.assembly import Asked, Assembly
from noria.async_engine.desk import Accepted, Ended, Outbox, Refused, Told, Turned
from noria.async_engine.growing import GrowingOutput
from noria.engine import EngineDeadError
from noria.errors import RejectedError
from noria.outputs import Events
from noria.requests import Submitted
from noria.stats import EngineStats

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Submit:
    """Answer a prompt; `text_us` were spent on reading it."""

    output: GrowingOutput
    asked: Asked
    text_us: int


@dataclass(frozen=True, slots=True)
class Abort:
    """End a prompt's answers; nothing happens if they have ended. `output` says so too, if it comes first."""

    output: GrowingOutput


@dataclass(frozen=True, slots=True)
class Tell:
    """Statistics are asked for."""

    asked: "asyncio.Future[EngineStats]"


@dataclass(frozen=True, slots=True)
class Stop:
    """Take no more work, and end when all has finished; unless it `drains`, abort it."""

    drains: bool


@dataclass(frozen=True, slots=True)
class Wake:
    """A grammar has compiled."""


Command = Submit | Abort | Tell | Stop | Wake
Commands = queue.SimpleQueue[Command]

CLOSED = "it was closed"


class EngineThread:
    """What runs on the thread.

    Args:
        assembly: whose engine it turns; closed at the end.
        commands: from any thread.
        outbox: to the event loop.
        texts: where prompts are read; closed at the end, and no `Submit` comes after it.
    """

    def __init__(
        self, assembly: Assembly, commands: Commands, outbox: Outbox, texts: ThreadPoolExecutor
    ) -> None:
        self._assembly = assembly
        self._engine = assembly.engine
        self._commands = commands
        self._outbox = outbox
        self._texts = texts
        self._handles: dict[GrowingOutput, set[int]] = {}  # that have not finished
        self._outputs: dict[int, GrowingOutput] = {}  # by handle
        self._is_closing = False

    def run(self) -> None:
        """Turns until it is told to stop, or the engine dies."""
        cause = CLOSED
        try:
            self._run()
        except EngineDeadError as error:
            cause = str(error).removeprefix("the engine takes no more work: ")
        except BaseException as error:  # noqa: BLE001  whatever it is, readers must hear of it
            _log.error("the engine has died", exc_info=True)
            cause = f"it has died of {type(error).__name__}: {error}"
        finally:
            self._texts.shutdown(wait=True, cancel_futures=True)
            self._assembly.close()
            self._outbox.put(Ended(cause))

    def _run(self) -> None:
        engine, watch = self._engine, self._assembly.watch
        while True:
            self._take_commands()
            if self._outbox.is_lost:
                self._take(Stop(drains=False))
            if self._is_closing and not engine.num_requests:
                return
            watch.unpark_compiled(engine)
            events = engine.turn()
            if events is not None:
                watch.see(events, engine)
                self._hand_on(events)

    def _take_commands(self) -> None:
        """All that wait; where there is nothing else to do, waits for one."""
        is_idle = not (self._engine.has_work or (self._is_closing and not self._engine.num_requests))
        # A dead engine has work for ever: its next turn says why it is dead.
        if is_idle and self._engine.is_usable:
            try:
                # What waits out of line may expire.
                self._take(self._commands.get(timeout=self._engine.seconds_to_expiry))
            except queue.Empty:
                return
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            self._take(command)

    def _take(self, command: Command) -> None:
        match command:
            case Submit():
                self._submit(command)
            case Abort():
                self._abort(command.output)
            case Tell():
                self._outbox.put(Told(command.asked, self._engine.stats()))
            case Stop():
                self._is_closing = True
                if not command.drains:
                    for handle in self._outputs:
                        self._engine.abort(handle)
            case Wake():
                pass

    def _submit(self, command: Submit) -> None:
        output, asked = command.output, command.asked
        self._engine.add_text_time(command.text_us)
        if self._is_closing:
            self._outbox.put(Refused(output, EngineDeadError(f"the engine takes no more work: {CLOSED}")))
            return
        if output.is_abandoned:
            self._outbox.put(Refused(output, RejectedError("it was given up before it was submitted")))
            return
        submitted: list[Submitted] = []
        try:
            texts = [
                None if output.kind == "final" else asked.plan.text(self._assembly.tokenizer)
                for _ in range(asked.plan.params.n)
            ]
            self._assembly.submit(asked, submitted)
        except EngineDeadError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is concerns this request alone
            self._assembly.abandon(submitted, waits=False)
            self._outbox.put(Refused(output, error))
            return
        self._outbox.put(Accepted(output, submitted, texts))
        self._handles[output] = {request.handle for request in submitted}
        self._outputs.update((request.handle, output) for request in submitted)
        if output.is_aborted:
            self._abort(output)

    def _abort(self, output: GrowingOutput) -> None:
        for handle in self._handles.get(output, ()):
            self._engine.abort(handle)

    def _hand_on(self, events: Events) -> None:
        ends = []
        for handle in events.handles[events.kinds == _core.FINISHED].tolist():
            ends.append((self._assembly.watch.take(handle), self._engine.take_cause(handle)))
            output = self._outputs.pop(handle, None)
            if output is not None:
                self._handles[output].discard(handle)
                if not self._handles[output]:
                    del self._handles[output]
        self._outbox.put(Turned(events, ends))
