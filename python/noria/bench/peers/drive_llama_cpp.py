"""llama.cpp's server, as the package xllamacpp carries it, over HTTP on loopback."""

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

from protocol import Loaded, Request, Settings, drive


def _free_port() -> int:
    # The server takes a port as it is given, and 0 is none.
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


def load(settings: Settings) -> Loaded:
    """The server, listening on a free port."""
    import xllamacpp

    slots = next((int(option) for option in settings.options if option.isdigit()), settings.num_seqs)
    params = xllamacpp.CommonParams()
    params.model.path = settings.model
    params.n_parallel = slots
    params.n_ctx = slots * (-(-settings.max_model_len // 256) * 256)
    params.cpuparams.n_threads = settings.num_threads
    params.cpuparams_batch.n_threads = settings.num_threads
    params.port = _free_port()
    server = xllamacpp.Server(params)

    def answer(request: Request) -> int:
        body = {
            "prompt": request.prompt_token_ids,
            "n_predict": request.max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "cache_prompt": False,
        }
        # The server ends with its object, which is held here.
        address = server.listening_address + "/completion"
        asked = urllib.request.Request(
            address, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked) as reply:
            return int(json.load(reply)["tokens_predicted"])

    def run(requests: tuple[Request, ...]) -> int:
        with ThreadPoolExecutor(len(requests)) as clients:
            return sum(clients.map(answer, requests))

    return Loaded(f"llama.cpp's server (xllamacpp {version('xllamacpp')}), {slots} slots", run)


if __name__ == "__main__":
    drive(load)
