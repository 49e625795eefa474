"""`noria chat` on a tiny random model."""

import io
import sys

import pytest

from noria import LLM, SamplingParams
from noria.cli.chat import Conversation


@pytest.fixture(scope="module")
def llm(tiny_llama):
    with LLM(tiny_llama) as llm:
        yield llm


PARAMS = SamplingParams(temperature=0.0, max_tokens=12)


def answer(llm, text):
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    (output,) = llm.generate([ids], PARAMS)
    return output.outputs[0].text


def test_each_line_of_piped_input_is_a_turn_of_one_conversation(noria, llm, tiny_llama, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\nagain\n"))
    finished = noria("chat", tiny_llama, "--system", "be kind", "--max-tokens", "12")
    assert finished.code == 0, finished.err
    begin = "<s>system: be kind</s><s>user: hello</s><s>assistant: "
    first = answer(llm, begin)
    second = answer(llm, f"{begin}{first}</s><s>user: again</s><s>assistant: ")
    assert finished.out == f"{first}\n{second}\n"


def test_a_reset_forgets_and_an_exit_leaves(noria, llm, tiny_llama, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n/reset\nhello\n/exit\nnever\n"))
    finished = noria("chat", tiny_llama, "--max-tokens", "12")
    once = answer(llm, "<s>user: hello</s><s>assistant: ")
    assert finished.out == f"{once}\n{once}\n"


def test_a_stopped_answer_is_kept_as_far_as_it_was_said(llm, monkeypatch, capsys):
    conversation = Conversation(llm, PARAMS, None)

    class Stopping(io.StringIO):
        def write(self, text: str) -> int:
            if len(self.getvalue()) > 3:
                raise KeyboardInterrupt
            return super().write(text)

    said = Stopping()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", said)
        with pytest.raises(KeyboardInterrupt):
            conversation.ask("hello")
    assert said.getvalue()
    kept = conversation.messages[-1]
    assert kept["role"] == "assistant"
    assert kept["content"].startswith(said.getvalue())
    conversation.ask("again")
    assert len(conversation.messages) == 4


def test_a_message_that_does_not_fit_is_refused_and_forgotten(noria, tiny_llama, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello " * 400 + "\nhello\n"))
    finished = noria("chat", tiny_llama, "--max-tokens", "4", "--max-model-len", "128")
    assert finished.code == 0
    assert "127" in finished.err
    assert "/reset" in finished.err
    assert len(finished.out.splitlines()) >= 1
