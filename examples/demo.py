"""The whole story on a model that was really trained: find its sparsity, use it, and show what that costs and gives.

Loads the dReLU language model of this repository as any user would, profiles it, fits predictors, and compares
three forms of it on held-out text: dense, exact gate (lossless), low-rank predictor (lossy), and gives a verdict on
the last. Ends where the speed is: a whole model of Llama-1B's sizes, dense beside sparse, in tokens per second; its
weights are random. Nothing is downloaded. `make demo` runs it.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

import torch_pi2
from torch_pi2.base.files import atomic_write
from torch_pi2.base.progress import lines
from torch_pi2.cli import build_parser, doctor, verdict
from torch_pi2.cli.common import percent, size, stdlib_sample, table
from torch_pi2.cli.terminal import configured
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.eval.timing import time_decode
from torch_pi2.eval.verdict import judge
from torch_pi2.eval.work import work
from torch_pi2.types.config import Config
from torch_pi2.types.verdict import Loss, Speed, Verdict

MODEL = Path(__file__).resolve().parent / "models" / "drelu-stdlib-5m"
PROMPT = 'def read_config(path):\n    """Read a configuration file'
FORMS = ("dense", "exact gate", "low-rank")
SECONDS: dict[str, float] = {}


@contextmanager
def section(title: str) -> Iterator[None]:
    """A headline, and at the end the seconds it took."""
    print(f"\n== {title} ==", flush=True)
    started = time.perf_counter()
    yield
    SECONDS[title] = round(time.perf_counter() - started, 1)
    print(f"({SECONDS[title]} s)", flush=True)


def side_by_side(left: str, right: str, width: int = 56) -> str:
    """Two texts in columns, long lines wrapped."""

    def lines(text: str) -> list[str]:
        return [
            part for line in text.splitlines() for part in textwrap.wrap(line, width, drop_whitespace=False) or [""]
        ]

    columns = [lines(left), lines(right)]
    height = max(map(len, columns))
    padded = [column + [""] * (height - len(column)) for column in columns]
    return "\n".join(f"{a:<{width}} | {b}".rstrip() for a, b in zip(*padded))


def generate(model: Any, tokenizer: Any, new_tokens: int) -> str:
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        ids_BT = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    return str(tokenizer.decode(ids_BT[0], skip_special_tokens=True))


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(models: list[Any], tokenizer: Any, plan: Any, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Held-out loss, work and time of the three forms."""
    text = stdlib_sample("heldout", tokenizer, args.heldout_tokens)
    results: dict[str, dict[str, Any]] = {}
    for name, model in zip(FORMS, models):
        with work() as done:
            loss = bits_per_byte(model, tokenizer, text, window=256, max_tokens=args.heldout_tokens, progress=True)
        results[name] = {**loss.to_json(), **done.to_json()}
        if done.neurons:
            tokens = done.neurons // sum(layer.site.intermediate for layer in plan.layers)
            hot, cold = (tokens * sum(getattr(layer, n) for layer in plan.layers) for n in ("n_hot", "n_cold"))
            if name == "low-rank":
                results[name]["cold_computed"] = (done.gate_rows - hot) / max(1, cold)
        results[name]["loss_change"] = loss.nats_per_token / results["dense"]["nats_per_token"] - 1
    prompt_BT = tokenizer(text[:2000], return_tensors="pt")["input_ids"][:, :64]
    timings = time_decode(models, prompt_BT, new_tokens=32, rounds=args.rounds)
    for name, timing in zip(FORMS, timings):
        results[name] |= {"total_ms": timing.total_ms}
    return results


def comparison_table(results: dict[str, dict[str, Any]], cards: list[Any]) -> str:
    def row(title: str, field: str, show: Any) -> list[str]:
        return [title, *(show(results[name][field]) if results[name].get(field) is not None else "-" for name in FORMS)]

    rows = [
        row("held-out bits per byte", "bits_per_byte", "{:.4f}".format),
        row("change of the loss", "loss_change", "{:+.3%}".format),
        row("neurons computed (gate at least)", "neurons_computed", percent),
        row("FFN weights used per token", "rows_used", percent),
        row("cold neurons computed", "cold_computed", percent),
        row("ms per token, 1 thread", "total_ms", "{:.3f}".format),
    ]
    if cards:
        recall, bytes_ = percent(mean([c.recall for c in cards])), size(sum(c.bytes for c in cards))
        cost = percent(mean([c.cost_share for c in cards]))
        rows[5:5] = [
            ["predictor recall", "-", "-", recall],
            ["predictor size", "-", "-", bytes_],
            ["predictor work, of dense FFN", "-", "-", cost],
        ]
    for entry in rows[2:4]:
        entry[1] = percent(1.0)
    return table(("", *FORMS), rows)


def verdict_on(sparse: Any, dense: Any, folder: Path, tokenizer: Any, compared: dict[str, Any]) -> Verdict:
    """That on ``sparse``, saved in ``folder``, with the loss that was found above, of more text; kept in the folder."""
    found = judge(sparse, dense, folder, made=["make demo"], not_measured={"loss": "it was, above"})
    loss = Loss(compared["loss_change"], compared["tokens"], "held-out text (source of Python's standard library)")
    found = replace(found, loss=loss, not_measured={})
    found.save(folder / "pi2")
    return found


#: Settings of the large model by form; dense: every neuron is computed, as in SwiGLU.
LARGE: dict[str, dict[str, Any]] = {"dense": {"active": 1.0, "predictor": None}, "sparse": {"active": 0.1}}


def large_model(scratch: Path, shape: str, seconds: float) -> Speed:
    """Decoding of a synthetic model of ``shape``, whose folders are made in ``scratch``, in rounds that alternate."""
    models = {}
    for form, settings in LARGE.items():
        torch_pi2.synthetic(scratch / form, shape, weights="int4", distinct_layers=1, **settings)
        models[form] = torch_pi2.load(scratch / form, activations="int8")
    speed = judge(models["sparse"], models["dense"], scratch / "sparse", seconds=seconds).speed
    assert speed is not None
    assert speed.dense is not None
    assert speed.ratio is not None
    print(f"synthetic: random weights in 4 bits with the sizes of {shape}; they show speed, never quality")
    rows = [("dense", "100 %", f"{speed.dense:.1f}"), ("sparse", "10 %", f"{speed.sparse:.1f}")]
    print(table(("form", "neurons that fire", "tokens/s"), rows))
    print(f"sparse is {speed.ratio:.2f} times as fast ({speed.ratio_low:.2f} to {speed.ratio_high:.2f}); {speed.how}")
    return speed


def command() -> str:
    """``torch-pi2`` of this environment, as it can be typed here."""
    ours = Path(sys.executable).with_name("torch-pi2")
    return "torch-pi2" if shutil.which("torch-pi2") == str(ours) else os.path.relpath(ours)


def run(args: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    # Layers this small gain nothing from a second thread, and threads that wait for each other on a busy machine
    # lose a lot. The verdict and the model of real size below get all of them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with section(f"load {MODEL.name} with transformers"):
        model = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(MODEL, trust_remote_code=True)
        n_parameters = sum(p.numel() for p in model.parameters())
        print(f"{type(model).__name__}, {n_parameters / 1e6:.1f} million parameters, float32")

    lowrank = Config(method="lowrank", calibration_tokens=args.tokens)
    exact = Config(method="exact", calibration_tokens=args.tokens)
    text = stdlib_sample("train", tokenizer, args.tokens)
    with section("profile: which neurons fire on training text"):
        stats = torch_pi2.profile(model, text, tokenizer=tokenizer, config=lowrank, progress=True)
        rows = [
            (s.key, s.intermediate, percent(s.sparsity), int((s.fired == 0).sum()), f"{s.skew():.2f}") for s in stats
        ]
        print(table(("layer", "neurons", "exact zeros", "never fire", "skew"), rows))
        print(f"{stats.tokens} tokens; the zeros come from training, nothing was masked")

    with section("fit: low-rank predictors of which neurons will fire"):
        predictors = torch_pi2.fit(model, text, stats=stats, tokenizer=tokenizer, config=lowrank, progress=True)

    with section("optimise: exact gate and low-rank forms"):
        forms = [model]
        for config, given in ((exact, None), (lowrank, predictors)):
            dense_copy = copy.deepcopy(model)
            forms.append(
                torch_pi2.optimize(dense_copy, text, config, tokenizer=tokenizer, stats=stats, predictors=given)
            )
        plan = torch_pi2.plan(model, stats, predictors, config=lowrank)
        cards = {key: p.card for key, p in predictors.items() if p.card is not None}
        rows = []
        for layer in plan.layers:
            card = cards.get(layer.site.key)
            shown = (card.rank, percent(card.recall), size(card.bytes)) if card else ("-", "-", "-")
            rows.append((layer.site.key, layer.method, layer.n_hot, layer.n_cold, *shown))
        print(table(("layer", "method", "hot", "cold", "rank", "recall", "size"), rows))

    with section("compare on held-out text"):
        results = compare(forms, tokenizer, plan, args)
        used = [cards[layer.site.key] for layer in plan.layers if layer.site.key in cards]
        print(comparison_table(results, used))
        change, skipped = results["low-rank"]["loss_change"], 1 - results["low-rank"].get("cold_computed", 1.0)
        print(f"low-rank: loss {change:+.2%} (aim: within 1 %), {skipped:.0%} of cold neurons skipped (aim: 70 %)")
        print("Scored: excerpts of held-out files. Times: batch 1, one thread, steps of transformers. Weights this")
        print("small fit in the cache; a model of real size (at the end) is where sparsity saves time.")

    with section("generate, greedy: dense | low-rank"):
        texts = {name: generate(form, tokenizer, args.new_tokens) for name, form in zip(FORMS, forms)}
        print(side_by_side(texts["dense"], texts["low-rank"]))
        same = texts["exact gate"] == texts["dense"]
        print(f"(exact gate: {'the same text as dense, character for character' if same else 'NOT the text of dense'})")

    torch.set_num_threads(threads)
    out = Path(args.out)
    with section("verdict: low-rank beside dense"):
        torch_pi2.save(forms[2], out / "model", tokenizer=tokenizer)
        found = verdict_on(forms[2], model, out / "model", tokenizer, results["low-rank"]).to_json()
        print(verdict.shown(found).lstrip("\n"))

    with (
        section(f"a whole model of real size: {args.shape}, dense beside sparse"),
        tempfile.TemporaryDirectory(dir=out) as at,
    ):
        large = large_model(Path(at), args.shape, 8.0)
    total = round(time.perf_counter() - started, 1)
    report = {
        "results": results,
        "predictors": {key: card.to_json() for key, card in cards.items()},
        "stats": {"tokens": stats.tokens, "layers": [{"key": s.key, "sparsity": s.sparsity} for s in stats]},
        "generated": texts,
        "exact_gate_same_text": same,
        "verdict": found,
        "large": {"shape": args.shape, **asdict(large)},
        "seconds": {**SECONDS, "total": total},
        "machine": doctor.run(build_parser().parse_args(["doctor"])),
    }
    atomic_write(out / "demo.json", json.dumps(report, indent=1) + "\n")
    print(f"\n{total:.0f} s. All numbers are in {out / 'demo.json'}, the model is in {out / 'model'}.")
    print(f"Talk to it:   {command()} chat {out / 'model'}")
    print(f"In a browser: {command()} serve {out / 'model'}    and open http://127.0.0.1:8000/")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="demo-out", help="folder for the artefacts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=20_000, help="calibration tokens (default %(default)s)")
    parser.add_argument("--heldout-tokens", type=int, default=16_384, help="scored tokens (default %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="generated tokens (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default %(default)s)")
    parser.add_argument("--shape", default="llama-1b", help="sizes of the synthetic model (default %(default)s)")
    args = parser.parse_args()
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    if not MODEL.joinpath("config.json").is_file():
        sys.exit(f"no trained model in {MODEL}: make one with examples/train_lm.py")
    try:
        with configured(), lines("demo"):
            run(args)
    except torch_pi2.Pi2Error as error:
        sys.exit(f"demo: {error}")


if __name__ == "__main__":
    main()
