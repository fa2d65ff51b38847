"""Arguments that several benchmarks take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch_pi2.cli import common


def list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """A comma-separated list, for argparse."""

    def parse(text: str) -> list[Any]:
        return [kind(part) for part in text.split(",")]

    parse.__name__ = f"comma-separated list of {kind.__name__}"
    return parse


def add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hidden", type=common.positive, default=4096, metavar="H")
    parser.add_argument("--intermediate", type=common.positive, default=14336, metavar="I", help="neurons")
    parser.add_argument("--tokens", type=common.positive, default=1, metavar="T")
    parser.add_argument("--rounds", type=common.positive, default=15, metavar="N")
    parser.add_argument("--seed", type=common.seed, default=0)


def add_activations(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--activations", default="float", choices=["float", "int8"], help="int8 is lossy")
