"""Continue a prompt with a model from any folder: a checkpoint, optimised, packed, or a bundle for ExecuTorch."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.cli import common
from torch_pi2.cli.output import emit
from torch_pi2.cli.processes import process_group

if TYPE_CHECKING:
    from torch_pi2.decode.generate import Generated

EXAMPLE = "torch-pi2 generate my-sparse-model --prompt 'def main(' --max-new-tokens 64"

#: Options that bundles do not support, with their defaults; and options of ``run`` that this verb lacks.
_OF_MODELS = {"dense": False, "compile": False, "activations": "float", "prompt_lookup": 0, "gpu_memory": None}
_OF_MODELS |= {"reduction": None, "attention": None, "timeout": None}
_OF_MODELS |= dict.fromkeys(common.LEAVE_OUT, 0.0) | {
    "dtype": "auto",
    "trust_remote_code": False,
    "allow_download": False,
}
_OF_RUN = dict.fromkeys(("ids", "system", "store", "io_threads", "engine", "policy", "verify")) | {"chat": False}
_OF_RUN |= dict.fromkeys(("top_k", "min_p", "repetition_penalty", "stop"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="DIR", help="folder written by optimize, quantize, pack or export, or a plain checkpoint"
    )
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=common.positive, default=64, metavar="N", help="at most N")
    parser.add_argument(
        "--temperature", type=common.temperature, default=0.0, metavar="T", help="0 (default) is greedy"
    )
    parser.add_argument(
        "--top-p",
        type=common.probability,
        metavar="P",
        help="sample among the likeliest tokens that together have this probability (default: 1; for bundles, the "
        "model's)",
    )
    parser.add_argument(
        "--num-return-sequences",
        type=common.positive,
        default=1,
        metavar="N",
        help="continue the prompt N times in one batch, each with its own seed",
    )
    parser.add_argument("--seed", type=common.seed, default=0, help="of sampling")
    parser.add_argument(
        "--prompt-lookup",
        type=common.drafted,
        default=0,
        metavar="K",
        help="greedy: draft up to K tokens (1 to 7) from what followed the last ones earlier, and verify them together",
    )
    parser.add_argument("--dense", action="store_true", help="run the dense model of the folder")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="what threads did, for Perfetto (docs/TRACES.md)")
    common.add_decoding(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    with process_group(args, args.model) as (args.model,):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    from torch_pi2.base.files import is_standard_output
    from torch_pi2.cli.folders import kind_of
    from torch_pi2.decode.decoder import check_vocabulary
    from torch_pi2.decode.generate import generate
    from torch_pi2.errors import ConfigError, Pi2Error, UnsupportedModelError
    from torch_pi2.observe.trace import trace
    from torch_pi2.rewrite.state import ModelState
    from torch_pi2.serve.chat import TextStream

    sampling = common.sampling_of(args)
    if sampling is not None and args.prompt_lookup:
        raise ConfigError(
            "--prompt-lookup",
            expected="the most likely token each time",
            found=f"--temperature {args.temperature:g}",
            fix="Leave one of them out.",
        )
    if args.num_return_sequences > 1 and args.temperature == 0:
        raise ConfigError(
            "--num-return-sequences",
            expected="a --temperature above 0",
            found=f"{args.num_return_sequences} sequences that would all be the most likely one",
            fix="Pass --temperature 0.8, for instance, or leave it out.",
        )
    if kind_of(Path(args.model)) == "bundle":
        return _of_bundle(args)
    args.top_p = 1.0 if args.top_p is None else args.top_p
    recorded = trace(args.trace) if args.trace else None  # fails before loading if the path cannot be written
    if args.trace and is_standard_output(args.trace):
        args.stdout = sys.stderr
    tokenizer = common.load_tokenizer(args)
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise ConfigError("--prompt", expected="at least one token", found=repr(args.prompt), fix="Pass some text.")
    args.context = args.num_return_sequences * (inputs["input_ids"].numel() + args.max_new_tokens)
    model: Any = common.load_any(args, args.dense)
    check_vocabulary(model, inputs["input_ids"])
    prompt, shown = inputs["input_ids"][0].tolist(), not args.json and args.num_return_sequences == 1
    text = TextStream(tokenizer, before=prompt)
    how = common.given(args, "num_return_sequences", "max_new_tokens", "seed", "prompt_lookup")
    if sampling is not None:
        how |= {"do_sample": True, "temperature": args.temperature, "top_p": sampling.top_p}
    if shown:
        emit(args.stdout, args.prompt)
        how["streamer"] = lambda _, token: emit(args.stdout, text.add(token))
    started = time.perf_counter()
    with recorded or nullcontext():
        try:
            output = generate(model, inputs["input_ids"], tokenizer=tokenizer, compiled=args.compile, **how)
        except UnsupportedModelError:  # its cache is not supported
            if args.num_return_sequences > 1 or args.prompt_lookup:
                raise
            output = _by_transformers(model, inputs, tokenizer, args)
            if shown:
                emit(args.stdout, output.text)
        except Pi2Error:
            if shown:
                emit(args.stdout, "\n")  # so that the error has its own line
            raise
    elapsed = time.perf_counter() - started
    if shown:
        emit(args.stdout, text.end())
    texts, count = output.texts, sum(map(len, output.sequences))
    more: dict[str, Any] = {"shown": True} if shown else {}
    if len(texts) > 1 or output.drafts is not None:
        more |= {"texts": texts, "sequences_by_step": output.batches, "drafts": output.drafts and asdict(output.drafts)}
    return {
        "prompt": args.prompt,
        "text": texts[0],
        "prompt_tokens": len(prompt),
        "new_tokens": count,
        "ms_per_token": elapsed * 1e3 / max(1, count),
        "sparse": ModelState.of(model) is not None,
        "store": common.of_store(model),
        "trace": recorded and recorded.summary(),
        **more,
    }


def _of_bundle(args: argparse.Namespace) -> dict[str, Any]:
    """With ExecuTorch: the result of ``run``, and the fields that this verb has for every folder."""
    from torch_pi2.cli import run
    from torch_pi2.errors import ConfigError

    for name, default in _OF_MODELS.items():
        if getattr(args, name) != default:
            raise ConfigError(
                f"{common.option_of(name)} with {args.model}",
                expected="an option that bundles support",
                found="one for models that PyTorch runs",
                fix="Leave it out; torch-pi2 run --help lists the options of bundles.",
            )
    result = run.run(argparse.Namespace(**vars(args) | _OF_RUN | {"bundle": Path(args.model)}))
    count, seconds = result["new_tokens"], result["prompt_seconds"] + result["decode_seconds"]
    texts = [sequence["text"] for sequence in result["sequences"]]
    both = {"text": texts[0], "texts": texts, "ms_per_token": seconds * 1e3 / max(1, count)}
    return result | both


def _by_transformers(model: Any, inputs: Any, tokenizer: Any, args: argparse.Namespace) -> Generated:
    import torch

    from torch_pi2.decode.generate import Generated

    torch.manual_seed(args.seed)
    how: dict[str, Any] = {"do_sample": False}
    if args.temperature > 0:
        how = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "top_k": 0}
    with torch.no_grad():
        ids = model.generate(**inputs.to(model.device), max_new_tokens=args.max_new_tokens, **how)[0].tolist()
    prompt = inputs["input_ids"][0].tolist()
    return Generated([ids[len(prompt) :]], [], [], 0.0, prompt=prompt, tokenizer=tokenizer)


def render(result: dict[str, Any]) -> str:
    if "bundle" in result:
        from torch_pi2.cli import run

        return run.render(result)
    kind = "sparse" if result["sparse"] else "dense"
    speed = f"{result['new_tokens']} tokens, {result['ms_per_token']:.1f} ms each with the prompt, {kind}"
    if result["store"]:
        speed += f"; {result['store']['text']}"
    if result["trace"]:
        speed += f", while recording {result['trace']['events']} events into {result['trace']['path']}"
    if result.get("drafts"):
        speed += ", {accepted} of {drafted} drafted tokens accepted".format_map(result["drafts"])
    if result.get("shown"):
        return f"\n[{speed}]"
    texts = result.get("texts", [result["text"]])
    heads = [f"--- {i + 1} of {len(texts)}\n" if len(texts) > 1 else "" for i in range(len(texts))]
    body = "\n".join(f"{head}{result['prompt']}{text}" for head, text in zip(heads, texts, strict=True))
    return f"{body}\n[{speed}]"
