"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.formats import ACTIVATIONS

#: The trained model of this repository.
TRAINED = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A comma-separated list, for argparse."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"comma-separated list of {kind.__name__}"
    return parse


def names_of(allowed: Collection[str]) -> Callable[[str], list[str]]:
    """A comma-separated list of some of ``allowed``, each once, for argparse."""

    def parse(text: str) -> list[str]:
        found = list(dict.fromkeys(text.split(",")))
        for name in found:
            if name not in allowed:
                raise argparse.ArgumentTypeError(f"expected {', '.join(allowed)}, found {name}")
        return found

    return parse


def from_to(text: str) -> list[int]:
    """The least and the most, such as 32,256, for argparse."""
    ends = [common.positive(part) for part in text.split(",")]
    if len(ends) != 2 or ends[0] > ends[1]:
        raise argparse.ArgumentTypeError(f"expected the least and the most, such as 32,256, found {text}")
    return ends


def add_lengths(parser: argparse.ArgumentParser, prompt: int, tokens: int, rounds: int) -> None:
    """Tokens of prompt and answer, rounds and seed, with these defaults (prompt 0: no such option)."""
    add = parser.add_argument
    if prompt:
        add("--prompt", type=common.positive, default=prompt, metavar="T", help="tokens of the prompt")
    add("--tokens", type=common.positive, default=tokens, metavar="N", help="tokens of the answer")
    add("--rounds", type=common.positive, default=rounds, metavar="N", help="alternating rounds")
    add_seed(parser)


def add_seed(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=common.seed, default=0)


def add_folder(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="DIR",
        help="model folder (default: work/bench/llama-1b-int4-0.1, made if needed)",
    )


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=common.positive, default=4096, metavar="H")
    parser.add_argument("--intermediate", type=common.positive, default=14336, metavar="I", help="neurons")
    add_lengths(parser, 0, 1, 15)


def add_source(parser: argparse.ArgumentParser, folder: str, shape: str) -> None:
    """``--folder`` or ``--shape``. ``folder``: its help. ``shape``: the default where neither is given."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, metavar="DIR", help=folder)
    source.add_argument("--shape", help=f"synthetic, made in work/bench if it is not there (default: {shape})")


def add_activations(parser: argparse.ArgumentParser, default: str = "float") -> None:
    parser.add_argument("--activations", default=default, choices=ACTIVATIONS, help="int8 is lossy")


def add_peers(parser: argparse.ArgumentParser, names: Collection[str], help_line: str) -> None:
    parser.add_argument("--peer", dest="peers", action="append", default=[], choices=names, help=help_line)
