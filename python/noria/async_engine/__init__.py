"""`AsyncEngine`: answers as streams on an event loop, while the engine turns on a thread of its own.

Three parties, and what passes between them:

    loop's thread                              engine's thread
    AsyncEngine ─ submit, abort, stop ─▶ commands ─▶ EngineThread ─ turn ─▶ Engine
    OutputStream ◀─ Desk ◀─ one wake-up a turn ─ Outbox ◀─┘

The engine's thread does nothing that grows with the number of tokens: it hands a turn's events on as they
are. The loop's thread sorts them to requests; text is made when a reader asks for it, so that a slow reader
costs the engine nothing and finds what it missed in one piece.
"""

from noria.async_engine.engine import AsyncEngine
from noria.async_engine.stream import OutputStream

__all__ = ["AsyncEngine", "OutputStream"]
