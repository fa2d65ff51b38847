"""Run a bundle with ExecuTorch on this machine: streams the text, then shows speed and reads."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.cli.logs import muted
from torch_pi2.cli.output import emit

EXAMPLE = "torch-pi2 run bundle --prompt 'def main(' --max-new-tokens 64 --budget 2GiB"


def _ids(text: str) -> list[int]:
    if not re.fullmatch(r"[0-9]+(,[0-9]+)*", text):  # int() takes more; the C++ runner does not
        raise ValueError(text)
    return [int(part) for part in text.split(",")]


_ids.__name__ = "comma-separated list of token ids"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("bundle", type=Path, metavar="BUNDLE", help="folder written by `torch-pi2 export`")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text to continue")
    prompt.add_argument("--ids", type=_ids, metavar="N,...", help="token ids to continue; needs no tokenizer")
    add("--chat", action="store_true", help="--prompt is a user's message; apply the tokenizer's chat template")
    add("--system", metavar="TEXT", help="with --chat: the system message")
    add("--max-new-tokens", type=common.positive, default=64, metavar="N", help="at most N")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy")
    add("--top-k", type=int, metavar="K", help="sample among the K likeliest tokens (0: all)")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample among the likeliest tokens that together have this probability",
    )
    add("--min-p", type=float, metavar="P", help="sample among tokens at least P times as likely as the likeliest")
    add("--repetition-penalty", type=float, metavar="R", help="for tokens that have occurred; 1: none")
    add(
        "--stop",
        action="append",
        metavar="TEXT",
        help="end answers before it; may be repeated. Defaults of these five are in the model's generation_config.json",
    )
    add("--seed", type=common.seed, default=0, help="of the first sequence; the next has this plus 1")
    add("--num-return-sequences", type=common.positive, default=1, metavar="N", help="answers to one prompt")
    add("--budget", metavar="BYTES", help="memory for all but Python, such as 2GiB (default: no limit)")
    add("--store", type=Path, metavar="PATH", help="the neuron store, or its folder (default: BUNDLE)")
    add("--io-threads", type=common.positive, metavar="N", help="threads that read the store (default: 64)")
    add("--engine", metavar="NAME", help="that reads the store; a wrong name lists them (default: auto)")
    add("--policy", metavar="NAME", help="of the neuron cache; a wrong name lists them (default: lfu)")
    add("--trace", type=Path, metavar="FILE", help="what threads did, for Perfetto (docs/TRACES.md)")
    add(
        "--verify",
        action=argparse.BooleanOptionalAction,
        help="first compare the hash of every file, the whole store included; --no-verify: compare sizes only "
        "(default: checksums of what is loaded)",
    )


def run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.cli.folders import kind_of
    from torch_pi2.errors import ConfigError
    from torch_pi2.export.run import Bundle

    if args.system is not None and not args.chat:
        raise ConfigError("--system", expected="--chat beside it", found="none", fix="Pass --chat, or leave it out.")
    if args.chat and args.prompt is None:
        raise ConfigError("--chat", expected="--prompt beside it", found="--ids", fix="Pass --prompt, or leave it out.")
    if kind_of(args.bundle) == "bundle":
        _start_threads(args.threads, args.verbose)
    streamed = not args.json and args.num_return_sequences == 1
    with Bundle(
        args.bundle,
        args.budget,
        args.store,
        args.threads,
        args.io_threads,
        args.trace,
        **common.given(args, "engine", "policy", "verify"),
    ) as bundle:
        output = bundle.generate(
            _prompt(args),
            args.max_new_tokens,
            **common.given(args, "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed"),
            **common.given(args, "num_return_sequences"),
            stream=_Stream(args.stdout, "" if args.chat else args.prompt or "") if streamed else None,
        )
        read = bundle.stats()
        target, loading = bundle.manifest.target, bundle.load_seconds
    return {
        "bundle": str(args.bundle),
        "target": target,
        "prompt": args.prompt,
        "prompt_tokens": len(output.prompt_ids),
        "new_tokens": sum(len(s.ids) for s in output.sequences),
        "sequences": [{"text": s.text, "ids": s.ids, "ended": s.ended} for s in output.sequences],
        "tokens_per_second": output.tokens_per_second,
        "prompt_tokens_per_second": len(output.prompt_ids) / output.prompt_seconds,
        "load_seconds": loading,
        "prompt_seconds": output.prompt_seconds,
        "decode_seconds": output.decode_seconds,
        "decode_steps": output.decode_steps,
        "hit_rate": read["hit_rate"],
        "wait_share": read["wait_share"],
        "store": {name: value for name, value in read.items() if name not in ("hit_rate", "wait_share")},
        "trace": None if args.trace is None else str(args.trace),
        "streamed": streamed,
    }


def _prompt(args: argparse.Namespace) -> Any:
    if not args.chat:
        return args.ids if args.prompt is None else args.prompt
    system = [] if args.system is None else [{"role": "system", "content": args.system}]
    return [*system, {"role": "user", "content": args.prompt}]


def _start_threads(count: int | None, verbose: bool) -> None:
    """Start ExecuTorch's thread pool, which XNNPACK and our delegate share, with ``count`` threads or its default.

    Its messages about missing files of CPU information are discarded; nothing else is.
    """
    from torch_pi2.decode.executorch import load_library

    load_library()
    from executorch.extension.pybindings import portable_lib

    with muted(verbose):
        portable_lib._threadpool_get_thread_count()
        if count is not None:
            portable_lib._unsafe_reset_threadpool(count)


class _Stream:
    """Writes the prompt and then the streamed text to ``file``."""

    def __init__(self, file: Any, prompt: str) -> None:
        self._file, self._before = file, prompt

    def __call__(self, _sequence: int, _token: int, text: str) -> None:
        emit(self._file, self._before + text)
        self._before = ""


def render(result: dict[str, Any]) -> str:
    facts = [
        f"{result['new_tokens']} tokens",
        f"{result['tokens_per_second']:.1f} tokens/s",
        f"prompt of {result['prompt_tokens']} at {result['prompt_tokens_per_second']:.1f} tokens/s",
    ]
    if result["hit_rate"] is not None:
        facts.append(f"{common.percent(result['hit_rate'])} of neurons in the cache")
        facts.append(f"{common.percent(result['wait_share'])} of the time waiting for reads")
    if result["trace"]:
        facts.append(f"threads in {result['trace']}")
    several = len(result["sequences"]) > 1
    answers = [f"[{i}] {s['text']}" if several else s["text"] for i, s in enumerate(result["sequences"])]
    if not any(s["text"] for s in result["sequences"]):
        answers = [f"ids: {', '.join(map(str, s['ids']))}" for s in result["sequences"]]
    elif result["streamed"]:
        answers = [""]  # already written
    elif result["prompt"]:
        answers = [result["prompt"], *answers]
    return "\n".join([*answers, f"[{', '.join(facts)}]"])
