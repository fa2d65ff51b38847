"""Compare an optimised model with its dense form: held-out loss, work done, and time per token.

A folder without dense weights (a store, quantised weights, shards) is evaluated alone.
"""

import argparse
from pathlib import Path
from typing import Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common, models
from torch_pi2.cli.processes import process_group
from torch_pi2.errors import ConfigError

#: Largest default of ``--batch-size``.
_WINDOWS = 8
#: Fields in the table of models.
_SHOWN = ("model", "bits_per_byte", "perplexity", "neurons_computed", "rows_used", "total_ms")
EXAMPLE = "torch-pi2 eval my-sparse-model --max-tokens 20000 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder written by import, optimize, quantize or pack, or GGUF file")
    common.add_text(parser, "stdlib-heldout")
    add("--max-tokens", type=common.positive, default=20_000, help="scored tokens")
    add("--window", type=common.positive, default=256, help="tokens per window")
    batch = f"windows at once (default: {_WINDOWS}; with --budget as many as fit, if that is less)"
    add("--batch-size", type=common.positive, help=batch)
    add("--decode-tokens", type=common.positive, default=32, help="with a dense model: timed tokens")
    add("--rounds", type=common.positive, default=5, help="with a dense model: timing rounds")
    tasks = "also tasks of lm-eval (extra eval): names, YAML files or folders of these; nothing is downloaded"
    add("--lm-eval", nargs="+", default=[], metavar="TASK", help=tasks)
    add("--limit", type=common.positive, help="examples of each task (default: all)")
    common.add_budget(parser)
    common.add_together(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    args.named = args.model
    with process_group(args, args.model) as (args.model,):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import weights_path

    _set_batch(args)
    pi2 = Path(args.model) / "pi2"
    sparse = models.load_sparse(args)
    dense = None if weights_path(pi2) is not None else models.load_dense(args)
    tokenizer = models.load_tokenizer(args)
    with Parts(pi2) as parts:
        plan = parts.plan()
    methods = sorted({layer.method for layer in plan.layers})
    result: dict[str, Any] = {"model": args.named, "threads": torch.get_num_threads(), "methods": methods}
    if args.lm_eval:
        from torch_pi2.eval.harness import harness

        by_task = result.setdefault("lm_eval", {})  # task -> form -> metrics
        for form, model in {"dense": dense, "sparse": sparse}.items():
            if model is not None:
                phase(f"lm-eval: {form}")
                figures = harness(model, tokenizer, args.lm_eval, limit=args.limit, batch_size=args.batch_size)
                for task, metrics in figures.items():
                    by_task.setdefault(task, {})[form] = metrics
    text = common.text_of(args, tokenizer, args.max_tokens)
    if dense is not None:
        return result | _compared(args, dense, sparse, tokenizer, text)
    if not args.lm_eval:
        result["sparse"] = _loss_and_work(args, sparse, tokenizer, text)
    return result | {"store": models.of_store(sparse)}


def _set_batch(args: argparse.Namespace) -> None:
    """Set ``args.batch_size`` and ``args.context``. Raises ConfigError if a budget has no memory for them."""
    from torch_pi2.types.offload import PIECE_TOKENS

    most = _WINDOWS if args.budget is None else min(_WINDOWS, PIECE_TOKENS // args.window)
    given = f" --batch-size {args.batch_size}" if (args.batch_size or 1) > 1 else ""
    args.batch_size = args.batch_size or max(1, most)
    args.context = args.batch_size * args.window
    if args.budget is not None and args.context > PIECE_TOKENS and not common.left_out(args):  # else token by token
        expected = f"at most {PIECE_TOKENS} tokens in a call, for which a budget has memory"
        found, fix = str(args.context), "Pass a smaller --window" + (" or --batch-size." if given else ".")
        raise ConfigError(f"--window {args.window}{given} with --budget", expected=expected, found=found, fix=fix)


def _loss(args: argparse.Namespace, model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    from torch_pi2.eval.loss import bits_per_byte

    how = common.given(args, "window", "batch_size", "max_tokens")
    return bits_per_byte(model, tokenizer, text, **how, progress=not args.quiet).to_json()


def _loss_and_work(args: argparse.Namespace, sparse: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    from torch_pi2.eval.work import work

    with work() as done:
        loss = _loss(args, sparse, tokenizer, text)
    return {**loss, **done.to_json()}


def _compared(args: argparse.Namespace, dense: Any, sparse: Any, tokenizer: Any, text: str) -> dict:
    from torch_pi2.eval.timing import time_decode

    loss_dense, loss_sparse = _loss(args, dense, tokenizer, text), _loss_and_work(args, sparse, tokenizer, text)
    prompt = tokenizer(text[:2000], return_tensors="pt", add_special_tokens=False)["input_ids"][:, :64]
    how = {"new_tokens": args.decode_tokens, "rounds": args.rounds}
    ms_dense, ms_sparse = (timing.total_ms for timing in time_decode([dense, sparse], prompt, **how))
    return {
        "dense": {**loss_dense, "total_ms": ms_dense},
        "sparse": {**loss_sparse, "total_ms": ms_sparse},
        "loss_change": loss_sparse["nats_per_token"] / loss_dense["nats_per_token"] - 1,
        "total_speedup": ms_dense / ms_sparse,
    }


def render(result: dict[str, Any]) -> str:
    methods = result["methods"]
    summary = f"methods: {', '.join(methods)}; " if methods else "no layer is sparse; "
    # alone, a model whose layers compute every neuron is under "sparse" in JSON
    names = {"dense": "dense", "sparse": "dense" if "dense" not in result and {*methods} <= {"dense"} else "sparse"}
    forms = [{"model": shown, **result[name]} for name, shown in names.items() if name in result]
    tables = [common.records(forms, _SHOWN)] if forms else []
    if "loss_change" in result:
        summary += f"loss {result['loss_change']:+.3%}; "
    if "sparse" in result:
        summary += f"{result['sparse']['tokens']} tokens ({common.size(result['sparse']['bytes'])}) scored; "
    by_task = [(task, *pair) for task, found in result.get("lm_eval", {}).items() for pair in found.items()]
    tasks = [{"task": task, "model": name} | {k: f"{v:.4f}" for k, v in of.items()} for task, name, of in by_task]
    if tasks:
        tables.append(common.records(tasks, list(dict.fromkeys(name for row in tasks for name in row))))
    if result.get("store"):
        summary += f"{result['store']['text']}; "
    return "\n".join([*tables, f"{summary}{result['threads']} threads"])
