"""Every error that noria raises on purpose: one base, and the values as attributes."""


class NoriaError(Exception):
    """Base of all of noria's errors; its text is one sentence that names the value and the limit."""


class ConfigError(NoriaError, ValueError):
    """A configuration value is out of its range.

    Attributes:
        name: the option.
        value: what was given.
    """

    def __init__(self, message: str, *, name: str, value: object) -> None:
        super().__init__(message)
        self.name = name
        self.value = value


class ArrayError(NoriaError, TypeError):
    """An array for the core has other numbers, dimensions or order than it reads.

    Attributes:
        name: the argument.
        value: what was given, in words.
    """

    def __init__(self, message: str, *, name: str, value: str) -> None:
        super().__init__(message)
        self.name = name
        self.value = value


class RejectedError(NoriaError, ValueError):
    """A request was refused at submit; nothing of it was kept.

    Attributes:
        value: what was given.
        limit: what would have been accepted, where there is a limit.
    """

    def __init__(self, message: str, *, value: object = None, limit: object = None) -> None:
        super().__init__(message)
        self.value = value
        self.limit = limit


class EmptyPromptError(RejectedError):
    """The prompt has no tokens."""


class TokenOutOfRangeError(RejectedError):
    """A prompt token id is negative or not in the vocabulary."""


class PromptTooLongError(RejectedError):
    """The prompt leaves no room for an output token in the model's context."""


class MaxTokensError(RejectedError):
    """`max_tokens` is below 1."""


class NeverFitsError(RejectedError):
    """The request would need more KV blocks than the whole pool has, less those that are pinned."""


class QueueFullError(RejectedError):
    """The queue holds as many requests, or as many of their tokens, as it may."""


class SamplingParamsError(RejectedError):
    """A sampling parameter is out of its range."""


class BodyError(RejectedError):
    """A request's JSON is not as the API has it.

    Attributes:
        param: the field.
    """

    def __init__(self, message: str, *, param: str, value: object) -> None:
        super().__init__(message, value=value)
        self.param = param


class PinError(NoriaError, ValueError):
    """Nothing was pinned: the prefix cache does not hold it, or the pool cannot spare it.

    Attributes:
        value: the blocks that would be pinned in all.
        limit: how many may be; 1, where none could be found.
    """

    def __init__(self, message: str, *, value: int, limit: int) -> None:
        super().__init__(message)
        self.value = value
        self.limit = limit


class CommitError(NoriaError):
    """A runner's result does not match the step it was for."""


class ModelError(NoriaError):
    """A model cannot be loaded: its files, its architecture or its weights are not as they must be."""


class TokenizerError(ModelError):
    """A tokenizer cannot be built from the model's files."""
