"""Serve models over HTTP with OpenAI's API: chats, completions, streams; requests are decoded in batches."""

import argparse
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_pi2.cli import common, models
from torch_pi2.cli.processes import is_follower, process_group
from torch_pi2.errors import ConfigError

EXAMPLE = "torch-pi2 serve my-sparse-model --port 8000"

#: Environment variable with the API key; a command line could be read by others on the machine.
KEY = "TORCH_PI2_API_KEY"
#: Seconds for running answers once the server has to end.
GRACE_S = 30
#: Seconds for which a server reports that a process of its group is lost, before it ends.
_TELLS_S = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="MODEL", help=f"each a {common.RUNNABLE}")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address (default: 127.0.0.1, only this machine)")
    add("--port", type=common.port, default=8000, help="0: any free port")
    add("--max-batch-size", type=common.positive, default=8, help="sequences decoded together")
    add("--max-queue", type=common.count, default=64, help="sequences that may wait")
    add("--max-tokens", type=common.positive, help="tokens per sequence with prompt (default: 4096 or the model's)")
    common.add_decoding(parser, ", of each model")
    common.add_drafting(parser)
    prefix = "for keys and values of prompts, of each model, for prompts that begin alike; not in --budget; 0: none"
    add("--prefix-cache", default="256MiB", metavar="BYTES", help=prefix)
    common.add_loading(parser)
    key = f"If the environment variable {KEY} is set, clients have to send it as the API key."
    parser.epilog = f"{parser.epilog}\n\n{key}"


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.base.package import needed

    with needed("fastapi, uvicorn and prometheus-client", "serve"):
        import uvicorn  # noqa: F401

        import torch_pi2.serve.app  # noqa: F401
    from torch_pi2.base.units import parse_bytes

    for name, value in (("budget", args.budget), ("prefix-cache", args.prefix_cache)):
        parse_bytes(value or 0, f"--{name}")  # before models are loaded
    names = names_of(getattr(args, "given", args.models))  # not of a GGUF file's import
    if len(set(names)) < len(names):
        found = ", ".join(names)
        raise ConfigError("folders", expected="a name for each model", found=found, fix="Rename one of the folders.")
    if args.draft_model is not None and len(names) > 1:
        raise common.excludes("--draft-model", f"{len(names)} models", "it drafts for one")
    with process_group(args, *args.models) as args.models:
        if is_follower():
            _served(args, names[0], args.models[0])  # ends with the first process
        with socket.socket(socket.AF_INET6 if ":" in args.host else socket.AF_INET) as listening:
            # fails before models are loaded; clients cannot connect yet
            with _address(args):
                listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listening.bind((args.host, args.port))
            return _run(args, names, listening)


def names_of(folders: list[str]) -> list[str]:
    """The last part of each path, of a link its own."""
    return [Path(os.path.abspath(folder)).name for folder in folders]


def _run(args: argparse.Namespace, names: list[str], listening: socket.socket) -> dict[str, Any]:
    from torch_pi2.serve.app import application

    loaded = {name: _served(args, name, folder) for name, folder in zip(names, args.models, strict=True)}
    app = application(loaded, api_key=os.environ.get(KEY) or None)
    server = _server(app)
    for served in loaded.values():
        served.batch.start()
    try:
        with _address(args):
            listening.listen(server.config.backlog)  # before clients see the line below
        where = url_of(*listening.getsockname()[:2])
        print(f"torch-pi2: {', '.join(names)} at {where}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
        print(f"torch-pi2: a page to talk to them, and to look on: {where}/", file=sys.stderr, flush=True)
        server.run(sockets=[listening])
    finally:
        for served in loaded.values():
            served.batch.close(0)
    for served in loaded.values():
        if served.batch.failure is not None:
            raise served.batch.failure
    return {name: vars(served.batch.counts) for name, served in loaded.items()}


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def _address(args: argparse.Namespace) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        what, expected = f"--host {args.host} --port {args.port}", "an address of this machine, and a port that is free"
        fix = "Name another --port (0: any that is free), or another --host."
        raise ConfigError(what, expected=expected, found=error.strerror or str(error), fix=fix) from error


def _server(app: Any) -> Any:
    import uvicorn

    # httptools, the default where it is installed, loses the body of a request that offers h2c, as Java's clients do
    how: dict[str, Any] = {"http": "h11", "ws": "none", "server_header": False}
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=GRACE_S + 5, **how)
    # two lines for each request of theirs
    logging.getLogger("uvicorn.error").addFilter(lambda r: not re.match("Unsupported upgrade|No supported Web", r.msg))

    class Server(uvicorn.Server):
        failed_at: float | None = None

        async def on_tick(self, counter: int) -> bool:
            """Also end the server some seconds after a process of a model's group was lost."""
            served = self.config.app.state.models.values()  # type: ignore[union-attr]
            if self.failed_at is None and any(one.batch.failure is not None for one in served):
                self.failed_at = time.monotonic()
            if self.failed_at is not None and time.monotonic() > self.failed_at + _TELLS_S:
                self.should_exit = True
            return await super().on_tick(counter)

        async def shutdown(self, sockets: Any = None) -> None:
            """End the /v1/live streams, and give answers :data:`GRACE_S` to finish."""
            state = self.config.app.state  # type: ignore[union-attr]
            for live in state.live.values():
                live.close()
            for served in state.models.values():
                threading.Thread(target=served.batch.close, args=(GRACE_S,), daemon=True).start()
            await super().shutdown(sockets)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As in uvicorn, except that signals are not raised again after they ended the server."""
            numbers = (signal.SIGINT, signal.SIGTERM)
            before = [signal.signal(number, self.handle_exit) for number in numbers]
            try:
                yield
            finally:
                for number, handler in zip(numbers, before, strict=True):
                    signal.signal(number, handler)

    return Server(config)


def _served(args: argparse.Namespace, name: str, folder: str) -> Any:
    from torch_pi2.base.units import parse_bytes
    from torch_pi2.serve.batch import Batch
    from torch_pi2.serve.model import ServedModel

    most = args.max_tokens or common.MOST_TOKENS
    own_args = argparse.Namespace(**vars(args) | {"model": folder, "context": args.max_batch_size * most})
    model = models.load_any(own_args)
    how: Any = {"max_batch_size": args.max_batch_size, "max_queue": args.max_queue, "compiled": args.compile}
    how |= {"max_tokens": common.max_tokens(args, model), "prefix_bytes": parse_bytes(args.prefix_cache), "kv": args.kv}
    how |= models.drafting(args)
    batch = Batch(model, **how)
    return ServedModel(name, model, models.load_tokenizer(own_args), batch)


def render(result: dict[str, Any]) -> str:
    done = {name: (sum(counts["ended"].values()), counts["answer_tokens"]) for name, counts in result.items()}
    return "\n".join(f"{name}: {answers} answers, {tokens} tokens" for name, (answers, tokens) in done.items())
