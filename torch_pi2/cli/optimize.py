"""Profile, fit, plan and rewrite a model, and write it as a Hugging Face folder with a pi2/ folder in it.

The folder still loads as the ordinary dense model with transformers; `torch-pi2 generate` and
torch_pi2.load() use its sparse form. MODEL may also be quantised, a GGUF file or what `import` takes:
the folder then has its rows as they are, and runs with torch_pi2 alone.
"""

import argparse
import shutil
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import to_json
from torch_pi2.base.progress import phase
from torch_pi2.cli import common, models, verdict
from torch_pi2.cli.processes import check_alone, end_of_group
from torch_pi2.errors import ConfigError
from torch_pi2.types.config import Config

EXAMPLE = "torch-pi2 optimize my-model --out my-sparse-model --method lowrank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    common.add_model(parser)
    common.add_out(parser)
    add("--stats", type=Path, metavar="DIR", help="folder written by profile (default: profile now)")
    add("--predictors", type=Path, metavar="DIR", help="folder written by fit (needs --stats; default: fit now)")
    common.add_text(parser)
    add("--hardware", metavar="NAME", help="also plan for this hardware: measured, a preset, or a file (default: none)")
    common.add_config(parser)
    common.add_storage(parser)
    verdict.add_arguments(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.cli.folders import is_quantised
    from torch_pi2.cli.inspect import describe
    from torch_pi2.eval.verdict import bytes_of, judge
    from torch_pi2.rewrite.state import get_state
    from torch_pi2.store.folder import check_replaceable, check_separate

    check_alone("optimize")
    common.check_out(args.out)
    check_replaceable(args.out)
    check_separate("optimize", args.model, args.out)
    if is_quantised(args.model):
        return _of_quantised(args)
    stats = models.load_stats(args.stats) if args.stats else None
    if args.predictors and stats is None:
        raise common.needs("--predictors", "--stats")
    predictors = models.load_predictors(args.predictors, stats.model_hash if stats else None)
    config, model, tokenizer, text = models.load_calibration(args)
    dense_bytes = bytes_of(model)
    how = {"tokenizer": tokenizer, "stats": stats, "predictors": predictors, "hardware": args.hardware}
    model = torch_pi2.optimize(model, text, config, **how, progress=not args.quiet)
    torch_pi2.save(model, args.out, tokenizer=tokenizer)
    if not args.no_verdict:
        phase(verdict.MEASURING)
        dense, why = verdict.dense_of(args, dense_bytes)
        made = [verdict.step("optimize", args.model, _given(args, config))]
        lossy = ["int8 activations"] if config.activations == "int8" else []
        also: Any = {"tokenizer": tokenizer, "not_measured": why, "trust_remote_code": args.trust_remote_code}
        judged = judge(model, dense, args.out, made=made, dense_bytes=dense_bytes, lossy=lossy, **also)
        judged.save(args.out / "pi2")
    errors = get_state(model).quantization
    return {"out": str(args.out), **describe(args.out), "weights": config.weights, "quantization": errors}


def _given(args: argparse.Namespace, config: Config) -> dict[str, Any]:
    """The settings that were given, as the command line has them."""
    given = {name: value for name, value in to_json(config).items() if value != getattr(Config(), name)}
    return given | ({"method": args.method} if args.method else {})


def _of_quantised(args: argparse.Namespace) -> dict[str, Any]:
    import torch_pi2
    from torch_pi2.checkpoint.gguf.importing import cached_import
    from torch_pi2.cli.inspect import describe
    from torch_pi2.eval.verdict import judge, weight_bytes
    from torch_pi2.store.gguf import gguf_in

    for option in ("stats", "predictors", "hardware"):
        if getattr(args, option) is not None:
            raise common.excludes(f"--{option}", args.model, "a quantised model is optimised in one go")
    for option in ("dtype", "activations"):
        if (value := getattr(args, option)) not in (None, "auto"):
            expected = "none: the folder keeps the dtype and activations of the file"
            fix = f"Leave it out; torch_pi2.load(folder, {option}=...) chooses."
            raise ConfigError(f"--{option} with {args.model}", expected=expected, found=str(value), fix=fix)
    source, file, config = args.model, gguf_in(args.model), common.config_of(args)
    if file is not None:
        args.model = str(cached_import(file, packed=False, progress=not args.quiet))
    tokenizer = models.load_tokenizer(args)
    text = common.text_of(args, tokenizer, config.calibration_tokens)
    report = torch_pi2.optimize_quantized(source, args.out, text, config, tokenizer=tokenizer, progress=not args.quiet)
    if not args.no_verdict:
        phase(verdict.MEASURING)
        given = _given(args, config)
        alone = "the folder that it was made of has quantised weights alone"
        missing = alone if file is None else verdict.no_memory(weight_bytes(Path(args.model)))
        why = {"dense": missing} if missing else {}
        dense = None if why else torch_pi2.load(args.model)
        about: Any = {"tokenizer": tokenizer, "made": [verdict.step("optimize", source, given)], "not_measured": why}
        judge(torch_pi2.load(args.out), dense, args.out, **about).save(args.out / "pi2")
    return {"out": str(args.out), **describe(args.out), "weights": report.weights, "quantization": {}}


def render(result: dict[str, Any]) -> str:
    shown, errors = "", [(name, common.percent(error, 2)) for name, error in result["quantization"].items()]
    if errors:
        shown = f"{common.table(('layer', 'relative error of ' + result['weights']), errors)}\n"
    return shown + Profile.render(result)


class Profile:
    """Record how often each FFN neuron fires on calibration text, and write stats.safetensors."""

    EXAMPLE = "torch-pi2 profile my-model --out my-stats --tokens 20000"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        common.add_model(parser)
        common.add_mapped(parser)
        common.add_out(parser)
        common.add_text(parser)
        common.add_config(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2
        from torch_pi2.cli.inspect import describe

        check_alone("profile")
        common.check_out(args.out)
        config, model, tokenizer, text = models.load_calibration(args)
        stats = torch_pi2.profile(model, text, tokenizer=tokenizer, config=config, progress=not args.quiet)
        stats.save(args.out)
        return {"out": str(args.out), **describe(args.out)}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        from torch_pi2.cli.inspect import render as render_folder

        return f"{render_folder(result)}\nwrote {result['out']}"


class Fit:
    """Fit activation predictors to a profiled model, and write predictors.safetensors.

    Samples and fitted layers are kept in OUT.fitting meanwhile: the same command resumes after a kill.
    """

    EXAMPLE = "torch-pi2 fit my-model --stats my-stats --out my-predictors --target-recall 0.97"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        Profile.add_arguments(parser)
        parser.add_argument("--stats", required=True, type=Path, metavar="DIR", help="folder written by profile")

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2
        from torch_pi2.cli.inspect import describe
        from torch_pi2.predict.file import save_predictors

        check_alone("fit")
        common.check_out(args.out)
        stats = models.load_stats(args.stats)
        config, model, tokenizer, text = models.load_calibration(args)
        work = args.out.with_name(f"{args.out.name}.fitting")
        how = {"tokenizer": tokenizer, "config": config, "work": work, "progress": not args.quiet}
        predictors = torch_pi2.fit(model, text, stats=stats, **how)
        save_predictors(args.out, predictors, stats.model_hash)
        shutil.rmtree(work, ignore_errors=True)
        return {"out": str(args.out), **describe(args.out)}

    render = Profile.render


class Sparsify:
    """Train a dense model on until most values of its FFN neurons are exactly zero, and write a checkpoint. Lossy.

    The activation becomes ReLU; a penalty is steered until the share of zeros is the target. Checkpoints are kept in
    OUT.training: the same command resumes after a kill. Several GPUs or machines:
    `accelerate launch -m torch_pi2 sparsify ...`. The result is an ordinary checkpoint of transformers, which
    `torch-pi2 optimize` makes fast.
    """

    EXAMPLE = "torch-pi2 sparsify my-model --out my-relu-model --text corpus/*.txt --steps 1000 --distill"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        common.add_model(parser)
        common.add_out(parser)
        add = parser.add_argument  # defaults are those of SparsifySettings, whose module needs torch
        documents = "UTF-8 documents to train on; stdlib: source of Python's standard library"
        add("--text", nargs="+", required=True, metavar="FILE|stdlib", help=documents)
        heldout = "documents to measure on (default: the last 2 %% of --text, which are not trained on)"
        add("--heldout", nargs="+", metavar="FILE|stdlib-heldout", help=heldout)
        shapes = ("relu-gate", "drelu")
        add("--activation", choices=shapes, default=shapes[0], help="drelu: also on up; needs modelling code")
        add("--target-sparsity", type=float, default=0.95, metavar="S", help="target share of zeros")
        add("--steps", type=common.count, default=0, help="optimiser steps; 0: one pass over the text")
        add("--batch", type=common.positive, default=16, help="windows per step")
        add("--window", type=common.positive, default=512, help="tokens")
        add("--accumulate", type=common.positive, default=1, help="forward passes per step")
        add("--learning-rate", type=float, default=5e-5, metavar="F", help="peak learning rate")
        distill = "share of the loss from the dense model's predictions (without SHARE: 0.5)"
        add("--distill", type=float, nargs="?", const=0.5, default=0.0, metavar="SHARE", help=distill)
        add("--float32", action="store_true", help="compute in float32, not in bfloat16")
        add("--save-every", type=common.count, default=0, help="steps between checkpoints; 0: ten in all")
        add("--seed", type=common.seed, default=0, help="seed of all random choices")

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2

        common.check_out(args.out)
        names = ("activation", "target_sparsity", "steps", "batch", "window", "accumulate", "learning_rate")
        heldout = args.heldout or (["stdlib-heldout"] if args.text == ["stdlib"] else None)
        dense, text = models.load_dense(args), _documents(args.text, "--text")
        how: Any = {**common.given(args, *names, "distill", "save_every", "seed"), "bf16": not args.float32}
        how |= {"heldout": None if heldout is None else _documents(heldout, "--heldout"), "progress": not args.quiet}
        report = torch_pi2.sparsify(dense, args.out, text, tokenizer=models.load_tokenizer(args), **how)
        end_of_group(args)
        return {"out": str(args.out), **report.to_json(), "lines": report.lines()}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        lines = (f"{name + ':':10}{value}" for name, value in result["lines"].items())
        return "\n".join([*lines, f"wrote {result['out']}; next: torch-pi2 optimize {result['out']} --out DIR"])


def _documents(given: list[str], option: str) -> list[str]:
    from torch_pi2.profiling.text import read_files, stdlib_files

    found: list[str] = []
    for name in given:
        if name in ("stdlib", "stdlib-heldout"):
            found += read_files(stdlib_files("heldout" if name.endswith("heldout") else "train", with_tests=True))
        else:
            found.append(common.text_in(name, option))
    return found
