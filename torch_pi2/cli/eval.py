"""Compare an optimised model with its dense form: held-out loss, work done, and time per token.

--suite compares the answers of both, or of any two models, to questions made from the text: the last word of a line
(cloze), an identifier used before, the right closing bracket, the next word of a repeated line. Differences are paired,
with a 95 % confidence interval.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.cli.processes import process_group
from torch_pi2.errors import ConfigError

#: Default number of questions of each task.
_ITEMS = 200
#: Default number of windows at once, at most.
_WINDOWS = 8
#: Rows of the table, by key of the result.
_LOSS = (("held-out bits per byte", "bits_per_byte", ".4f"), ("perplexity per token", "perplexity", ".3f"))
_WORK = (("neurons computed", "neurons_computed"), ("FFN matrix rows used", "rows_used"))
_TIMES = (("ms per token in FFNs", "ffn_ms"), ("ms per token in all", "total_ms"))
EXAMPLE = "torch-pi2 eval my-sparse-model --max-tokens 20000 --json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", help="folder written by optimize")
    common.add_text(parser, "stdlib-heldout")
    parser.add_argument("--max-tokens", type=common.positive, default=20_000, metavar="N", help="scored tokens")
    parser.add_argument("--window", type=common.positive, default=256, metavar="N", help="tokens per window")
    parser.add_argument(
        "--batch-size",
        type=common.positive,
        metavar="N",
        help=f"windows at once (default: {_WINDOWS}; with --budget as many as fit, if that is less)",
    )
    parser.add_argument(
        "--decode-tokens", type=common.positive, default=32, metavar="N", help="beside a dense model: tokens to time"
    )
    parser.add_argument(
        "--rounds", type=common.positive, default=5, metavar="N", help="beside a dense model: rounds of timing"
    )
    parser.add_argument(
        "--lm-eval",
        nargs="+",
        default=[],
        metavar="TASK",
        help="also tasks of lm-eval (extra eval): names, YAML files or folders of these; nothing is downloaded",
    )
    parser.add_argument(
        "--suite",
        nargs="*",
        metavar="TASK",
        help="also questions made from all of --text: cloze, identifiers, brackets, copying (default: all four)",
    )
    parser.add_argument(
        "--against",
        metavar="DIR",
        help="with --suite alone: compare with this model, not the dense one; both may be of any kind, bundles too",
    )
    parser.add_argument(
        "--limit",
        type=common.positive,
        metavar="N",
        help=f"examples of each task (default: all of lm-eval's, {_ITEMS} of the suite's)",
    )
    parser.add_argument("--seed", type=common.seed, default=0, help="of the suite's questions (default: 0)")
    common.add_budget(parser)
    common.add_together(parser)
    common.add_loading(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    args.named, against = args.model, [] if args.against is None else [args.against]
    with process_group(args, args.model, *against) as (args.model, *_):
        return _run(args)


def _run(args: argparse.Namespace) -> dict[str, Any]:
    import torch

    from torch_pi2.store.parts import Parts
    from torch_pi2.store.storefile import weights_path

    _set_batch(args)
    pi2, result = Path(args.model) / "pi2", {"model": args.named, "threads": torch.get_num_threads()}
    rows = weights_path(pi2) is not None  # a store or quantised neurons: there is no dense model
    _check_suite(args, rows)
    if args.against is not None:
        own = common.given(args, "budget", *common.LEAVE_OUT)
        _, *own_model = _of_any_kind(args, args.model, **own)  # first, because only this one may be in shards
        result["suite"] = _suite(args, [_of_any_kind(args, args.against), (args.named, *own_model)])
        return result | {"store": common.of_store(own_model[0])}
    sparse = common.load_sparse(args)
    dense = None if rows else common.load_dense(args)
    tokenizer = common.load_tokenizer(args)
    with Parts(pi2) as parts:
        plan = parts.plan()
    result["methods"] = sorted({layer.method for layer in plan.layers})
    if args.lm_eval:
        result["lm_eval"] = _tasks(args, {"dense": dense, "sparse": sparse}, tokenizer)
    if args.suite is not None:
        result["suite"] = _suite(args, [("dense", dense, tokenizer), ("sparse", sparse, tokenizer)])
    if dense is None:
        if not args.lm_eval:
            text = common.text_of(args, tokenizer, args.max_tokens)
            result["sparse"] = _loss_and_work(args, sparse, tokenizer, text)
        return result | {"store": common.of_store(sparse)}
    return result | _compared(args, dense, sparse, tokenizer, plan)


def _set_batch(args: argparse.Namespace) -> None:
    """Set the default of ``--batch-size``, and ``context``. Raises ConfigError: they do not fit into a budget."""
    from torch_pi2.types.budget import PIECE_TOKENS

    most = _WINDOWS if args.budget is None else min(_WINDOWS, PIECE_TOKENS // args.window)
    given = f" --batch-size {args.batch_size}" if (args.batch_size or 1) > 1 else ""
    args.batch_size = args.batch_size or max(1, most)
    args.context = args.batch_size * args.window
    if args.budget is not None and args.context > PIECE_TOKENS and not common.left_out(args):  # else token by token
        raise ConfigError(
            f"--window {args.window}{given} with --budget",
            expected=f"at most {PIECE_TOKENS} tokens in a call, for which a budget has memory",
            found=str(args.context),
            fix="Pass a smaller --window" + (" or --batch-size." if given else "."),
        )


def _check_suite(args: argparse.Namespace, rows: bool) -> None:
    """Raises ConfigError: only one model (``rows``: without dense weights), or two without a suite."""
    from torch_pi2.cli.folders import kind_of

    alone = args.suite is not None and not args.lm_eval
    if args.against is not None and not alone:
        raise ConfigError(
            "--against",
            expected="--suite beside it, and no --lm-eval",
            found="--lm-eval" if args.lm_eval else "no --suite",
            fix="Pass --suite, or leave --against out.",
        )
    if args.against is None and (kind_of(Path(args.model)) == "bundle" or (rows and args.suite is not None)):
        raise ConfigError(
            f"torch-pi2 eval {args.model}",
            expected="--suite and a model to compare with, because that folder has no dense weights",
            found="no --against",
            fix="Pass --suite --against CHECKPOINT, the one that it was made from.",
        )


def _of_any_kind(
    args: argparse.Namespace, folder: str, budget: str | None = None, **leave_out: float
) -> tuple[str, Any, Any]:
    """Name, model and tokenizer of a checkpoint, of what optimize, quantize and pack wrote, or of a bundle."""
    from torch_pi2.cli.folders import kind_of

    own = {"model": folder, "budget": budget, "gpu_memory": None, "compile": False}
    of = argparse.Namespace(**vars(args) | own | dict.fromkeys(common.LEAVE_OUT, 0.0) | leave_out)
    if kind_of(Path(folder)) != "bundle":
        return folder, common.load_any(of), common.load_tokenizer(of)
    from torch_pi2.export.run import Bundle

    for name in common.left_out(of):
        raise ConfigError(
            f"{common.option_of(name)} with {folder}",
            expected="a model over a store, as pack writes it",
            found="a bundle, which reads all neurons that it needs",
            fix="Leave it out.",
        )
    phase(f"load {folder}")
    bundle = Bundle(folder, budget)
    return folder, bundle, bundle.tokenizer


def _suite(args: argparse.Namespace, models: Sequence[tuple[str, Any, Any]]) -> dict[str, Any]:
    """Differences by task between two models, each with its name and tokenizer; the reference comes first."""
    from torch_pi2.eval import answers, differences, make_items
    from torch_pi2.export.run import Bundle

    items = make_items(common.text_of(args), args.suite or (), limit=args.limit or _ITEMS, seed=args.seed)
    limits = [model.manifest.max_tokens for _, model, _ in models if isinstance(model, Bundle)]
    window, given = min([args.window, *limits]), []
    for name, model, tokenizer in models:
        phase(f"suite: {name}")
        given.append(answers(model, tokenizer, items, window=window, progress=not args.quiet))
    tasks = {task: found.to_json() for task, found in differences(items, *given).items()}
    names = [name for name, *_ in models]
    return {"models": names, **common.given(args, "text", "seed"), "window": window, "tasks": tasks}


def _tasks(args: argparse.Namespace, models: dict[str, Any], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Task -> ``dense`` and ``sparse`` -> metrics of lm-eval."""
    from torch_pi2.eval.harness import harness

    found: dict[str, dict[str, Any]] = {}
    for of, model in models.items():
        if model is not None:
            phase(f"lm-eval: {of}")
            figures = harness(model, tokenizer, args.lm_eval, limit=args.limit, batch_size=args.batch_size)
            for task, of_task in figures.items():
                found.setdefault(task, {})[of] = of_task
    return found


def _loss(args: argparse.Namespace, model: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    from torch_pi2.eval import bits_per_byte

    return bits_per_byte(
        model,
        tokenizer,
        text,
        window=args.window,
        batch_size=args.batch_size,
        max_tokens=args.max_tokens,
        progress=not args.quiet,
    ).to_json()


def _loss_and_work(args: argparse.Namespace, sparse: Any, tokenizer: Any, text: str) -> dict[str, Any]:
    from torch_pi2.eval import work

    with work() as done:
        loss = _loss(args, sparse, tokenizer, text)
    return {**loss, **done.to_json()}


def _compared(args: argparse.Namespace, dense: Any, sparse: Any, tokenizer: Any, plan: Any) -> dict[str, Any]:
    from torch_pi2.eval import compare_decode, ffn_modules

    text = common.text_of(args, tokenizer, args.max_tokens)
    loss_dense, loss_sparse = _loss(args, dense, tokenizer, text), _loss_and_work(args, sparse, tokenizer, text)
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
        "dense": {**loss_dense, **time.dense.to_json()},
        "sparse": {**loss_sparse, **time.sparse.to_json()},
        "loss_change": loss_sparse["nats_per_token"] / loss_dense["nats_per_token"] - 1,
        "ffn_speedup": time.ffn_speedup,
        "total_speedup": time.total_speedup,
    }


def render(result: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    summary = f"methods: {', '.join(result['methods'])}; " if "methods" in result else ""
    if "sparse" in result:
        dense: dict[str, Any] | None = result.get("dense")
        sparse = result["sparse"]
        for name, key, shape in _LOSS:
            rows.append((name, "-" if dense is None else f"{dense[key]:{shape}}", f"{sparse[key]:{shape}}"))
        for name, key in _WORK:
            rows.append((name, common.percent(1.0), common.percent(sparse[key])))
        if dense is not None:
            rows += [(name, f"{dense[key]:.3f}", f"{sparse[key]:.3f}") for name, key in _TIMES]
            summary += f"loss {result['loss_change']:+.3%}; "
        summary += f"{sparse['tokens']} tokens ({common.size(sparse['bytes'])}) scored; "
    for task, found in result.get("lm_eval", {}).items():
        names = [name for name in found["sparse"] if not name.partition(" ")[0].endswith("_stderr")]
        for name in names:
            figures = (_with_error(found.get(of), name) for of in ("dense", "sparse"))
            rows.append((f"{task}: {name}", *figures))
    tables = [common.table(("", "dense", "sparse"), rows)] if rows else []
    if "suite" in result:
        tables.append(suite_table(result["suite"]["models"], result["suite"]["tasks"]))
    if result.get("store"):
        summary += f"{result['store']['text']}; "
    return "\n".join([*tables, f"{summary}{result['threads']} threads"])


def suite_table(models: Sequence[str], tasks: dict[str, dict[str, Any]]) -> str:
    """A table of the answers of two models."""
    first, second = (Path(name).name for name in models)
    header = ("right answers", "items", "by chance", first, second, "difference", "95 % interval", "other answers")
    rows = [
        (
            task,
            str(of["items"]),
            *(common.percent(share) for share in (of["chance"], *of["accuracy"])),
            f"{100 * of['difference']:+.1f}",
            "{:+.1f} to {:+.1f}".format(*(100 * end for end in of["interval"])),
            common.percent(of["changed"]),
        )
        for task, of in tasks.items()
    ]
    return common.table(header, rows)


def _with_error(figures: dict[str, float] | None, name: str) -> str:
    """A figure, with its standard error if there is one; ``-``: there are no dense weights."""
    if figures is None:
        return "-"
    metric, space, rest = name.partition(" ")
    error = figures.get(f"{metric}_stderr{space}{rest}")
    return f"{figures[name]:.4f}" + ("" if error is None else f" +- {error:.4f}")
