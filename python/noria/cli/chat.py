"""`noria chat`: a conversation in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from noria.cli.generate import sampling_params
from noria.cli.options import MODEL_HELP, ModelFlags, SamplingFlags, resolve_model
from noria.errors import ModelError, RejectedError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from noria.llm import LLM
    from noria.outputs import Events
    from noria.sampling.params import SamplingParams

EXAMPLES = """Examples:

  noria chat smollm2
  noria chat smollm2 --system "Answer in one sentence." --temperature 0.7
  printf 'What is a noria?\\nWho built the first?\\n' | noria chat smollm2
"""

_HELP = "/reset forgets the conversation, /exit leaves; Ctrl-C stops an answer, Ctrl-D leaves too."
_PROMPT = "> "

_NO_MODEL_FLAGS = ModelFlags()
_NO_SAMPLING_FLAGS = SamplingFlags()


def chat(
    model: Annotated[str, Parameter(help=MODEL_HELP)],
    /,
    *,
    system: Annotated[str | None, Parameter(help="A system message before the conversation.")] = None,
    sampling: SamplingFlags = _NO_SAMPLING_FLAGS,
    model_flags: ModelFlags = _NO_MODEL_FLAGS,
) -> None:
    """Talk with a model.

    Answers stream as their tokens come, and the conversation is kept: of each turn only the new tokens
    are computed, as the rest is in the prefix cache. Ctrl-C stops the answer only; /reset forgets the
    conversation. Where input is no terminal, each of its lines is a turn.
    """
    path = resolve_model(model)
    params = sampling_params(sampling, max_tokens=None)

    from noria.llm import LLM

    with LLM(
        path,
        dtype=model_flags.dtype,
        kv_cache_dtype=model_flags.kv_cache_dtype,
        device=model_flags.device,
        backend=model_flags.backend,
        quantization=model_flags.quantization,
        max_model_len=model_flags.max_model_len,
        max_num_seqs=1,
    ) as llm:
        if llm.tokenizer is None or llm.tokenizer.chat_template is None:
            raise ModelError(f"model {path.name} has no chat template; `noria generate` continues texts")
        conversation = Conversation(llm, params, system)
        is_terminal = sys.stdin is not None and sys.stdin.isatty()
        if is_terminal:
            import readline  # noqa: F401  line editing and history for `input`

            print(_HELP, file=sys.stderr)
        while (line := _next_line(is_terminal)) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit" | "/quit":
                    break
                case "/help":
                    print(_HELP, file=sys.stderr)
                case "/reset":
                    conversation = Conversation(llm, params, system)
                case text:
                    _answer(conversation, text)


class Conversation:
    """What was said, and the model that answers.

    Args:
        llm: with a tokenizer that has a chat template.
        params: of every answer.
        system: the first message, or None.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams", system: str | None) -> None:
        self._llm = llm
        self._params = params
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def ask(self, text: str) -> None:
        """Streams the answer to standard output, and keeps both.

        A Ctrl-C keeps what was said so far. A message that is refused is not kept.

        Raises:
            RejectedError: the conversation does not fit the context.
            KeyboardInterrupt: the answer was cut short.
        """
        from noria.cli.answer import AnswerPieces

        assert self._llm.tokenizer is not None
        asked = [*self.messages, {"role": "user", "content": text}]
        # The template writes the special tokens itself.
        prompt = self._llm.tokenizer.encode(
            self._llm.tokenizer.apply_chat_template(asked), add_special_tokens=False
        )
        answer, pieces = AnswerPieces(self._llm, self._params), list[str]()

        def show(events: "Events", _indices: "npt.NDArray[np.int64]") -> None:
            pieces.append(answer.take(events))
            sys.stdout.write(pieces[-1])
            sys.stdout.flush()

        try:
            self._llm.generate([prompt], self._params, use_tqdm=False, on_events=show)
        except RejectedError:
            raise
        except BaseException:
            self._keep(asked, pieces)
            raise
        self._keep(asked, pieces)

    def _keep(self, asked: list[dict[str, str]], pieces: list[str]) -> None:
        self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _answer(conversation: Conversation, text: str) -> None:
    try:
        conversation.ask(text)
        print(flush=True)
    except RejectedError as error:
        print(
            f"noria: {str(error).removeprefix('prompt 0: ')}; /reset forgets the conversation",
            file=sys.stderr,
        )
    except KeyboardInterrupt:
        print(flush=True)
        print("(stopped)", file=sys.stderr)


def _next_line(is_terminal: bool) -> str | None:
    """What the user says; None at the end."""
    while True:
        try:
            if is_terminal:
                return input(_PROMPT)
            if sys.stdin is None:  # closed by `<&-`
                return None
            line = sys.stdin.readline()
        except KeyboardInterrupt:
            # As in a shell: the line is dropped. Whoever wants to leave has Ctrl-D.
            if not is_terminal:
                raise
            print(file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return None
        else:
            return line if line else None
