"""What `noria --help` prints: plain text, so that nothing has to be imported for it."""

TITLE = """An LLM inference engine with continuous batching.

Finished sequences leave and waiting ones board at every step: no seat waits for the longest answer."""

START_HERE = """Start here:

  noria demo
  noria generate smollm2 --chat "Why is the sky blue?"
"""

SUMMARIES = {
    "generate": "Answer one prompt or several.",
    "chat": "Talk with a model.",
    "batch": "Answer a file of requests.",
    "demo": "Watch a real model answer 64 questions on 8 seats, then compare with static batching.",
    "bench throughput": "Output tokens per second, steps, occupancy and latencies of a workload.",
    "bench scheduler": "Cost of the decision core in steady decode, seen from Python.",
    "bench cases": "Cases in which a scheduler under pressure goes wrong, beside what vLLM's does.",
    "bench peers": "Output tokens per second of noria and of its peers, each from an environment of its own.",
    "models": "List what is supported; of one model, show its shape, its memory, and what fits.",
    "env": "Show machine, instruction sets, memory and versions, and what 'auto' means here.",
}
"""The first sentence of each command's help."""


def overview() -> str:
    """The help of `noria` itself."""
    width = max(len(name) for name in SUMMARIES)
    commands = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in SUMMARIES.items())
    return (
        f"Usage: noria COMMAND [OPTIONS]\n\n{TITLE}\n\nCommands:\n{commands}\n\n"
        f"noria COMMAND --help explains one of them, noria --version gives the version.\n\n{START_HERE}"
    )
