"""vLLM in process, on the CPU: its engine core in this process, its tokenizer left out."""

import os

from protocol import Loaded, Request, Settings, drive


def load(settings: Settings) -> Loaded:
    """vLLM's engine in this process."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    import vllm

    dtype = settings.chosen({"float32": "float32", "bfloat16": "bfloat16"}, "float32")
    is_eager = "eager" in settings.options
    llm = vllm.LLM(
        model=settings.model,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=is_eager,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.num_seqs,
        enable_prefix_caching=False,
    )

    def run(requests: tuple[Request, ...]) -> int:
        prompts = [{"prompt_token_ids": request.prompt_token_ids} for request in requests]
        params = [
            vllm.SamplingParams(
                temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False
            )
            for request in requests
        ]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return Loaded(f"vLLM {vllm.__version__}, {dtype}, {'eager' if is_eager else 'compiled'}", run)


if __name__ == "__main__":
    drive(load)
