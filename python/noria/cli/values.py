"""What every command refuses of its flags' texts before they are converted."""

import re
from pathlib import Path
from typing import get_args

from cyclopts import App, ArgumentCollection

from noria.errors import ConfigError

# cyclopts would read 2.5 as an integer too, and round it.
_INTEGER = re.compile(r"[+-]?(\d[\d_]*|0[xob][\da-f_]+)", re.IGNORECASE | re.ASCII)


def check_values(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Looks at what was given for each of a command's parameters; a `config` of cyclopts.

    Raises:
        ConfigError: an integer's text is none, or a file's name is empty; names the flag.
    """
    for argument in arguments:
        kinds = (argument.hint, *get_args(argument.hint))  # int | None has both
        for text in [token.value for token in argument.tokens]:
            if int in kinds and not _INTEGER.fullmatch(text):
                raise ConfigError(
                    f"{argument.name}: {text!r} is not an integer", name=argument.name, value=text
                )
            if Path in kinds and not text:  # which Path takes for the current folder
                raise ConfigError(f"{argument.name} is ''; give a file", name=argument.name, value=text)
