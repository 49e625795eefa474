"""transformers: its continuous batching, or `static`, its generate on padded batches."""

from typing import TYPE_CHECKING

from protocol import Loaded, Request, Settings, drive

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load(settings: Settings) -> Loaded:
    """The model; it is run by a manager, or by `generate`."""
    import torch
    import transformers

    torch.set_num_threads(settings.num_threads)
    dtype = settings.chosen({"float32": "float32", "bfloat16": "bfloat16"}, "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(settings.model, dtype=getattr(torch, dtype))
    model.eval()
    if "static" in settings.options:
        return _static(model, settings, f"transformers {transformers.__version__}, {dtype}")
    return _continuous(model, settings, f"transformers {transformers.__version__}, {dtype}")


def _continuous(model: "PreTrainedModel", settings: Settings, about: str) -> Loaded:
    import transformers

    model.set_attn_implementation("sdpa")
    num_pages = settings.num_seqs * -(-settings.max_model_len // 256)
    # A manager, as `generate_batch` has one limit for all requests.
    manager = model.init_continuous_batching(
        generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=transformers.ContinuousBatchingConfig(
            num_blocks=num_pages,
            max_batch_tokens=2048,
            max_requests_per_batch=settings.num_seqs,
            allow_block_sharing=False,
        ),
    )

    def run(requests: tuple[Request, ...]) -> int:
        manager.start()
        try:
            for request in requests:
                manager.add_request(request.prompt_token_ids, max_new_tokens=request.max_tokens)
            num_tokens, num_left = 0, len(requests)
            while num_left:
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    num_tokens += len(output.generated_tokens)
                    num_left -= 1
            return num_tokens
        finally:
            # Its thread would look for requests while others run; its cache stays.
            manager.stop(block=True, keep_for_next_session=True)

    return Loaded(f"{about}, continuous batching", run)


def _static(model: "PreTrainedModel", settings: Settings, about: str) -> Loaded:
    import torch

    def run(requests: tuple[Request, ...]) -> int:
        for at in range(0, len(requests), settings.num_seqs):
            batch = requests[at : at + settings.num_seqs]
            longest = max(len(request.prompt_token_ids) for request in batch)
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, request in enumerate(batch):
                ids[row, -len(request.prompt_token_ids) :] = torch.tensor(request.prompt_token_ids)
                mask[row, -len(request.prompt_token_ids) :] = 1
            num_new = max(request.max_tokens for request in batch)
            with torch.inference_mode():
                model.generate(
                    ids,
                    attention_mask=mask,
                    do_sample=False,
                    min_new_tokens=num_new,
                    max_new_tokens=num_new,
                    pad_token_id=0,
                )
        return sum(request.max_tokens for request in requests)

    return Loaded(f"{about}, generate, batches of {settings.num_seqs}", run)


if __name__ == "__main__":
    drive(load)
