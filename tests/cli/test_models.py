"""`noria models`: what is supported, and what one model takes."""

import pytest

from noria.cli.models import parse_bytes
from noria.errors import ConfigError
from noria.models.registry import ARCHITECTURES, GGUF_ARCHITECTURES


def facts(text: str) -> dict[str, str]:
    return dict(line.split("  ", 1) for line in text.splitlines())


def test_every_architecture_is_listed(noria):
    out = noria("models").out
    for name in (*ARCHITECTURES, *GGUF_ARCHITECTURES, "longrope", "Q4_0"):
        assert name in out


def test_one_model_is_described_without_its_weights_loaded(noria, tiny_llama):
    finished = noria("models", tiny_llama, "--dtype", "float64", "--memory", "4MiB")
    assert finished.code == 0
    shown = {name: value.strip() for name, value in facts(finished.out).items()}
    assert shown["model"] == str(tiny_llama)
    assert shown["run by"] == "noria's own forward of Llama 2 and 3, SmolLM2"
    assert shown["attention"] == "4 heads, 2 KV heads of 16"
    assert shown["context"] == "1,024 tokens"
    # 2 of K and V · 2 layers · 2 KV heads · 16 · 8 bytes
    assert shown["KV of a token"].startswith("1 KiB (2 · 2 layers · 2 KV heads · 16 · 8 bytes)")
    assert shown["KV of a context"] == "1 MiB"
    vocabulary = int(shown["vocabulary"].split()[0].replace(",", ""))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96 + 2 * 64
    count = 2 * vocabulary * 64 + 2 * layer + 64
    assert shown["weights"].startswith(f"{count / 1e6:,.1f} million, ")
    num_tokens = (4 * 2**20 - 8 * count) // 1024
    assert f"in 4 MiB: {num_tokens:,} tokens of KV beside the weights" in shown["what fits"]
    assert f"{num_tokens // 1024} contexts of 1,024" in shown["what fits"]


def test_a_budget_below_the_weights_holds_nothing(noria, tiny_llama):
    out = noria("models", tiny_llama, "--memory", "1000").out
    assert "nothing: the weights alone need" in facts(out)["what fits"]


def test_quantised_weights_are_estimated_as_the_backend_here_keeps_them(noria, smollm2_path):
    shown = facts(noria("models", smollm2_path, "--device", "cpu", "--memory", "5").out)
    assert shown["backend"].strip().startswith("noria-cpu")
    assert "of Q4_1" in shown["weights"]
    assert "the weights alone need 200.1 MiB of 5 B" in shown["what fits"]


def test_a_model_of_transformers_says_so(noria, tmp_path):
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    config = GPTNeoXConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    GPTNeoXForCausalLM(config).save_pretrained(tmp_path)
    out = noria("models", tmp_path).out
    assert "transformers' own GPTNeoXForCausalLM, over noria's paged attention" in out


def test_a_bad_model_or_size_gets_one_line(noria, tiny_llama, tmp_path):
    assert "no/such/model" in noria("models", "no/such/model").complaint
    assert "config.json" in noria("models", tmp_path).complaint
    assert (
        "--memory is 'much'; give a size as 8GiB" in noria("models", tiny_llama, "--memory", "much").complaint
    )


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8GiB", 8 * 2**30), ("500 MB", 500 * 10**6), ("123", 123), ("1.5kib", 1536)]
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text, "--memory") == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "8 apples", "nan", "1e999GB", "inf"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="give a size"):
        parse_bytes(text, "--memory")
