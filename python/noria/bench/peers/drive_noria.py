"""noria itself, driven as its peers are."""

from protocol import Loaded, Request, Settings, drive


def load(settings: Settings) -> Loaded:
    """noria, its tokenizer left out."""
    import noria

    dtype = settings.chosen({"float32": "float32", "bfloat16": "bfloat16"}, "auto")
    llm = noria.LLM(
        settings.model,
        dtype=dtype,
        device="cpu",
        backend=settings.chosen({"torch": "torch", "cpu": "cpu"}, "auto"),
        quantization="int8" if "int8" in settings.options else None,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.num_seqs,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(requests: tuple[Request, ...]) -> int:
        outputs = llm.generate(
            [request.prompt_token_ids for request in requests],
            [
                noria.SamplingParams(
                    temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    dtype = str(llm.model.dtype).removeprefix("torch.")
    kind = "int8" if "int8" in settings.options else dtype
    return Loaded(f"noria {noria.__version__}, {kind}, {llm.model.backend_reason}", run)


if __name__ == "__main__":
    drive(load)
