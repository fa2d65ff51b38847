"""What several verbs share: types and groups of options, and loading of models and artefacts."""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pi2.base.fields import shown
from torch_pi2.base.package import missing_package
from torch_pi2.base.progress import phase
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.base.units import percent as percent
from torch_pi2.base.units import size as size
from torch_pi2.cli.processes import coordinated
from torch_pi2.cli.tables import table as table
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error
from torch_pi2.formats import ACTIVATIONS, FLOATS
from torch_pi2.types.config import METHODS, QUANTIZATIONS, SCORES, WEIGHTS, Config

if TYPE_CHECKING:
    from torch import nn

    from torch_pi2.predict.file import FittedPredictors
    from torch_pi2.types.offload import OffloadConfig
    from torch_pi2.types.stats import ActivationStats

DTYPES = ("auto", *FLOATS)
_MODEL = "a Hugging Face causal language model"
#: Default of ``--max-tokens``, if the model has as many positions.
MOST_TOKENS = 4096
#: ``--gpu-memory all``: the whole model is on the GPU.
ALL = "all"
#: By verb: options that reduce the memory beside the neurons.
_LESS = {
    "generate": ("--max-new-tokens", "--num-return-sequences"),
    "chat": ("--max-tokens",),
    "serve": ("--max-tokens", "--max-batch-size"),
    "eval": ("--window", "--batch-size"),
}
#: Lossy fields of OffloadConfig: neurons and experts that are not in memory may be left out.
LEAVE_OUT = ("miss_margin", "drop_experts")


def _integer(name: str, least: int, most: int = 1 << 31) -> Callable[[str], int]:
    """A type for argparse. int() would also take ``1_0`` and digits of other scripts."""

    def parse_integer(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError(text)
        value = int(text)
        if not least <= value <= most:
            expected = f"{least} or more" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"expected {expected}, found {shown(value)}")
        return value

    parse_integer.__name__ = name
    return parse_integer


def _number(name: str, expected: str, valid: Callable[[float], bool]) -> Callable[[str], float]:
    def parse_number(text: str) -> float:
        value = float(text)
        if not valid(value):
            raise argparse.ArgumentTypeError(f"expected {expected}, found {text}")
        return value

    parse_number.__name__ = name
    return parse_number


# Types of options.
positive = _integer("positive", 1)
count = _integer("count", 0)
threads = _integer("threads", 1, 1024)
port = _integer("port", 0, 65535)
seed = _integer("seed", 0, (1 << 62) - 1)
probability = _number("probability", "more than 0 and at most 1", lambda value: 0 < value <= 1)
margin = _number("margin", "0 or more", lambda value: 0 <= value < math.inf)
above_zero = _number("above_zero", "more than 0", lambda value: 0 < value < math.inf)
share = _number("share", "0 to 1", lambda value: 0 <= value <= 1)


def shares(text: str) -> list[float]:
    """Comma-separated numbers above 0."""
    return [above_zero(part) for part in text.split(",")]


def drafted(text: str) -> int:
    """Number of tokens that one pass can verify."""
    from torch_pi2.decode.speculate import MOST_DRAFTED

    return _integer("drafted", 1, MOST_DRAFTED)(text)


def temperature(text: str) -> float:
    """0 for greedy decoding, or a number that logits can be divided by."""
    from torch_pi2.decode.sequence import LEAST_TEMPERATURE

    expected = f"0 (greedy), or {LEAST_TEMPERATURE:g} or more"
    return _number("temperature", expected, lambda t: t == 0 or LEAST_TEMPERATURE <= t < math.inf)(text)


def add_every(parser: argparse.ArgumentParser) -> None:
    """Options that every verb has."""
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    level = parser.add_mutually_exclusive_group()
    level.add_argument("-v", "--verbose", action="store_true", help="say more, and what other libraries warn of")
    level.add_argument("-q", "--quiet", action="store_true", help="results and errors alone: no warnings, no progress")
    if "--threads" not in parser._option_string_actions:
        parser.add_argument("--threads", type=threads, help="compute threads, 1 to 1024 (default: torch's)")


def add_loading(parser: argparse.ArgumentParser) -> None:
    """How a checkpoint is loaded."""
    group = parser.add_argument_group("loading")
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="of weights (default: auto, the checkpoint's)")
    group.add_argument("--trust-remote-code", action="store_true", help="run modelling code in the checkpoint folder")
    group.add_argument("--allow-download", action="store_true", help="fetch MODEL if it is not here (default: never)")


def add_budget(parser: argparse.ArgumentParser, of_each: str = "") -> None:
    """``--budget``, and its lossy options."""
    add = parser.add_argument
    add(
        "--budget",
        metavar="BYTES",
        help=f"memory for a model over a packed store, such as 2GiB{of_each} (default: all)",
    )
    add(
        "--miss-margin",
        type=margin,
        default=0.0,
        metavar="NATS",
        help="lossy, with --budget: do not read a neuron whose predictor's score is less than this above its threshold",
    )
    add(
        "--drop-experts",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="lossy, with --budget: skip an expert with less of its token's weight if it is mostly not in memory",
    )


def add_decoding(parser: argparse.ArgumentParser, of_each: str = "") -> None:
    """How a loaded model decodes."""
    add = parser.add_argument
    add("--activations", choices=("float", "int8"), default="float", help="int8: faster, lossy (default: float)")
    add_budget(parser, of_each)
    add(
        "--gpu-memory",
        metavar="BYTES",
        help=f"for weights on the GPU{of_each}: all but feed-forward layers, and the neurons that fire most; all: the "
        "whole model",
    )
    add_together(parser)
    add(
        "--compile",
        action="store_true",
        help="compile steps: a little faster, after a pause of seconds, longer the first time on a machine",
    )


def add_together(parser: argparse.ArgumentParser) -> None:
    """How processes started by ``torchrun`` compute a model in shards."""
    group = parser.add_argument_group("shards (pack --ranks N), with torchrun")
    group.add_argument(
        "--reduction",
        choices=("chunks", "ranks"),
        help="how results are added: chunks (default), with the bits of one machine; ranks sends less",
    )
    group.add_argument("--attention", help=argparse.SUPPRESS)  # GroupConfig says what became of it
    group.add_argument(
        "--timeout",
        type=above_zero,
        metavar="S",
        help="seconds after which a silent process counts as lost (default: 120)",
    )
    add_old_name(parser, "--patience", "--timeout")


def add_old_name(parser: argparse.ArgumentParser, old: str, new: str) -> None:
    """Let the option ``new`` also be given as ``old`` for one release: with a warning, and not shown in the help."""
    action = parser._option_string_actions[new]

    class OldName(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _option: Any = None) -> None:
            print(f"torch-pi2: {old} is now called {new}; the old name ends with the next release", file=sys.stderr)
            action(parser, namespace, values, new)

    how: dict[str, Any] = {name: getattr(action, name) for name in ("dest", "nargs", "type", "choices")}
    parser.add_argument(old, action=OldName, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **how)


def sampling_of(args: argparse.Namespace) -> Any:
    """The sampling of ``--temperature`` and ``--top-p``; None: greedy. Raises ConfigError."""
    from torch_pi2.decode.sequence import Sampling

    if args.temperature > 0:
        return Sampling(args.temperature, 0, 1.0 if args.top_p is None else args.top_p)
    if args.top_p is not None and args.top_p < 1:
        raise ConfigError(
            "--top-p",
            expected="a --temperature above 0",
            found=f"{args.top_p:g} where the most likely token is taken",
            fix="Pass --temperature 0.8, for instance, or leave it out.",
        )
    return None


def max_tokens(args: argparse.Namespace, model: nn.Module) -> int:
    """``--max-tokens``, or the positions of ``model``, at most :data:`MOST_TOKENS`."""
    config: Any = getattr(model, "config", None)
    positions = getattr(config, "max_position_embeddings", None) or MOST_TOKENS
    return int(args.max_tokens or min(positions, MOST_TOKENS))


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint: a folder, or a cached name")
    add_loading(parser)


def add_mapped(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--mapped",
        action="store_true",
        help="leave weights in their files, for a MODEL larger than memory; each is read when it is used",
    )


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write into")


def add_text(parser: argparse.ArgumentParser, default: str = "stdlib") -> None:
    parser.add_argument(
        "--text",
        default=default,
        metavar=f"FILE|{default}",
        help=f"UTF-8 text (default: {default}, source of Python's standard library)",
    )


def add_config(parser: argparse.ArgumentParser) -> None:
    """The fields of :class:`torch_pi2.types.config.Config`, with its defaults."""
    lossless = "lossless: exact, hot-frequency; lossy: lowrank, threshold, weights, activations"
    group = parser.add_argument_group("settings", lossless)
    add = partial(_add_setting, group)
    add("--method", choices=METHODS, help="how cold neurons are chosen")
    add("--hot-frequency", type=float, metavar="F", help="neurons that fire more often than this are always computed")
    add("--target-recall", type=float, metavar="R", help="share of firing neurons that a predictor must find")
    add("--tolerance", type=float, metavar="T", help="relative change of the loss that is accepted")
    add("--sparsity", type=float, metavar="S", help="share of neurons that the threshold method skips")
    add(
        "--score",
        choices=SCORES,
        help="what it compares: the gate, alone or times what a neuron adds to the output, or up",
    )
    add("--max-loss", type=float, metavar="L", help="skip as much as raises the loss by this, instead of --sparsity")
    add("--tokens", type=positive, dest="calibration_tokens", metavar="N", help="calibration tokens")
    add("--seed", type=seed, help="of every random choice")


def _add_setting(group: argparse._ArgumentGroup, option: str, *, help: str, **how: Any) -> None:
    """An option that is a field of Config; its help shows the default."""
    field = how.get("dest") or option.removeprefix("--").replace("-", "_")
    group.add_argument(option, help=f"{help} (default: {getattr(Config, field)})", **how)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """The fields of Config about the format of weights; only ``optimize`` has them."""
    group = parser.add_argument_group("quantised weights (lossy)")
    add = partial(_add_setting, group)
    add("--weights", choices=WEIGHTS, help="of FFNs and other large linear layers; float: as they are")
    add("--activations", choices=ACTIVATIONS, help="int8: also round the inputs of quantised layers")
    add(
        "--quantization",
        choices=QUANTIZATIONS,
        help="on --text. weighted: errors count as much as inputs are large; gptq: minutes",
    )


def config_of(args: argparse.Namespace) -> Config:
    """The Config of the given options."""
    from dataclasses import fields

    given = {f.name: getattr(args, f.name, None) for f in fields(Config)}
    return Config(**{name: value for name, value in given.items() if value is not None})


def stdlib_sample(split: str, tokenizer: Any, tokens: int) -> str:
    """About ``tokens`` tokens or more of the standard library's ``train`` or ``heldout`` files."""
    from torch_pi2.profiling.text import stdlib_text

    probe = stdlib_text(split, max_bytes=1 << 16)
    bytes_per_token = len(probe.encode()) / max(1, len(tokenizer(probe, verbose=False)["input_ids"]))
    return stdlib_text(split, max_bytes=math.ceil(1.25 * tokens * bytes_per_token))


def text_of(args: argparse.Namespace, tokenizer: Any = None, tokens: int | None = None) -> str:
    """The text that ``--text`` names: a file, or as much of ``stdlib`` or ``stdlib-heldout`` as ``tokens`` need."""
    if args.text in ("stdlib", "stdlib-heldout"):
        from torch_pi2.profiling.text import stdlib_text

        split = "train" if args.text == "stdlib" else "heldout"
        return stdlib_text(split) if tokens is None else stdlib_sample(split, tokenizer, tokens)
    return text_in(args.text, "--text")


def text_in(path: str, option: str) -> str:
    """The text of the file that ``option`` names. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        raise ConfigError(
            f"{option} {path}", expected="a UTF-8 text file", found=found, fix="Check its name and encoding."
        ) from error


def check_out(folder: Path) -> None:
    """Refuse a folder that cannot be written, before minutes of work. Raises ArtifactError."""
    parent = folder
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ArtifactError(
            f"--out {folder}",
            expected="a folder that can be written",
            found=f"{parent}: {error.strerror or error}",
            fix="Choose another folder.",
        ) from error


@contextmanager
def _loading(args: argparse.Namespace, part: str, expected: str) -> Iterator[None]:
    """Turns errors of transformers (wrong names, broken files, missing consent) into a Pi2Error."""
    try:
        from safetensors import SafetensorError
        from transformers.utils import logging
    except ImportError as error:
        raise missing_package("transformers", "hf", error) from error
    from torch_pi2.decode.budget import LESS

    logging.disable_progress_bar()
    try:
        yield
    except Pi2Error as error:
        fix = error.fix.replace("trust_remote_code=True", "--trust-remote-code")
        fix = fix.replace(LESS, " or ".join(_LESS.get(getattr(args, "verb", ""), ())) or LESS)
        if fix == error.fix:
            raise
        raise type(error)(error.what, expected=error.expected, found=error.found, fix=fix) from error
    except (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError) as error:
        message = " ".join(str(error).split())
        if not Path(args.model).exists() and not args.allow_download:
            message = "no such folder, and no model of that name that was fetched before"
        if "trust_remote_code" in message:
            fix = "Read the modelling code in that folder; if you trust it, pass --trust-remote-code."
        else:
            fix = "Check the folder's name and files; pass --allow-download to fetch a name from the Hub."
        found = message if len(message) <= 300 else message[:300] + " ..."
        raise ConfigError(f"{part} {args.model}", expected=expected, found=found, fix=fix) from error


def _arguments(args: argparse.Namespace) -> dict[str, bool]:
    from torch_pi2.store.trust import trusted

    trust = trusted(args.model, args.trust_remote_code)
    return {"trust_remote_code": trust, "local_files_only": not args.allow_download}


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The named options, as keyword arguments."""
    return {name: getattr(args, name) for name in names}


def calibration(args: argparse.Namespace) -> tuple[Config, nn.Module, Any, str]:
    """Settings, the dense model, its tokenizer, and as much text as the settings need."""
    config = config_of(args)
    model, tokenizer = load_dense(args), load_tokenizer(args)
    return config, model, tokenizer, text_of(args, tokenizer, config.calibration_tokens)


def dtype_of(args: argparse.Namespace) -> Any:
    import torch

    return "auto" if args.dtype == "auto" else getattr(torch, args.dtype)


def _check_dense(args: argparse.Namespace) -> None:
    from torch_pi2.cli.folders import kind_of

    if kind_of(Path(args.model)) in ("store", "quantised"):
        raise ArtifactError(
            f"dense model of {args.model}",
            expected="a folder with dense weights, as optimize writes it",
            found="one that only has a store or quantised neurons",
            fix="Name the checkpoint that it was made from.",
        )


def load_dense(args: argparse.Namespace) -> nn.Module:
    """The ordinary model of ``args.model``, in eval mode."""
    _check_dense(args)
    phase(f"load {args.model}")
    if getattr(args, "mapped", False):
        return _load_mapped(args)
    with _loading(args, "model", _MODEL):
        from transformers import AutoModelForCausalLM

        model: nn.Module = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype_of(args), **_arguments(args))
    return model.eval()


def _load_mapped(args: argparse.Namespace) -> nn.Module:
    import torch_pi2

    if args.dtype != "auto":
        raise ConfigError(
            "--mapped", expected="weights as they are, --dtype auto", found=f"--dtype {args.dtype}", fix="Leave it out."
        )
    scratch = None if args.out is None else args.out.parent
    if scratch is not None:
        scratch.mkdir(parents=True, exist_ok=True)
    how = given(args, "trust_remote_code")
    return torch_pi2.load_mapped(args.model, scratch=scratch, progress=not args.quiet, **how)


def load_sparse(args: argparse.Namespace) -> nn.Module:
    """The optimised model of folder ``args.model``, in eval mode."""
    import torch_pi2

    if not (Path(args.model) / "pi2").is_dir():
        raise ArtifactError(
            f"model {args.model}",
            expected="a folder written by `torch-pi2 optimize` (it has a folder pi2/)",
            found="no pi2/ in it" if Path(args.model).is_dir() else "no such folder",
            fix="Make one: torch-pi2 optimize MODEL --out DIR.",
        )
    phase(f"load {args.model}")
    with _loading(args, "model", _MODEL):
        dtype = None if args.dtype == "auto" else dtype_of(args)
        more: dict[str, Any] = {"activations": getattr(args, "activations", "float")}
        if getattr(args, "budget", None) is not None:
            more |= given(args, "budget", "context")
        together = {"reduction": "reduction", "attention": "attention", "timeout_s": "timeout"}
        group = {name: getattr(args, option, None) for name, option in together.items()}
        if group := {name: value for name, value in group.items() if value is not None}:
            more["group"] = torch_pi2.GroupConfig(**group)
        if left_out(args):
            more["offload"] = _with_left_out(args)
        if getattr(args, "gpu_memory", None) not in (None, ALL):
            more["gpu_memory"] = args.gpu_memory
        model = torch_pi2.load(args.model, trust_remote_code=args.trust_remote_code, dtype=dtype, **more)
    return coordinated(args, model)


def left_out(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :data:`LEAVE_OUT` that are set."""
    return {name: value for name in LEAVE_OUT if (value := getattr(args, name, 0.0))}


def of_store(model: nn.Module) -> dict[str, Any] | None:
    """Reads and omissions of a model over a store, for results of verbs; None: it is in memory."""
    from torch_pi2.decode.budget import stats
    from torch_pi2.rewrite.state import store_of

    store = store_of(model)
    if store is None:
        return None
    found = stats(model)
    read = {name: found[name] for name in ("wanted", "hit_rate", "wait_share", "bytes_read")}
    lossy = {name: getattr(store.config, name) for name in LEAVE_OUT}
    left = {"lossy": store.config.lossy, **lossy, **{name: found[name] for name in ("left_out", "experts_left_out")}}
    return {"budget_bytes": found["budget"].total, **read, **left, "text": str(found)}


def option_of(name: str) -> str:
    """The option that sets ``args.name``."""
    return f"--{name.replace('_', '-')}"


def _with_left_out(args: argparse.Namespace) -> OffloadConfig:
    """The folder's settings of reading with :func:`left_out`. Raises ConfigError: there is no ``--budget``."""
    from torch_pi2.checkpoint.offloaded import offload_of
    from torch_pi2.store.parts import Parts

    settings = left_out(args)
    if getattr(args, "budget", None) is None:
        raise ConfigError(
            ", ".join(f"{option_of(name)} {value:g}" for name, value in settings.items()),
            expected="--budget beside it, because it is about neurons that are not in memory",
            found="all weights in memory",
            fix="Pass --budget BYTES, or leave it out.",
        )
    with Parts(Path(args.model) / "pi2") as parts:
        return replace(offload_of(parts.plan()), **settings)


def load_any(args: argparse.Namespace, dense: bool = False) -> nn.Module:
    """The model of ``args.model``, optimised (unless ``dense``) or plain, in eval mode, on a GPU if asked for."""
    dense, wanted = dense or not (Path(args.model) / "pi2").is_dir(), getattr(args, "gpu_memory", None)
    for name, value in {"budget": getattr(args, "budget", None), **left_out(args)}.items():
        option = option_of(name)
        if getattr(args, "dense", False) and value is not None:
            raise ConfigError(
                f"{option} {value} with --dense",
                expected="one of them, because a dense model has all of its weights in memory",
                found="both",
                fix="Leave one of them out.",
            )
        if dense and value is not None:
            raise ConfigError(
                f"{option} {value}",
                expected="a model over a store, as pack writes it",
                found=f"{args.model}, whose weights are all in memory",
                fix=f"Leave {option} out, or pack it: torch-pi2 pack {args.model} STORE.",
            )
    if wanted is not None:
        _check_gpu(args, wanted, dense)
    model = load_dense(args) if dense else load_sparse(args)
    if wanted == ALL:
        import torch

        from torch_pi2.rewrite.gpu import move_whole

        move_whole(model, torch.device("cuda"))
    return model


def _check_gpu(args: argparse.Namespace, wanted: str, dense: bool) -> None:
    """Check ``--gpu-memory`` before a model is loaded, which takes long."""
    import torch

    from torch_pi2.layers.gpu import check_gpu
    from torch_pi2.rewrite.gpu import checked_memory

    over_store = getattr(args, "budget", None) is not None
    if wanted == ALL and over_store:
        raise ConfigError(
            f"--gpu-memory {ALL}",
            expected="a size, such as 6GiB, beside --budget, because a store is not loaded as a whole",
            found=f"{ALL} and --budget {args.budget}",
            fix="Pass a size, or leave --budget out.",
        )
    if wanted != ALL and args.compile:
        raise ConfigError(
            f"--gpu-memory {wanted} with --compile",
            expected=f"one of them, or --gpu-memory {ALL}, because work on two devices is not compiled",
            found="both",
            fix="Leave --compile out.",
        )
    if wanted == ALL:
        check_gpu(torch.device("cuda"))
    elif dense:
        raise ConfigError(
            f"--gpu-memory {wanted}",
            expected=f"{ALL} for a model that is not optimised, because its hot neurons are not known",
            found=args.model,
            fix=f"Pass --gpu-memory {ALL}, or optimise it first: torch-pi2 optimize {args.model} --out DIR.",
        )
    else:
        checked_memory(wanted)


def load_tokenizer(args: argparse.Namespace) -> Any:
    from torch_pi2.store.trust import has_tokenizer

    folder, expected = Path(args.model), "files of a Hugging Face tokenizer"
    if folder.is_dir() and not has_tokenizer(folder):
        raise ConfigError(
            f"tokenizer of {folder}",
            expected=expected,
            found="none",
            fix="Copy those of its model there. Of a GGUF file torch-pi2 import says why there is none.",
        )
    settings = folder / "tokenizer_config.json"
    if settings.is_file():
        parse(read_bytes(settings), settings, unique=False)  # transformers says less of a damaged one
    with _loading(args, "tokenizer of", expected):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(args.model, **_arguments(args))


def load_stats(folder: Path) -> ActivationStats:
    from torch_pi2.store.parts import Parts
    from torch_pi2.types.stats import ActivationStats

    if folder.is_dir():
        with Parts(folder) as parts:
            stats = parts.stats()
        if stats is not None:
            return stats
    return ActivationStats.load(folder)


def load_predictors(folder: Path | None, model_hash: str | None = None) -> FittedPredictors | None:
    """Predictors of ``folder``, which must have been fitted to the weights with ``model_hash``."""
    from torch_pi2.predict.file import load_predictors
    from torch_pi2.store.parts import Parts

    if folder is not None and folder.is_dir():
        with Parts(folder) as parts:
            if parts.has("predictors"):
                return parts.predictors(model_hash)
    return None if folder is None else load_predictors(folder, model_hash=model_hash)
