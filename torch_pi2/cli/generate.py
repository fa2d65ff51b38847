"""Continue a prompt with a model: a GGUF file, or a checkpoint, optimised or packed. `torch-pi2 run` is for bundles."""

import argparse
import re
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common, models
from torch_pi2.cli.processes import process_group
from torch_pi2.cli.terminal import emit, muted
from torch_pi2.errors import ConfigError, Pi2Error, UnsupportedModelError

if TYPE_CHECKING:
    from torch_pi2.decode.generate import Generated

EXAMPLE = "torch-pi2 generate my-sparse-model --prompt 'def main(' --max-new-tokens 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help=common.RUNNABLE)
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("prompt", nargs="?", metavar="PROMPT", default=argparse.SUPPRESS, help="text to continue")
    prompt.add_argument("-p", "--prompt", help="the same, as an option")
    parser.set_defaults(late=True)
    common.add_sampling(parser, 64)
    several = "continue the prompt N times in one batch, each with its own seed"
    add("--num-return-sequences", type=common.positive, default=1, help=several)
    add("--dense", action="store_true", help="run the dense model of the folder")
    add("--trace", type=Path, metavar="FILE", help="trace of all threads, for Perfetto (docs/TRACES.md)")
    common.add_decoding(parser)
    common.add_drafting(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with process_group(args, args.model) as (args.model,):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.base.files import is_standard_output
    from torch_pi2.decode.decoder import check_vocabulary
    from torch_pi2.decode.generate import generate
    from torch_pi2.decode.sequence import TextStream, end_tokens, hidden_tokens
    from torch_pi2.observe.trace import trace
    from torch_pi2.rewrite.state import ModelState

    sampling = common.sampling_of(args)
    if args.num_return_sequences > 1 and (args.prompt_lookup or args.draft_model):
        option = "--draft-model" if args.draft_model else "--prompt-lookup"
        raise common.excludes(option, "--num-return-sequences", "several sequences are decoded step by step")
    if args.num_return_sequences > 1 and sampling is None:
        alike = "sequences that would all be the most likely one"
        raise common.needs("--num-return-sequences", "a --temperature above 0", alike)
    recorded = trace(args.trace) if args.trace else None  # fails before loading if the path cannot be written
    if args.trace and is_standard_output(args.trace):
        args.stdout = sys.stderr
    tokenizer = models.load_tokenizer(args)
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise ConfigError("--prompt", expected="at least one token", found=repr(args.prompt), fix="Pass some text.")
    args.context = args.num_return_sequences * (inputs["input_ids"].numel() + args.max_new_tokens)
    model: Any = models.load_any(args, args.dense)
    check_vocabulary(model, inputs["input_ids"])
    prompt, shown = inputs["input_ids"][0].tolist(), not args.json and args.num_return_sequences == 1
    ends = end_tokens(model, None, tokenizer)
    text = TextStream(tokenizer, hidden=hidden_tokens(tokenizer, ends), before=prompt)
    how = common.given(args, "num_return_sequences", "max_new_tokens", "seed") | models.drafting(args)
    if sampling is not None:
        how |= {"do_sample": True, "temperature": args.temperature, "top_p": sampling.top_p}
    if shown:
        before = [args.prompt]  # written with the first text, after warnings
        how["streamer"] = lambda _, token: emit(args.stdout, (before.pop() if before else "") + text.add(token))
    started = time.perf_counter()
    with recorded or nullcontext():
        try:
            output = generate(model, inputs["input_ids"], tokenizer=tokenizer, compiled=args.compile, kv=args.kv, **how)
        except UnsupportedModelError:  # its cache is not supported
            if args.num_return_sequences > 1 or args.prompt_lookup or args.draft_model or args.kv:
                raise
            output = _by_transformers(model, inputs, tokenizer, args, sorted(ends))
            if shown:
                emit(args.stdout, args.prompt + output.text)
        except Pi2Error:
            if shown and not before:
                emit(args.stdout, "\n")  # so that the error has its own line
            raise
    elapsed = time.perf_counter() - started
    if shown:
        emit(args.stdout, text.end())
    texts, count = output.texts, sum(map(len, output.sequences))
    plan = getattr(ModelState.of(model), "plan", None)
    more: dict[str, Any] = {"shown": True} if shown else {}
    if len(texts) > 1 or output.drafts is not None:
        more |= {"texts": texts, "sequences_by_step": output.batches, "drafts": output.drafts and asdict(output.drafts)}
    sparse = plan is not None and any(layer.method != "dense" for layer in plan.layers)
    result = {"prompt": args.prompt, "text": texts[0], "prompt_tokens": len(prompt), "new_tokens": count}
    result |= {"ms_per_token": elapsed * 1e3 / max(1, count), "sparse": sparse, "store": models.of_store(model)}
    return result | {"trace": recorded and recorded.summary(), **more}


def _by_transformers(model: Any, inputs: Any, tokenizer: Any, args: argparse.Namespace, ends: list[int]) -> "Generated":
    import torch

    from torch_pi2.decode.generate import Generated

    torch.manual_seed(args.seed)
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p or 1.0, "top_k": 0}
    with torch.no_grad():
        inputs, how["eos_token_id"] = inputs.to(model.device), ends or None
        ids = model.generate(**inputs, max_new_tokens=args.max_new_tokens, **how)[0].tolist()
    prompt = inputs["input_ids"][0].tolist()
    return Generated([ids[len(prompt) :]], [], [], 0.0, prompt=prompt, tokenizer=tokenizer, ends=ends)


def render(result: dict[str, Any]) -> str:
    kind = "sparse" if result["sparse"] else "dense"
    speed = f"{result['new_tokens']} tokens, {result['ms_per_token']:.1f} ms each with the prompt, {kind}"
    if result["store"]:
        speed += f"; {result['store']['text']}"
    if result["trace"]:
        speed += f", while recording {result['trace']['events']} events into {result['trace']['path']}"
    if (result.get("drafts") or {}).get("drafted"):
        speed += f", {common.drafts_of(result['drafts'])}"
    if result.get("shown"):
        return f"\n[{speed}]"
    texts = result.get("texts", [result["text"]])
    heads = [f"--- {i + 1} of {len(texts)}\n" if len(texts) > 1 else "" for i in range(len(texts))]
    body = "\n".join(f"{head}{result['prompt']}{text}" for head, text in zip(heads, texts, strict=True))
    return f"{body}\n[{speed}]"


class Run:
    """Run a bundle with ExecuTorch on this machine: streams the text, then shows speed and reads."""

    EXAMPLE = "torch-pi2 run bundle --prompt 'def main(' --max-new-tokens 64 --budget 2GiB"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("bundle", type=Path, metavar="BUNDLE", help="folder written by `torch-pi2 export`")
        prompt = parser.add_mutually_exclusive_group(required=True)
        prompt.add_argument("-p", "--prompt", help="text to continue")
        prompt.add_argument("--ids", type=_IDS, help="token ids to continue; needs no tokenizer")
        add("--chat", action="store_true", help="--prompt is a user's message; apply the tokenizer's chat template")
        add("--system", metavar="TEXT", help="with --chat: the system message")
        common.add_sampling(parser, 64)
        add("--top-k", type=int, help="sample among the N likeliest tokens (0: all)")
        add("--min-p", type=float, metavar="P", help="sample among tokens at least P times as likely as the likeliest")
        add("--repetition-penalty", type=float, help="penalty for tokens that have occurred; 1: none")
        defaults = "may be repeated. Defaults of these and --top-p are in the model's generation_config.json"
        add("--stop", action="append", metavar="TEXT", help=f"end answers before it; {defaults}")
        add("--num-return-sequences", type=common.positive, default=1, help="answers to one prompt")
        add("--budget", metavar="BYTES", help="memory of the process without Python, such as 2GiB (default: no limit)")
        add("--store", type=Path, metavar="PATH", help="the neuron store, or its folder (default: BUNDLE)")
        add("--io-threads", type=common.positive, help="threads that read the store (default: 64)")
        add("--engine", metavar="NAME", help="read engine of the store; a wrong name lists all (default: auto)")
        add("--policy", metavar="NAME", help="policy of the neuron cache; a wrong name lists all (default: lfu)")
        add("--trace", type=Path, metavar="FILE", help="trace of all threads, for Perfetto (docs/TRACES.md)")
        verify = "first compare the hash of every file; --no-verify: sizes only (default: checksums of what is loaded)"
        add("--verify", action=argparse.BooleanOptionalAction, help=verify)

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        from torch_pi2.cli.folders import kind_of
        from torch_pi2.export.run import Bundle

        if args.system is not None and not args.chat:
            raise common.needs("--system", "--chat")
        if args.chat and args.prompt is None:
            raise common.needs("--chat", "--prompt", "--ids")
        prompt: Any = list(args.ids) if args.prompt is None else args.prompt
        if args.chat:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            prompt = [*system, {"role": "user", "content": args.prompt}]
        if kind_of(args.bundle) == "bundle":
            # ExecuTorch's pool, which XNNPACK and our delegate share; its messages about CPU information are discarded
            from torch_pi2.export.executorch import load_library

            load_library()
            from executorch.extension.pybindings import portable_lib

            with muted(args.verbose):
                portable_lib._threadpool_get_thread_count()
                if args.threads is not None:
                    portable_lib._unsafe_reset_threadpool(args.threads)
        streamed = not args.json and args.num_return_sequences == 1
        before = ["" if args.chat or args.prompt is None else args.prompt]  # written with the first text

        def stream(_sequence: int, _token: int, text: str) -> None:
            emit(args.stdout, (before.pop() if before else "") + text)

        settings = common.given(args, "budget", "store", "threads", "io_threads", "trace", "engine", "policy", "verify")
        sampling = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed")
        with Bundle(args.bundle, **settings) as bundle:
            how = {**common.given(args, *sampling, "num_return_sequences"), "stream": stream if streamed else None}
            output = bundle.generate(prompt, args.max_new_tokens, **how)
            read = bundle.stats()
            target, loading = bundle.manifest.target, bundle.load_seconds
        count = len(output.prompt_ids)
        result = {"bundle": str(args.bundle), "target": target, "prompt": args.prompt, "prompt_tokens": count}
        result["new_tokens"] = sum(len(s.ids) for s in output.sequences)
        result["sequences"] = [{"text": s.text, "ids": s.ids, "ended": s.ended} for s in output.sequences]
        result["tokens_per_second"] = output.tokens_per_second
        result |= {"prompt_tokens_per_second": count / output.prompt_seconds, "load_seconds": loading}
        result |= {name: getattr(output, name) for name in ("prompt_seconds", "decode_seconds", "decode_steps")}
        result |= {name: read.pop(name) for name in ("hit_rate", "wait_share")}
        trace = None if args.trace is None else str(args.trace)
        return result | {"store": read, "trace": trace, "streamed": streamed}

    @staticmethod
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


def _id(text: str) -> int:
    if not re.fullmatch(r"[0-9]+", text):  # int() takes more; the C++ runner does not
        raise ValueError(text)
    return int(text)


_IDS = common.list_of(_id, "token ids")
