"""Methods of sparsity beside the dense model: what they cost on held-out text, and how fast they decode.

Methods are those of ``examples/methods``, built-in ones, and ``FILE.py:CLASS``; each is asked for the same shares of
the weights' bytes, its first argument. Texts are of two kinds that nothing was fitted to: held-out files of the
standard library (calibration has others), and the descriptions of installed packages. Finished cases are kept, a JSON
line each: the same command goes on after a kill.

``--ranks`` measures low-rank predictors of these ranks instead, of one recall in all layers.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import runpy
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import nn

import torch_pi2
from benchmarks.arguments import TRAINED, list_of, names_of
from benchmarks.subject import WORK
from benchmarks.tables import Result, Table, at, markdown_table
from torch_pi2.base.progress import phase
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.fitting.fit import cold_neurons
from torch_pi2.fitting.search import FitSettings
from torch_pi2.fitting.train import calibrate, measure, train_matrices
from torch_pi2.graph.find import find_sites
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.planner.hot_neurons import hot_cut
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.data import Batch, calibration_batches, split
from torch_pi2.profiling.samples import collect_samples
from torch_pi2.types.config import Config
from torch_pi2.types.method import Fitted, find_method
from torch_pi2.types.stats import ActivationStats

_FIT_TOKENS = 20_000
_RECALLS = [0.9, 0.95, 0.99]
PUBLISHED = Path(__file__).resolve().parent.parent / "examples" / "methods"
#: Built-in methods, which are not asked for a share: of models with exact zeros.
SPARSE: dict[str, dict[str, Any]] = {
    "exact": {"method": "exact"},
    "lowrank": {"method": "lowrank"},
    "signbit": {"method": "signbit"},
}
WEIGHTS: dict[str, dict[str, Any]] = {
    "float": {},
    "int4": {"weights": "int4"},
    "int4-gptq": {"weights": "int4", "quantization": "gptq"},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    default = "a decoder's folder in floats, or a GGUF file (default: the trained model)"
    add("--model", type=Path, default=TRAINED, metavar="DIR|GGUF", help=default)
    add("--methods", default="all", metavar="NAME,...", help="all, or names; FILE.py:CLASS for one of yours")
    add("--bytes", type=list_of(float), default=[0.8, 0.6, 0.4], metavar="S,...", help="shares that are asked for")
    add("--texts", type=names_of(TEXTS), default=list(TEXTS), metavar="NAME,...", help=", ".join(TEXTS))
    add("--weights", choices=WEIGHTS, default="float", help="of the methods, and of dense beside them")
    add("--store", action="store_true", help="also over a store, with a budget for half of the neurons")
    add("--tokens", type=common.positive, default=8192, metavar="N", help="of each text; the second halves are scored")
    add("--window", type=common.positive, default=256, metavar="T", help="tokens that are computed together")
    add("--rounds", type=common.count, default=5, metavar="N", help="of decoding, beside dense; 0: not timed")
    add("--calibration-tokens", type=common.positive, default=20_000, metavar="N")
    add("--cases", type=Path, metavar="FILE", help=f"where finished cases are kept (default: in {WORK})")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add("--ranks", type=list_of(common.positive), metavar="R,...", help="predictors of these ranks")
    said = ",".join(f"{recall:g}" for recall in _RECALLS)
    add("--recalls", type=list_of(float), default=_RECALLS, metavar="S,...", help=f"theirs (default: {said})")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``rows`` of :func:`compare`, with ``asked``; ``ranks``: rows with what :func:`_of_ranks` says."""
    make, tokenizer = floats(args)
    plain = make()
    calibration = common.stdlib_sample("train", tokenizer, args.calibration_tokens)
    texts = {name: TEXTS[name](tokenizer, args.tokens) for name in args.texts}
    how: dict[str, Any] = {"tokens": args.tokens, "window": args.window}
    how |= {"calibration_tokens": args.calibration_tokens, **WEIGHTS[args.weights]}
    given: Any = {"tokenizer": tokenizer, "progress": True}
    if args.ranks:
        config = Config(method="lowrank", calibration_tokens=args.calibration_tokens, **WEIGHTS[args.weights])
        stats = torch_pi2.profile(plain, calibration, config=config, **given)
        data = calibration_batches(plain, calibration, tokenizer, config)
        ranks = list(_of_ranks(args, plain, data, stats, config))
        known: Any = {"config": config, "stats": stats}
        methods = {row["method"]: _with(calibration, predictors=fitted, **known, **given) for row, fitted in ranks}
    else:
        ranks, methods = [], cases(args.methods, args.bytes, plain)
    about = {**how, "model": args.model.name, "threads": torch.get_num_threads(), "texts": args.texts}
    kept = Kept(args.cases or WORK / f"methods-{args.model.stem}-{args.weights}.jsonl", about)
    file = args.model if args.model.suffix == ".gguf" else None
    how |= {"calibration": calibration, "each": kept.add, "file": file, "keep": kept.path.with_suffix(""), **given}
    model = plain if file else make
    left = {name: method for name, method in methods.items() if name not in kept.rows}
    if left or "dense" not in kept.rows:
        torch_pi2.compare(model, left, texts, rounds=0, **how)
    left = {name: method for name, method in methods.items() if name not in kept.speeds}
    if args.rounds and (left or "dense" not in kept.speeds):
        torch_pi2.compare(model, left, texts, rounds=args.rounds, store=args.store, scored=False, **how)
    rows = [kept.speeds.get(name, {}) | row for name in ("dense", *methods) for row in kept.rows[name]]
    figures = {row["method"]: row for row in rows}
    return {
        "synthetic": getattr(plain.config, "torch_pi2_synthetic", False),
        "rows": rows,
        "ranks": [about | figures[about["method"]] for about, _ in ranks],
    }


def _with(*given: Any, **more: Any) -> Callable[[Any], Any]:
    return lambda model: torch_pi2.optimize(model, *given, **more)


def published() -> dict[str, type[Fitted]]:
    """The classes of ``examples/methods`` by name."""
    found = dict[str, type[Fitted]]()
    for file in sorted(PUBLISHED.glob("*.py")):
        if file.stem != "template":
            made = runpy.run_path(str(file), run_name=file.stem).values()
            found |= {
                y.name: y for y in made if isinstance(y, type) and issubclass(y, Fitted) and y.__module__ == file.stem
            }
    return found


def cases(names: str, shares: list[float], model: nn.Module) -> dict[str, Any]:
    """Methods of :func:`compare` by name in the table. Raises ConfigError: an unknown name."""
    zeros = all(exact_zeros(site.activation) for site in find_sites(model))
    built_in, others = SPARSE if zeros else {}, published()
    chosen = [*built_in, *others] if names == "all" else names.split(",")
    found = dict[str, Any]()
    for name in chosen:
        if name in built_in:
            found[name] = built_in[name]
            continue
        # registered, because fitted methods are kept in files
        kind = torch_pi2.register_method(find_method(name)) if ".py:" in name else others.get(name)
        if kind is None:
            expected = ", ".join(("all", *built_in, *others, "FILE.py:CLASS"))
            raise ConfigError("--methods", expected=expected, found=repr(name), fix="Choose among them.")
        found |= {f"{kind.name or kind.__name__} {share:g}": kind(share) for share in shares}  # type: ignore[call-arg]
    return found


class Kept:
    """Rows of finished cases in a file of JSON lines, those made with the same settings ``about``: ``rows`` of each
    method, one for each text, and its ``speeds``.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path, self.about = path, about
        self.rows, self.speeds = dict[str, list[dict[str, Any]]](), dict[str, dict[str, Any]]()
        for line in path.read_text().splitlines() if path.is_file() else []:
            with suppress(ValueError):  # cut off
                kept = json.loads(line)
                if kept["about"] == about:
                    self._keep(kept["row"])
        self.rows = {name: rows for name, rows in self.rows.items() if len(rows) == len(about["texts"])}

    def _keep(self, row: dict[str, Any]) -> bool:
        """False: it was known."""
        name, known = row["method"], len(self.rows.get(row["method"], []))
        if "text" not in row:
            return self.speeds.setdefault(name, row) is row
        if known < len(self.about["texts"]):
            self.rows.setdefault(name, []).append(row)
        return known < len(self.about["texts"])

    def add(self, row: dict[str, Any]) -> None:
        """A row of :func:`compare`."""
        name, _, asked = row["method"].rpartition(" ")
        row |= {"asked": float(asked)} if name and asked.replace(".", "").isdigit() else {}
        if self._keep(row):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write("\n" + json.dumps({"about": self.about, "row": row}))


def _stdlib(tokenizer: Any, tokens: int) -> str:
    return common.stdlib_sample("heldout", tokenizer, tokens)


def _prose(tokenizer: Any, tokens: int) -> str:
    """Beginnings of the descriptions of installed packages, in the order of their names: prose with some code."""
    about: list[Any] = [item.metadata for item in importlib.metadata.distributions()]
    found = {each["Name"]: each.get_payload() for each in about}
    text, tokens_found = "", 0
    for name in sorted(found):
        part = f"{found[name] or ''}"[:4096]
        text, tokens_found = text + part + "\n\n", tokens_found + len(tokenizer(part, verbose=False)["input_ids"])
        if tokens_found > tokens + 256:
            break
    return text


TEXTS: dict[str, Callable[[Any, int], str]] = {"stdlib": _stdlib, "docs": _prose}


def _of_ranks(
    args: argparse.Namespace, model: nn.Module, data: list[Batch], stats: ActivationStats, config: Config
) -> Iterator[tuple[dict[str, Any], FittedPredictors]]:
    """Predictors of each rank, trained once, and calibrated to each recall; means over layers of their cards. Recall
    and shares are of the cold neurons, on tokens that nothing was fitted to; a predictor that knows nothing has the
    recall ``predicted``. ``bytes``: of the predictor in int4, beside those of the layer's weights in int4.
    """
    sites, sets = find_sites(model), split(data, config.batch_size)
    cold = {site.key: cold_neurons(stats, site.key, hot_cut(site, stats[site.key], config)) for site in sites}
    samples = {part: collect_samples(model, sets[part], sites, _FIT_TOKENS, progress=False) for part in sets}
    for rank in args.ranks:
        trained = {}
        for site in sites:
            phase(f"rank {rank}, {site.key}")
            how: dict[str, Any] = {"neurons": cold[site.key], "steps": FitSettings.steps, "seed": site.layer}
            matrices = train_matrices(samples["fit"][site.key], rank=rank, **how)
            trained[site.key] = LowRankRows.fitted(*matrices)
        for recall in args.recalls:
            fitted = FittedPredictors()
            fitted.model_hash = stats.model_hash
            for site in sites:
                key, neurons = site.key, cold[site.key]
                held = (samples[part][key] for part in ("calibrate", "evaluate"))
                made = calibrate(trained[key], next(held), site, target_recall=recall, neurons=neurons)
                made.card = measure(made, next(held), site, weights=site.weights(model), neurons=neurons)
                fitted[key] = made
            cards = [made.card for made in fitted.values() if made.card is not None]
            bytes_ = [made.cost_share for made in cards]  # both in int4: as multiplications
            about = {"method": f"rank {rank}, {recall:g}", "rank": rank, "recall_asked": recall, "bytes": fmean(bytes_)}
            about |= {"recall": fmean(made.recall for made in cards), "least": min(made.recall for made in cards)}
            about["mass"] = fmean(made.mass_recall or 0.0 for made in cards)
            yield about | {"predicted": fmean(made.predicted_active for made in cards)}, fitted


def floats(args: argparse.Namespace) -> tuple[Callable[[], Any], Any]:
    """A function that makes the model in float32, anew each time; and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, trust = args.model, args.trust_remote_code or args.model == TRAINED  # our own model brings its code
    if folder.suffix == ".gguf":
        folder = WORK / f"imported-{folder.stem}"
        if not (folder / "config.json").is_file():
            torch_pi2.import_gguf(args.model, folder)

    def make() -> Any:
        if folder != args.model:
            return torch_pi2.load_dense(folder, dtype=torch.bfloat16)
        return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, dtype=torch.float32).eval()

    return make, AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)


def _loss(row: Any) -> str:
    if "loss" not in row:
        return f"refused: {row['refused'].split('. ')[0]}"
    error = "" if row["loss_error"] is None else f" ± {row['loss_error']:.2%}"
    return f"{row['loss']:+.2%}{error}"


def _speed(row: Any) -> str:
    return f"{row['speed']:.2f} ({row['speed_low']:.2f} to {row['speed_high']:.2f})" if "speed" in row else ""


TABLES = (
    Table(
        "Methods of sparsity",
        lambda result: result["rows"],
        {
            "method": at("method"),
            "text": at("text"),
            "loss": _loss,
            "KL, nats": at("kl", ".4f"),
            "same token": at("agreement", common.percent),
            "neurons used": at("neurons", common.percent),
            "bytes read": at("ffn_bytes", common.percent),
            "tokens/s": at("tokens_per_s", ".1f"),
            "beside dense": _speed,
            "fit, s": at("fit_s", ".1f"),
            "size": at("size_bytes", common.size),
            "from flash, a token": at("flash_bytes", common.size),
            "hits": at("hits", common.percent),
        },
        "The number behind a method is the share of bytes that it was asked for. Loss: relative increase beside the "
        "dense model in floats on held-out text, with a 95 % confidence interval from pairs of windows; the second "
        "half of each is scored. Bytes read: share of the weights of feed-forward layers (of methods of input "
        "channels: of all linear layers but the output layer) that a token reads, and what the method reads itself to "
        "choose. Speed: decoding of one sequence, median, in turn with the dense model in the same format. Over a "
        "store half of the neurons fit in the cache.",
    ),
    Table(
        "Ranks of predictors",
        lambda result: result.get("ranks", []),
        {
            "rank": at("rank"),
            "recall asked for": at("recall_asked", common.percent),
            "recall": at("recall", common.percent),
            "lowest": at("least", common.percent),
            "of the output": at("mass", common.percent),
            "predicted": at("predicted", common.percent),
            "FFN bytes read": at("ffn_bytes", common.percent),
            "predictor": at("bytes", common.percent),
            "loss": at("loss", "+.2%"),
            "KL, nats": at("kl", ".4f"),
            "same token": at("agreement", common.percent),
        },
        "Low-rank predictors of one rank and recall in all layers: recall of firing cold neurons on held-out "
        "calibration text (mean and lowest of the layers, and weighted by what neurons add to the output), the share "
        "predicted, which is the recall of a predictor that knows nothing; then, beside the dense model in floats on "
        "held-out text, the bytes read, the predictor's bytes as a share of the layer's (both in int4), and the loss.",
    ),
)


def markdown(result: Result) -> str:
    """The table of docs/METHODS.md: without columns that are empty."""
    cells = [list(TABLES[0].columns), *TABLES[0].cells(result)]
    kept = [column for column in zip(*cells, strict=True) if any(column[1:])]
    header, *rows = zip(*kept, strict=True)
    return markdown_table(header, rows)


def about(result: Result) -> str:
    tokens = max(row.get("tokens", 0) for row in result["rows"])
    return f"{result['model']}: {result['weights']}, {tokens:,} scored tokens of each text, {result['threads']} threads"
