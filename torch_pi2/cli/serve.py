"""Serve models over HTTP as OpenAI's API does: chats, completions, streams; many requests decoded together."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 serve my-sparse-model --port 8000"

#: Where the API key may be instead of on the command line, which others on the machine can read.
KEY = "TORCH_PI2_API_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="DIR", help="folders written by optimize, quantize or pack, or plain checkpoints")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen on (default: 127.0.0.1, this machine alone)")
    add("--port", type=int, default=8000, metavar="N", help="0: any that is free (default: 8000)")
    add("--lanes", type=common.positive, default=8, metavar="N", help="sequences decoded together (default: 8)")
    add("--waiting", type=int, default=64, metavar="N", help="sequences that may wait for a lane (default: 64)")
    add(
        "--max-tokens",
        type=common.positive,
        metavar="N",
        help="of each, with its prompt (default: 4096 or the model's)",
    )
    add("--activations", choices=("float", "int8"), default="float", help="int8: faster, lossy (default: float)")
    add("--budget", metavar="BYTES", help="memory of a packed store, such as 2GiB, of each model (default: all)")
    add(
        "--prefix-cache",
        default="256MiB",
        metavar="BYTES",
        help="keys and values of prompts, of each model, for others that begin alike (default: 256MiB; 0: none)",
    )
    add("--compile", action="store_true", help="compile steps: faster, after a pause of seconds for each batch size")
    common.add_loading(parser)
    parser.epilog = f"{parser.epilog}\n\nThe API key that clients have to send, if any, is the environment's {KEY}."


def run(args: argparse.Namespace) -> dict[str, Any]:
    try:
        import uvicorn

        from torch_pi2.serve.app import application
    except ImportError as error:
        from torch_pi2.base.extras import missing_package

        raise missing_package("fastapi, uvicorn and prometheus-client", "serve", error) from error
    from torch_pi2.errors import ConfigError

    names = [Path(folder).resolve().name for folder in args.models]
    if len(set(names)) < len(names):
        raise ConfigError(
            "folders", expected="a name for each model", found=", ".join(names), fix="Rename one of the folders."
        )
    models = {name: _served(args, name, folder) for name, folder in zip(names, args.models, strict=True)}
    app = application(models, api_key=os.environ.get(KEY) or None)
    config = uvicorn.Config(
        app, host=args.host, port=args.port, log_level="warning", timeout_graceful_shutdown=30, server_header=False
    )
    server = _server(config)
    for served in models.values():
        served.batch.start()
    try:
        listening = config.bind_socket()
        host, port = listening.getsockname()[:2]
        print(f"torch-pi2: {', '.join(names)} at http://{host}:{port}/v1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
        server.run(sockets=[listening])
    finally:
        for served in models.values():
            served.batch.close(0)
    return {name: vars(served.batch.counts) for name, served in models.items()}


def _server(config: Any) -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            """As uvicorn has it, but that signals which ended the server do not end the process, too."""
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
    from torch_pi2.serve.served import Served
    from torch_pi2.serve.talk import context_of

    most = args.max_tokens or common.MOST_TOKENS
    of_this = argparse.Namespace(**vars(args) | {"model": folder, "context": args.lanes * most})
    model = common.load_any(of_this)
    batch = Batch(
        model,
        max_tokens=args.max_tokens or context_of(model, most),
        lanes=args.lanes,
        waiting=args.waiting,
        compiled=args.compile,
        prefix_bytes=parse_bytes(args.prefix_cache),
    )
    return Served(name, model, common.load_tokenizer(of_this), batch)


def render(result: dict[str, Any]) -> str:
    return "\n".join(
        f"{name}: {sum(counts['ended'].values())} answers, {counts['answer_tokens']} tokens"
        for name, counts in result.items()
    )
