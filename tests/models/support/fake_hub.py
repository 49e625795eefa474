"""As much of a hub's interface as a download asks for, on loopback."""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "a" * 40, "v1": "b" * 40}


@dataclass
class FakeHub:
    """Repositories, and what was asked for.

    Attributes:
        url: of the hub.
        repos: name -> revision -> file -> bytes.
        token: what a private repository asks for.
        private: names of those.
        requests: method, path and token of each request.
        num_bytes_sent: in bodies, by repository.
    """

    url: str
    repos: dict[str, dict[str, dict[str, bytes]]]
    token: str = "hf_secret"
    private: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    num_bytes_sent: Counter[str] = field(default_factory=Counter)


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    name: str
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
        self.hub.requests.append((self.command, path, token))
        parts = path.strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        self.name = name = "/".join(parts[2:4] if is_api else parts[:2])
        rest = parts[4:] if is_api else parts[2:]
        revisions = self.hub.repos.get(name)
        if revisions is None or (name in self.hub.private and token != self.hub.token):
            self._send(401, b"{}", with_body, {"X-Error-Code": "RepoNotFound"})
            return
        revision = rest[1] if len(rest) > 1 else "main"
        revision = next((known for known, sha in COMMITS.items() if sha == revision), revision)
        if revision not in revisions:
            self._send(404, b"{}", with_body, {"X-Error-Code": "RevisionNotFound"})
            return
        files, commit = revisions[revision], COMMITS[revision]
        if is_api and rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for file, data in files.items()
            ]
            self._send(200, json.dumps(entries).encode(), with_body, {"X-Repo-Commit": commit})
        elif is_api:
            siblings = [{"rfilename": file} for file in files]
            info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            self._send(200, json.dumps(info).encode(), with_body, {})
        elif "/".join(rest[2:]) not in files:
            self._send(404, b"", with_body, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            data = files["/".join(rest[2:])]
            headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit}
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
            if asked:
                first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
                data = data[first : last + 1]
            self._send(206 if asked else 200, data, with_body, headers)

    def _send(self, status: int, data: bytes, with_body: bool, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if with_body:
            self.hub.num_bytes_sent[self.name] += len(data)
            self.wfile.write(data)


@contextmanager
def serving(repos: dict[str, dict[str, dict[str, bytes]]]) -> Iterator[FakeHub]:
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    hub = handler.hub = FakeHub(f"http://127.0.0.1:{server.server_address[1]}", repos)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
