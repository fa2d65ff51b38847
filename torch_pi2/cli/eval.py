"""Compare an optimised model with its dense form: held-out loss, work done, and time per token."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common

EXAMPLE = "torch-pi2 eval my-sparse-model --max-tokens 20000 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder written by optimize")
    common.add_text(parser, "stdlib-heldout")
    parser.add_argument("--max-tokens", type=common.positive, default=20_000, metavar="N", help="scored tokens")
    parser.add_argument("--window", type=common.positive, default=256, metavar="N", help="tokens per window")
    parser.add_argument("--batch-size", type=common.positive, default=8, metavar="N", help="windows at once")
    parser.add_argument("--decode-tokens", type=common.positive, default=32, metavar="N", help="timed tokens per round")
    parser.add_argument("--rounds", type=common.positive, default=5, metavar="N", help="timed rounds")
    parser.add_argument(
        "--lm-eval",
        nargs="+",
        default=[],
        metavar="TASK",
        help="also tasks of lm-eval (extra eval): names, YAML files or folders of them; nothing is downloaded for them",
    )
    parser.add_argument("--limit", type=common.positive, metavar="N", help="examples of each task (default: all)")
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import weights_path

    pi2 = Path(args.model) / "pi2"
    sparse = common.load_sparse(args)
    # rows of neurons have no dense form to compare with, which is said, unless something else was asked for
    dense = None if args.lm_eval and weights_path(pi2) is not None else common.load_dense(args)
    tokenizer = common.load_tokenizer(args)
    with Parts(pi2) as parts:
        plan = parts.plan()
    result: dict[str, Any] = {
        "model": args.model,
        "methods": sorted({layer.method for layer in plan.layers}),
        "threads": torch.get_num_threads(),
    }
    if args.lm_eval:
        result["lm_eval"] = _tasks(args, {"dense": dense, "sparse": sparse}, tokenizer)
    return result if dense is None else result | _compared(args, dense, sparse, tokenizer, plan)


def _tasks(args: argparse.Namespace, models: dict[str, Any], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Task -> ``dense`` and ``sparse`` -> figures of lm-eval."""
    from torch_pi2.eval.harness import harness

    found: dict[str, dict[str, Any]] = {}
    for of, model in models.items():
        if model is not None:
            phase(f"lm-eval: {of}")
            figures = harness(model, tokenizer, args.lm_eval, limit=args.limit, batch_size=args.batch_size)
            for task, of_task in figures.items():
                found.setdefault(task, {})[of] = of_task
    return found


def _compared(args: argparse.Namespace, dense: Any, sparse: Any, tokenizer: Any, plan: Any) -> dict[str, Any]:
    from torch_pi2.eval import bits_per_byte, compare_decode, ffn_modules, work

    text = common.text_of(args, tokenizer, args.max_tokens)
    settings = {
        "window": args.window,
        "batch_size": args.batch_size,
        "max_tokens": args.max_tokens,
        "progress": not args.quiet,
    }
    loss_dense = bits_per_byte(dense, tokenizer, text, **settings)
    with work() as done:
        loss_sparse = bits_per_byte(sparse, tokenizer, text, **settings)
    prompt = tokenizer(text[:2000], return_tensors="pt", add_special_tokens=False)["input_ids"][:, :64]
    time = compare_decode(
        dense,
        sparse,
        prompt,
        new_tokens=args.decode_tokens,
        rounds=args.rounds,
        ffn_modules=ffn_modules(dense, [layer.site for layer in plan.layers]),
    )
    return {
        "dense": {**loss_dense.to_json(), **time.dense.to_json()},
        "sparse": {**loss_sparse.to_json(), **time.sparse.to_json(), **done.to_json()},
        "loss_change": loss_sparse.nats_per_token / loss_dense.nats_per_token - 1,
        "ffn_speedup": time.ffn_speedup,
        "total_speedup": time.total_speedup,
    }


def render(result: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    told = f"methods: {', '.join(result['methods'])}"
    if "dense" in result:
        dense, sparse = result["dense"], result["sparse"]
        rows = [
            ("held-out bits per byte", f"{dense['bits_per_byte']:.4f}", f"{sparse['bits_per_byte']:.4f}"),
            ("perplexity per token", f"{dense['perplexity']:.3f}", f"{sparse['perplexity']:.3f}"),
            ("neurons computed", common.percent(1.0), common.percent(sparse["neurons_computed"])),
            ("FFN matrix rows used", common.percent(1.0), common.percent(sparse["rows_used"])),
            ("ms per token in FFNs", f"{dense['ffn_ms']:.3f}", f"{sparse['ffn_ms']:.3f}"),
            ("ms per token in all", f"{dense['total_ms']:.3f}", f"{sparse['total_ms']:.3f}"),
        ]
        scored = f"{dense['tokens']} tokens ({common.size(dense['bytes'])}) scored"
        told += f"; loss {result['loss_change']:+.3%}; {scored}"
    for task, found in result.get("lm_eval", {}).items():
        names = [name for name in found["sparse"] if not name.partition(" ")[0].endswith("_stderr")]
        for name in names:
            figures = (_with_error(found.get(of), name) for of in ("dense", "sparse"))
            rows.append((f"{task}: {name}", *figures))
    return f"{common.table(('', 'dense', 'sparse'), rows)}\n{told}; {result['threads']} threads"


def _with_error(figures: dict[str, float] | None, name: str) -> str:
    """A figure, and its standard error where there is one; ``-``: of a folder without dense weights."""
    if figures is None:
        return "-"
    metric, space, rest = name.partition(" ")
    error = figures.get(f"{metric}_stderr{space}{rest}")
    return f"{figures[name]:.4f}" + ("" if error is None else f" +- {error:.4f}")
