"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.formats import ACTIVATIONS


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A comma-separated list, for argparse."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"comma-separated list of {kind.__name__}"
    return parse


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
    parser.add_argument("--tokens", type=common.positive, default=1, metavar="T")
    parser.add_argument("--rounds", type=common.positive, default=15, metavar="N")
    parser.add_argument("--seed", type=common.seed, default=0)


def add_source(parser: argparse.ArgumentParser, folder: str, shape: str) -> None:
    """``--folder`` or ``--shape``; ``folder``: what it holds. ``shape``: which is taken where neither is given."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--folder", type=Path, metavar="DIR", help=folder)
    source.add_argument("--shape", help=f"synthetic, made in work/bench if it is not there (default: {shape})")


def add_planning(parser: argparse.ArgumentParser) -> None:
    """Of a model that is planned and loaded in several forms."""
    add = parser.add_argument
    add("--activations", choices=ACTIVATIONS, help="int8 is lossy (default: int8 if the weights are quantised)")
    add(
        "--hardware",
        default="measured",
        metavar="NAME",
        help="profile to plan for: measured (torch-pi2 doctor --measure), a preset or a file",
    )
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add("--seed", type=common.seed, default=0)


def add_activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--activations", default="float", choices=ACTIVATIONS, help="int8 is lossy")
