"""OpenAI's request and response bodies: what every client already writes and reads. Knows no torch."""

from noria.openai_api.asked import ChatAsked, CompletionAsked, read_chat, read_completion
from noria.openai_api.told import chat_body, completion_body, error_body

__all__ = [
    "ChatAsked",
    "CompletionAsked",
    "chat_body",
    "completion_body",
    "error_body",
    "read_chat",
    "read_completion",
]
