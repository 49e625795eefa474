"""A tiny random Llama on disk, and the command in this process."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from noria.cli import main


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def complaint(self) -> str:
        """The one line of a refusal."""
        assert self.code == 2, self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("noria: ")
        return lines[0]


Noria = Callable[..., Finished]


@pytest.fixture
def noria(capsys: pytest.CaptureFixture[str]) -> Noria:
    def run(*argv: str | Path) -> Finished:
        capsys.readouterr()
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Finished(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers writes it: 2 layers, byte-level BPE, a chat template."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the wheel turns and the water falls"] * 4, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>assistant: "
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=1,
        # Large weights: with small ones a random model says one token over and over.
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
