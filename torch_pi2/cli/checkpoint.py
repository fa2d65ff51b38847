"""Verbs that write weights in another form: ``import``, ``quantize``, ``pack`` and ``synthetic``."""

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch_pi2.base.reading import parse
from torch_pi2.cli import common, models, verdict
from torch_pi2.errors import ArtifactError, ConfigError
from torch_pi2.formats import FLOAT, FLOATS, IMPORT_NEURONS, OF_NEURONS, QUANTIZED
from torch_pi2.types.config import QUANTIZATIONS, Config

#: Layers whose error ``quantize`` shows, at most.
_MOST_ROWS = 40


class Import:
    """Import a quantised model, a GGUF file or a folder, for every other command; or RWKV-7's .pth, for `optimize`.

    Folders may be quantised by GPTQ, AWQ, compressed-tensors, torchao or BitNet. Matrices keep their precision, bit for
    bit, if one of our formats has it (GGUF's Q4_0, Q8_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, IQ4_NL, TQ1_0, TQ2_0);
    others are rounded again, and listed. Tokenizer and chat template are imported, too. Layers that can be sparse
    (ReLU) and experts become neurons; --neurons all does this for all layers, for `torch-pi2 pack` and models larger
    than memory.
    """

    EXAMPLE = "torch-pi2 import model-q4_k_m.gguf --out my-model"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("source", type=Path, metavar="SOURCE", help="a .gguf or .pth file, or a folder")
        common.add_out(parser)
        which = "which feed-forward layers become neurons, and in what; auto: experts, and those that can be sparse"
        add("--neurons", choices=IMPORT_NEURONS, default="auto", help=which)

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        from torch_pi2 import import_gguf, import_quantized, import_rwkv
        from torch_pi2.store.gguf import gguf_in

        common.check_out(args.out)
        how = {"neurons": args.neurons, "progress": not args.quiet}
        if args.source.suffix == ".pth":
            report = import_rwkv(args.source, args.out)
        elif not args.source.is_dir() or gguf_in(args.source) is not None:
            report = import_gguf(args.source, args.out, **how)
        else:
            report = import_quantized(args.source, args.out, **how)
        return {"out": str(args.out), **report.to_json()}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        exact = ", ".join(f"{count} {name}" for name, count in sorted(result["types"].items()))
        lines, errors = [f"kept bit for bit: {exact or 'nothing'}"], result["errors"]
        by_change: dict[str, list[float]] = defaultdict(list)
        for name, change in result["rounded"].items():
            linear = name.removesuffix(".weight")
            # a layer that became neurons has one error for all of its matrices
            by_change[change].append(errors.get(linear, errors.get(linear.rpartition(".")[0], 0.0)))
        for change, of in sorted(by_change.items()):
            lines.append(f"rounded again, {change}: {len(of)} matrices, {common.percent(max(of), 2)} off at most")
        if result["neurons"]:
            off = f"what was rounded {common.percent(max(errors.values(), default=0.0), 2)} off at most"
            lines.append(f"{result['neurons']} layers are neurons now ({result['weights']}), {off}")
        if result["predictors"]:
            lines.append(
                f"{result['predictors']} tensors of PowerInfer's predictors left out, as nothing says what they miss: "
                "the exact gate misses nothing; torch-pi2 optimize fits others"
            )
        if result["tokenizer"]:
            lines.append(f"no tokenizer: {result['tokenizer']}")
        sizes = f"{common.size(result['bytes_in'])} -> {common.size(result['bytes_out'])}"
        return "\n".join([*lines, f"{result['out']}: {sizes} in {result['seconds']:.1f} s"])


class Quantize:
    """Quantise a float checkpoint to 4 or 8 bits a weight, one matrix in memory at a time. Lossy.

    IN is a Hugging Face folder with safetensors, or one written by `torch-pi2 optimize`, whose plan and predictors are
    kept. The printed error is |w' - w| / |w| over all weights of a layer. Weights are rounded to nearest, or, with
    --quantization gptq, so that a layer's outputs on --text change least, which runs the model layer by layer for
    minutes.
    """

    EXAMPLE = "torch-pi2 quantize my-sparse-model my-int4-model --weights int4"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("source", type=Path, metavar="IN", help="folder with float safetensors")
        add("out", type=Path, metavar="OUT", help="folder to write")
        add("--weights", choices=QUANTIZED, default="int4", help="groups of 32 with a 16-bit scale")
        how = "rtn: to nearest; gptq: calibrated on --text"
        add("--quantization", choices=QUANTIZATIONS, default="rtn", help=how)
        common.add_text(parser)
        tokens = Config.calibration_tokens
        add("--tokens", type=common.positive, default=tokens, dest="calibration_tokens", help="tokens for gptq")
        plan = "--out of plan, fit and profile, for a dense IN (default: IN's own)"
        add("--plan", type=Path, metavar="DIR", help=plan)
        common.add_trust(parser)
        verdict.add_arguments(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2

        common.check_out(args.out)
        how = common.given(args, "weights", "quantization", "plan", "trust_remote_code")
        if args.quantization == "gptq":
            tokenizer = models.load_tokenizer(verdict.loading(args))
            how |= {"tokenizer": tokenizer, **common.given(args, "calibration_tokens")}
            how["calibration"] = common.text_of(args, tokenizer, args.calibration_tokens)
        report = torch_pi2.quantize(args.source, args.out, **how, progress=not args.quiet)
        if not args.no_verdict:
            verdict.of_folder(args, "quantize")
        return {"out": str(args.out), **report.to_json(), "verdict": verdict.as_json(args.out)}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        errors = result["errors"]
        largest = sorted(errors, key=lambda name: -errors[name])[:_MOST_ROWS]
        rows = [(name, common.percent(error, 2)) for name, error in errors.items() if name in largest]
        left = f"\n(the {len(rows)} largest of {len(errors)})" if len(rows) < len(errors) else ""
        sizes = f"{common.size(result['bytes_in'])} -> {common.size(result['bytes_out'])}"
        done = f"{result['out']}: {sizes} {result['weights']} in {result['seconds']:.1f} s"
        return f"{common.table(('layer', 'relative error'), rows)}{left}\n{done}{verdict.shown(result['verdict'])}"


class Pack:
    """Write a model as a neuron store: every neuron in a slot that storage reads whole, with a checksum.

    IN is a float checkpoint (optimised or not), a folder with quantised weights (from `torch-pi2 quantize`, `synthetic`
    or `optimize --weights int4`), or a store. Only --weights changes numbers.
    """

    EXAMPLE = "torch-pi2 pack my-int4-model my-store"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("source", type=Path, metavar="IN", help="float safetensors, or a folder with quantised weights")
        add("out", type=Path, metavar="OUT", help="folder to write")
        neurons = "neurons of a float checkpoint (default: float, as they are); int4, int8: all linear layers, lossy"
        add("--weights", choices=[FLOAT, *OF_NEURONS], help=neurons)
        cluster = "neurons in a slot, read together (default: 1 with predictors, else some 200 KB)"
        add("--cluster", type=common.positive, help=cluster)
        add("--ranks", type=common.positive, default=1, help="number of shards, one per machine (docs/DISTRIBUTED.md)")
        shares = "with --ranks: shares of the neurons, by machine (default: equal)"
        add("--shares", type=common.shares, help=shares)
        by = "with --ranks: a shard has some neurons of every layer, or all of some layers (a pipeline)"
        add("--by", choices=("neurons", "layers"), default="neurons", help=by)
        common.add_trust(parser)
        verdict.add_arguments(parser)

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2

        common.check_out(args.out)
        how = common.given(args, "weights", "cluster", "ranks", "shares", "by", "trust_remote_code")
        report = torch_pi2.pack(args.source, args.out, **how, progress=not args.quiet)
        whole = args.ranks == 1  # shards have no speed or loss of their own
        if whole and not args.no_verdict:
            verdict.of_folder(args, "pack", [f"{args.weights} neurons"] if args.weights in FLOATS else [])
        judged = verdict.as_json(args.out) if whole else None
        return {"out": str(args.out), **report.to_json(), "verdict": judged}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        parts = [(name.replace("_", " "), common.size(count)) for name, count in result["regions"].items()]
        return (
            f"{common.table(('part', 'bytes'), parts)}\n"
            f"{result['out']}: {result['neurons']} neurons of {result['layers']} layers; "
            f"{common.size(result['file_bytes'])} in {result['seconds']:.1f} s{verdict.shown(result['verdict'])}"
        )


class Synthetic:
    """Write a model with random weights in a real model's sizes, whose neurons fire as often as real ones.

    For measuring speed: its output has no meaning, and reports label it as synthetic.
    """

    EXAMPLE = "torch-pi2 synthetic m7b --shape mistral-7b --active 0.1 --weights int4"

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("out", type=Path, metavar="OUT", help="folder to write")
        shapes = (
            "mistral-7b, llama-1b, llama-13b, llama-70b, qwen2-7b, mixtral-8x7b, mixtral-8x7b-quarter, "
            "smallthinker-4b, qwen3-30b-a3b, gpt-oss-20b or tiny; or configuration values as JSON, with model_type"
        )
        add("--shape", default="mistral-7b", help=shapes)
        add("--active", type=float, default=0.1, help="mean share of firing neurons; 1: SwiGLU")
        add("--weights", choices=[*QUANTIZED, *FLOATS], default="int4", help="format of the weights")
        add("--predictor", choices=["lowrank", "none"], default="lowrank", help="predictor of firing neurons")
        add("--rank", type=common.positive, default=512, help="rank of the low-rank predictor")
        add("--layers", type=common.positive, help="number of layers (default: the shape's)")
        topic = "part of a token's noise that its topic shares (default: as measured on text; 0: experts evenly used)"
        add("--locality", type=float, help=topic)
        distinct = "make N layers' neurons; the others have copies (default: all)"
        add("--distinct-layers", type=common.positive, help=distinct)
        add("--seed", type=common.seed, default=0, help="seed of the random weights")

    @staticmethod
    def run(args: argparse.Namespace) -> dict[str, Any]:
        import torch_pi2

        start, how = time.perf_counter(), {} if args.locality is None else {"locality": args.locality}
        how |= common.given(args, "active", "weights", "rank", "layers", "distinct_layers", "seed")
        predictor = None if args.predictor == "none" else args.predictor
        try:
            shape: Any = parse(args.shape, "--shape") if args.shape.lstrip().startswith("{") else args.shape
        except ArtifactError as error:
            raise ConfigError("--shape", expected="a name, or JSON", found=error.found, fix="Correct it.") from error
        label = torch_pi2.synthetic(args.out, shape, predictor=predictor, **how, progress=not args.quiet)
        size = sum(p.stat().st_size for p in args.out.rglob("*") if p.is_file())
        return {"out": str(args.out), "bytes": size, "seconds": time.perf_counter() - start, **label}

    @staticmethod
    def render(result: dict[str, Any]) -> str:
        return (
            f"{result['out']}: {result['shape']}, {result['weights']}, {common.percent(result['active'])} active, "
            f"{common.size(result['bytes'])} in {result['seconds']:.0f} s\n({result['synthetic']})"
        )
