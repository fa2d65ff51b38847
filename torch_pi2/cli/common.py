"""Shared by several verbs: the parser, types and groups of options, calibration text, and errors about options."""

import argparse
import math
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch_pi2.base.fields import shown
from torch_pi2.base.units import percent as percent
from torch_pi2.base.units import size as size
from torch_pi2.cli.terminal import records as records
from torch_pi2.cli.terminal import table as table
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS, FLOATS, KV
from torch_pi2.types.config import METHODS, QUANTIZATIONS, SCORES, WEIGHTS, Config

#: Default of ``--max-tokens`` for a model with at least as many positions.
MOST_TOKENS = 4096
#: Lossy fields of OffloadConfig, which leave out neurons or experts that are not in memory.
LEAVE_OUT = ("miss_margin", "drop_experts")


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line as a Pi2Error, so that ``--json`` covers it too."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        fix = f"See `{self.prog} --help`."
        raise ConfigError("command line", expected="valid arguments", found=message, fix=fix)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """An unknown option shows the usage of its verb; argparse would show the main parser's."""
        found, unknown = super().parse_known_args(args, namespace)
        if self.get_default("late") and found.prompt is None:
            if len(unknown) != 1 or unknown[0].startswith("-"):
                self.error("the following arguments are required: PROMPT")
            found.prompt = unknown.pop()  # after options, where argparse no longer expects it
        if unknown and self._subparsers is None:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


class Help(argparse.RawDescriptionHelpFormatter):
    """Shows the default of every option that has one, unless its help text already does."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Wrap long lines; keep short ones and indented examples as they are."""
        lines: list[str] = []
        for line in text.splitlines():
            lines += [line] if len(line) <= width or line.startswith(" ") else textwrap.wrap(line, width)
        return "\n".join(lines)

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return str(getattr(action.type, "metavar", "N" if action.type in (int, float) else action.dest.upper()))

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help, action.default
        if text is None or not action.option_strings or has_no_default(default) or re.search(r"\bdefault\b", text):
            return text
        words = ",".join(map(str, default)) if isinstance(default, tuple | list) else str(default)
        return f"{text} (default: {words.replace('%', '%%')})"


def has_no_default(default: Any) -> bool:
    """Whether there is no default to show: a flag, None or an empty list."""
    return default is None or default is False or default is argparse.SUPPRESS or default == []


def _integer(name: str, least: int, most: int = 1 << 31) -> Callable[[str], int]:
    """An argparse type of ASCII digits; int() would also take ``1_0`` and digits of other scripts."""

    def parse_integer(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text):
            raise ValueError(text)
        value = int(text)
        if not least <= value <= most:
            expected = f"{least} or more" if value < least else f"at most {most}"
            raise argparse.ArgumentTypeError(f"expected {expected}, found {shown(value)}")
        return value

    return named(name, parse_integer, "N")


def named(name: str, kind: Callable[[str], Any], metavar: str) -> Callable[[str], Any]:
    """``kind`` with the name that argparse shows in errors (``invalid NAME value``), and its metavar."""
    kind.__name__, kind.metavar = name, metavar  # type: ignore[attr-defined]
    return kind


def _seconds(text: str) -> float:
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"expected more than 0, found {shown(text)}")
    return value


def list_of(kind: Callable[[str], Any], name: str) -> Callable[[str], Any]:
    def parse_list(text: str) -> tuple[Any, ...]:
        return tuple(kind(part) for part in text.split(","))

    return named(f"comma-separated list of {name}", parse_list, "N,...")


positive = _integer("positive", 1)
#: decode.speculate.MOST_DRAFTED, whose module needs torch.
MOST_DRAFTED = 7
drafted = _integer("count", 0, MOST_DRAFTED)
count = _integer("count", 0)
threads = _integer("threads", 1, 1024)
port = _integer("port", 0, 65535)
seed = _integer("seed", 0, (1 << 62) - 1)
sizes = list_of(positive, "sizes")
shares = list_of(float, "shares")


def add_every(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object on standard output")
    imported = "run a Python file first, such as one that registers methods; may be repeated"
    parser.add_argument("--import", dest="imported", action="append", default=[], metavar="FILE.py", help=imported)
    level = parser.add_mutually_exclusive_group()
    level.add_argument("-v", "--verbose", action="store_true", help="more messages, with warnings of other libraries")
    level.add_argument("-q", "--quiet", action="store_true", help="results and errors only: no warnings, no progress")
    if "--threads" not in parser._option_string_actions:
        parser.add_argument("--threads", type=threads, help="compute threads, 1 to 1024 (default: torch's)")


RUNNABLE = "GGUF file, folder written by import, optimize, quantize or pack, or plain checkpoint"


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="Hugging Face checkpoint: a folder, or a cached name")
    add_loading(parser)


def add_loading(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loading")
    dtype = "of weights (default: auto, the checkpoint's)"
    group.add_argument("--dtype", choices=("auto", *FLOATS), default="auto", help=dtype)
    add_trust(group)
    group.add_argument("--allow-download", action="store_true", help="download MODEL if not cached (default: never)")


def add_trust(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument("--trust-remote-code", action="store_true", help="run modelling code in the checkpoint folder")


def add_mapped(parser: argparse.ArgumentParser) -> None:
    mapped = "leave weights in their files, for a MODEL larger than memory; each is read when it is used"
    parser.add_argument("--mapped", action="store_true", help=mapped)


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder to write into")


def add_text(parser: argparse.ArgumentParser | argparse._ArgumentGroup, default: str = "stdlib") -> None:
    text = f"UTF-8 text (default: {default}, source of Python's standard library)"
    parser.add_argument("--text", default=default, metavar=f"FILE|{default}", help=text)


def add_budget(parser: argparse.ArgumentParser, of_each: str = "") -> None:
    add = parser.add_argument
    budget = f"memory for a model over a packed store, such as 2GiB{of_each} (default: all)"
    add("--budget", metavar="BYTES", help=budget)
    missed = "lossy, with --budget: do not read a neuron whose predictor's score is less than this above its threshold"
    add("--miss-margin", type=float, default=0.0, metavar="NATS", help=missed)
    dropped = "lossy, with --budget: skip an expert with less of its token's weight if it is mostly not in memory"
    add("--drop-experts", type=float, default=0.0, metavar="SHARE", help=dropped)


def add_decoding(parser: argparse.ArgumentParser, of_each: str = "") -> None:
    add = parser.add_argument
    rounded = "int8: round the inputs of quantised layers: faster, lossy (default for imports of GGUF)"
    add("--activations", choices=ACTIVATIONS, help=rounded)
    add_budget(parser, of_each)
    gpu = f"for weights on the GPU{of_each}: all but feed-forward layers, and the neurons that fire most; or all"
    add("--gpu-memory", metavar="BYTES", help=gpu)
    add_together(parser)
    compiled = "compile steps: a little faster, after a pause of seconds, longer the first time on a machine"
    add("--compile", action="store_true", help=compiled)
    kept = "lossy: keep keys and values in 8 or 4 bits (default: the model's dtype)"
    add("--kv", choices=KV, help=kept)


def add_drafting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("speculative decoding (the same text; docs/SPECULATION.md)")
    model = f"a smaller model of the same vocabulary, which drafts next tokens: {RUNNABLE}"
    group.add_argument("--draft-model", metavar="MODEL", help=model)
    most = f"tokens drafted at a time, 1 to {MOST_DRAFTED} (default: 3)"
    group.add_argument("--draft-tokens", type=_integer("count", 1, MOST_DRAFTED), metavar="K", help=most)
    lookup = f"draft up to K tokens (1 to {MOST_DRAFTED}) from what followed the last ones earlier; 0: none"
    lookup += " (default: 2, with int8 activations and all weights in memory)"
    group.add_argument("--prompt-lookup", type=drafted, metavar="K", help=lookup)


def add_together(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shards (pack --ranks N), with torchrun")
    how = "how results are added: chunks (default), with the bits of one machine; ranks sends less"
    group.add_argument("--reduction", choices=("chunks", "ranks"), help=how)
    lost = "seconds after which a silent process counts as lost (default: 120)"
    group.add_argument("--timeout", type=_seconds, metavar="S", help=lost)


def add_sampling(parser: argparse.ArgumentParser, tokens: int) -> None:
    add = parser.add_argument
    add("-n", "--max-new-tokens", type=positive, default=tokens, help="tokens of an answer, at most")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    top_p = "sample among the likeliest tokens with this probability in sum (default: 1; for bundles, the model's)"
    add("--top-p", type=float, metavar="P", help=top_p)
    add("--seed", type=seed, default=0, help="seed of sampling; each further answer adds 1")


def add_config(parser: argparse.ArgumentParser) -> None:
    """The fields of :class:`torch_pi2.types.config.Config`, with its defaults."""
    lossless = "lossless: exact, hot-frequency; lossy: lowrank, threshold, weights, activations"
    add = partial(_add_setting, parser.add_argument_group("settings", lossless))
    known = f"{', '.join(METHODS)}, a registered one or FILE.py:CLASS (docs/RESEARCH.md)"
    add("--method", metavar="NAME", help=f"how cold neurons are chosen: {known}")
    add("--hot-frequency", type=float, metavar="F", help="neurons that fire more often than this are always computed")
    add("--target-recall", type=float, metavar="R", help="share of firing neurons that a predictor has to find")
    add("--tolerance", type=float, metavar="T", help="accepted relative change of the loss")
    add("--sparsity", type=float, metavar="S", help="share of neurons that the threshold method skips")
    add("--score", choices=SCORES, help="score to compare: the gate, alone or times its neuron's output, or up")
    add("--max-loss", type=float, metavar="L", help="skip until the loss rises by this share, instead of --sparsity")
    add("--tokens", type=positive, dest="calibration_tokens", help="calibration tokens")
    add("--seed", type=seed, help="seed of all random choices")


def _add_setting(group: argparse._ArgumentGroup, option: str, *, help: str, **how: Any) -> None:
    field = how.get("dest") or option.removeprefix("--").replace("-", "_")
    group.add_argument(option, help=f"{help} (default: {getattr(Config, field)})", **how)


def add_storage(parser: argparse.ArgumentParser) -> None:
    """The fields of Config about the format of weights; only ``optimize`` has them."""
    add = partial(_add_setting, parser.add_argument_group("quantised weights (lossy)"))
    add("--weights", choices=WEIGHTS, help="format of FFNs and other large linear layers; float: unchanged")
    add("--activations", choices=ACTIVATIONS, help="int8: also round the inputs of quantised layers")
    how = "rtn: to nearest; gptq: calibrated on --text, in minutes"
    add("--quantization", choices=QUANTIZATIONS, help=how)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """The values of the named options, as keyword arguments."""
    return {name: getattr(args, name) for name in names}


def option_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def drafts_of(drafts: dict[str, Any]) -> str:
    """What became of drafts, those of :class:`torch_pi2.decode.speculate.Drafts`."""
    return "{accepted} of {drafted} drafted tokens accepted".format_map(drafts)


def needs(option: str, other: str, found: str = "none") -> ConfigError:
    """The error for ``option`` without ``other``."""
    fix = f"Pass {other}, or leave {option} out."
    return ConfigError(option, expected=f"{other} beside it", found=found, fix=fix)


def excludes(option: str, other: str, why: str) -> ConfigError:
    """The error for ``option`` beside ``other``."""
    expected = f"one of them, because {why}"
    return ConfigError(f"{option} with {other}", expected=expected, found="both", fix="Leave one of them out.")


def left_out(args: argparse.Namespace) -> dict[str, Any]:
    """The options of :data:`LEAVE_OUT` that are set."""
    return {name: value for name in LEAVE_OUT if (value := getattr(args, name, 0.0))}


def sampling_of(args: argparse.Namespace) -> Any:
    """The ``Sampling`` of ``--temperature`` and ``--top-p``; None: greedy. Raises ConfigError."""
    from torch_pi2.decode.sequence import Sampling

    if args.temperature != 0:
        return Sampling(args.temperature, 0, 1.0 if args.top_p is None else args.top_p)
    if args.top_p is not None and args.top_p != 1:
        Sampling(top_p=args.top_p)  # which may be wrong in itself
        raise needs(f"--top-p {args.top_p:g}", "a --temperature above 0", "the most likely token each time")
    return None


def max_tokens(args: argparse.Namespace, model: Any) -> int:
    """``--max-tokens``; by default the positions of ``model``, at most :data:`MOST_TOKENS`."""
    from torch_pi2.decode.chunked_prefill import most_positions

    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None) or MOST_TOKENS
    return int(args.max_tokens or min(positions, MOST_TOKENS, most_positions(model)))


def config_of(args: argparse.Namespace) -> Config:
    values = {f.name: getattr(args, f.name, None) for f in fields(Config)}
    return Config(**{name: value for name, value in values.items() if value is not None})


def stdlib_sample(split: str, tokenizer: Any, tokens: int) -> str:
    """At least about ``tokens`` tokens of the standard library's ``train`` or ``heldout`` files."""
    from torch_pi2.profiling.text import stdlib_text

    probe = stdlib_text(split, max_bytes=1 << 16)
    bytes_per_token = len(probe.encode()) / max(1, len(tokenizer(probe, verbose=False)["input_ids"]))
    return stdlib_text(split, max_bytes=math.ceil(1.25 * tokens * bytes_per_token))


def text_of(args: argparse.Namespace, tokenizer: Any, tokens: int) -> str:
    """The file that ``--text`` names, or about ``tokens`` tokens of ``stdlib`` or ``stdlib-heldout``."""
    if args.text in ("stdlib", "stdlib-heldout"):
        return stdlib_sample("train" if args.text == "stdlib" else "heldout", tokenizer, tokens)
    return text_in(args.text, "--text")


def text_in(path: str, option: str) -> str:
    """The UTF-8 text of file ``path``, which ``option`` named. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or "bytes that are not UTF-8"
        fix = "Check its name and encoding."
        raise ConfigError(f"{option} {path}", expected="a UTF-8 text file", found=found, fix=fix) from error


def check_out(folder: Path) -> None:
    """Raise ArtifactError for a folder that cannot be written, before minutes of work."""
    from torch_pi2.base.files import check_writable

    check_writable(folder, folder=True)
