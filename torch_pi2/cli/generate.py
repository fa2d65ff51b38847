"""Continue a prompt with an optimised model, or with its dense form."""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch_pi2.cli import common

EXAMPLE = "torch-pi2 generate my-sparse-model --prompt 'def main(' --max-new-tokens 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder written by optimize")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-new-tokens", type=common.positive, default=64, metavar="N", help="at most so many")
    parser.add_argument(
        "--temperature", type=common.temperature, default=0.0, metavar="T", help="0 (default) is greedy"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the likeliest tokens that together have this probability",
    )
    parser.add_argument(
        "--num-return-sequences",
        type=common.positive,
        default=1,
        metavar="N",
        help="continue the prompt so many times in one batch, each with a seed of its own",
    )
    parser.add_argument("--seed", type=common.seed, default=0, help="of sampling")
    parser.add_argument(
        "--prompt-lookup",
        type=common.positive,
        default=0,
        metavar="K",
        help="greedy: guess up to K tokens (1 to 7) from what followed the last ones before, and verify them together",
    )
    parser.add_argument("--dense", action="store_true", help="run the dense model instead (DIR may be any checkpoint)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="what threads did, for Perfetto (docs/TRACES.md)")
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.base.files import is_standard_output
    from torch_pi2.decode.decode import check_vocabulary
    from torch_pi2.decode.generate import generate
    from torch_pi2.errors import ConfigError
    from torch_pi2.observe.trace import trace

    if not 0 < args.top_p <= 1:
        raise ConfigError(
            "--top-p",
            expected="more than 0, at most 1",
            found=str(args.top_p),
            fix="Leave it out for all tokens.",
        )
    if args.num_return_sequences > 1 and args.temperature == 0:
        raise ConfigError(
            "--num-return-sequences",
            expected="a --temperature above 0",
            found=f"{args.num_return_sequences} sequences that would all be the most likely one",
            fix="Pass --temperature 0.8, for instance, or leave it out.",
        )
    recorded = trace(args.trace) if args.trace else None  # a path that cannot be written is found before loading
    if args.trace and is_standard_output(args.trace):
        args.stdout = sys.stderr
    model: Any = common.load_dense(args) if args.dense else common.load_sparse(args)
    tokenizer = common.load_tokenizer(args)
    inputs = tokenizer(args.prompt, return_tensors="pt", return_token_type_ids=False)
    if inputs["input_ids"].numel() == 0:
        raise ConfigError("--prompt", expected="at least one token", found=repr(args.prompt), fix="Pass some text.")
    check_vocabulary(model, inputs["input_ids"])
    ours, prompt = args.num_return_sequences > 1 or args.prompt_lookup > 0, inputs["input_ids"].shape[1]
    sampling = {"do_sample": args.temperature > 0, "max_new_tokens": args.max_new_tokens}
    if args.temperature > 0:
        sampling |= {"temperature": args.temperature, "top_p": args.top_p}
    torch.manual_seed(args.seed)
    started, more = time.perf_counter(), {}
    with recorded or nullcontext(), torch.no_grad():
        if ours:
            how = common.given(args, "num_return_sequences", "seed", "prompt_lookup")
            made = generate(model, inputs["input_ids"], **how, **sampling)
            found = made.sequences
        else:
            sampling |= {"top_k": 0} if args.temperature > 0 else {}
            found = [model.generate(**inputs, pad_token_id=_pad_token(tokenizer), **sampling)[0, prompt:]]
        elapsed = time.perf_counter() - started
    texts, count = [tokenizer.decode(ids, skip_special_tokens=True) for ids in found], sum(map(len, found))
    if ours:
        more = {"texts": texts, "sequences_by_step": made.batches, "drafts": made.drafts and asdict(made.drafts)}
    return {
        "prompt": args.prompt,
        "text": texts[0],
        "prompt_tokens": int(prompt),
        "new_tokens": count,
        "ms_per_token": elapsed * 1e3 / max(1, count),
        "sparse": not args.dense,
        "trace": recorded and recorded.summary(),
        **more,
    }


def _pad_token(tokenizer: Any) -> int | None:
    pad: int | None = tokenizer.pad_token_id
    return tokenizer.eos_token_id if pad is None else pad


def render(result: dict[str, Any]) -> str:
    kind = "sparse" if result["sparse"] else "dense"
    speed = f"{result['new_tokens']} tokens, {result['ms_per_token']:.1f} ms each with the prompt, {kind}"
    if result["trace"]:
        speed += f", while recording {result['trace']['events']} events into {result['trace']['path']}"
    if result.get("drafts"):
        speed += ", {accepted} of {drafted} guessed tokens right".format_map(result["drafts"])
    texts = result.get("texts", [result["text"]])
    heads = [f"--- {i + 1} of {len(texts)}\n" if len(texts) > 1 else "" for i in range(len(texts))]
    said = "\n".join(f"{head}{result['prompt']}{text}" for head, text in zip(heads, texts, strict=True))
    return f"{said}\n[{speed}]"
