"""A Hugging Face hub on a port of its own: repositories that are made, committed to and read, in memory."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

SHA = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """What ``huggingface_hub`` asks for to push a model and to get it again.

    Attributes:
        repos: name -> path -> bytes. url: for ``HF_ENDPOINT``.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, bytes]] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def _json(self, found: Any, status: int = 200, **headers: str) -> None:
                self._send(json.dumps(found).encode(), status, **headers)

            def _send(self, data: bytes, status: int = 200, **headers: str) -> None:
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **headers}.items():
                    self.send_header(name.replace("_", "-"), value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

            def _missing(self, code: str) -> None:
                self._json({"error": code}, 404, X_Error_Code=code)

            def do_GET(self) -> None:
                path = self.path.partition("?")[0].strip("/")
                if path == "api/whoami-v2":
                    self._json({"type": "user", "name": "me", "auth": {"accessToken": {"role": "write"}}})
                elif path.startswith("api/models/"):
                    name = "/".join(path.split("/")[2:4])
                    files = hub.repos.get(name)
                    if files is None:
                        self._missing("RepoNotFound")
                    elif "/tree/" in path:
                        entries = [
                            {"type": "file", "path": p, "size": len(d), "oid": _oid(d)} for p, d in files.items()
                        ]
                        self._json(entries)
                    else:
                        siblings = [{"rfilename": file} for file in files]
                        self._json({"id": name, "sha": SHA, "private": False, "siblings": siblings, "tags": []})
                elif "/resolve/" in path:
                    name, _, rest = path.partition("/resolve/")
                    file = rest.partition("/")[2]
                    data = hub.repos.get(name, {}).get(file)
                    if data is None:
                        self._missing("EntryNotFound" if name in hub.repos else "RepoNotFound")
                    else:
                        self._send(data, ETag=f'"{_oid(data)}"', X_Repo_Commit=SHA)
                else:
                    self._missing("RepoNotFound")

            do_HEAD = do_GET

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                path = self.path.partition("?")[0].strip("/")
                name = "/".join(path.split("/")[2:4])
                if path == "api/repos/create":
                    asked = json.loads(body)
                    name = f"{asked.get('organization') or 'me'}/{asked['name']}"
                    hub.repos.setdefault(name, {})
                    self._json({"url": f"{hub.url}/{name}", "name": name, "id": name})
                elif path == "api/validate-yaml":
                    self._json({"errors": [], "warnings": []})
                elif "/preupload/" in path:
                    files = [f | {"uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]]
                    self._json({"files": files})
                else:  # a commit: a JSON object a line
                    for line in map(json.loads, body.splitlines()):
                        if line["key"] == "file":
                            value = line["value"]
                            hub.repos[name][value["path"]] = base64.b64decode(value["content"])
                    self._json({"commitOid": SHA, "commitUrl": f"{hub.url}/{name}/commit/{SHA}"})

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _oid(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
