"""Attention of new tokens over a static cache: our operator, torch's SDPA, and a plain read of what is used.

Medians of alternating rounds in one process; every call takes the next of several caches, so that none is in the CPU's.
torch reads the whole cache, whatever its mask says. Numbers are random: speed only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import list_of
from benchmarks.figures import at_least, known, spread, timed
from torch_pi2.base.dtypes import DTYPES
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.machine import process as machine
from torch_pi2.ops import load

#: Bytes over which caches are spread.
_BYTES = 1 << 28
#: Positions that a plain read takes at once.
_READ = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--heads", type=common.positive, default=32, metavar="N", help="of queries")
    add("--key-heads", type=common.positive, default=8, metavar="K", help="that groups of them share")
    add("--width", type=common.positive, default=128, metavar="D", help="of a head")
    add("--used", type=list_of(int), default=[512, 4000, 16000], metavar="TOKENS", help="lengths, comma-separated")
    add(
        "--room", type=list_of(int), default=[640, 4096, 16384], metavar="TOKENS", help="of the cache, for each of them"
    )
    add("--tokens", type=common.positive, default=1, metavar="T", help="new ones, at the end of what is used")
    add("--batch", type=common.positive, default=1, metavar="B")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--rounds", type=common.positive, default=15, metavar="N")


def run(
    heads: int = 32,
    key_heads: int = 8,
    width: int = 128,
    used: Sequence[int] = (512, 4000, 16000),
    room: Sequence[int] = (640, 4096, 16384),
    *,
    tokens: int = 1,
    batch: int = 1,
    dtype: str = "bfloat16",
    rounds: int = 15,
    memory_size: int = _BYTES,
) -> dict[str, Any]:
    """Time one attention on torch's current number of threads.

    Args: the options of the same names; ``room`` are multiples of 64.

    Returns:
        ``lengths``: for each length ``us``, ``torch_us``, ``read_us``; ``gb_per_s`` of keys and values that are used,
        and as ratios ``of_read`` (of its speed) and ``over_torch`` (times); and the spread of ``us``.

    Raises:
        ConfigError: a setting makes no sense.
    """
    known("dtype", [dtype], DTYPES)
    at_least(1, heads=heads, key_heads=key_heads, width=width, tokens=tokens, batch=batch, rounds=rounds)
    if heads % key_heads:
        raise ConfigError(
            "heads", expected=f"a multiple of {key_heads}", found=str(heads), fix="Choose another number."
        )
    fits = all(tokens <= count <= most and most % _READ == 0 for count, most in zip(used, room, strict=False))
    if len(used) != len(room) or not fits:
        raise ConfigError(
            "used, room",
            expected=f"lengths of {tokens} and more, and for each a room that holds it, a multiple of {_READ}",
            found=f"{list(used)}, {list(room)}",
            fix="Choose other lengths.",
        )
    load()
    lengths = []
    for count, most in zip(used, room, strict=True):
        shape = (batch, key_heads, most, width)
        cases = _cases(shape, heads, count, tokens, DTYPES[dtype], memory_size)
        samples = timed(cases, rounds)
        us = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
        kv_bytes = 2 * batch * key_heads * count * width * DTYPES[dtype].itemsize
        lengths.append(
            {
                "used": count,
                "room": most,
                **{name: round(value, 1) for name, value in us.items()},
                "gb_per_s": round(kv_bytes / us["us"] / 1e3, 2),
                "of_read": round(us["read_us"] / us["us"], 3),
                "over_torch": round(us["torch_us"] / us["us"], 2),
                "spread_us": spread([ms * 1e3 for ms in samples["us"]], 1),
            }
        )
    return {
        "what": "attention",
        "heads": heads,
        "key_heads": key_heads,
        "width": width,
        "tokens": tokens,
        "batch": batch,
        "dtype": dtype,
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "lengths": lengths,
        "synthetic": "random queries, keys and values",
        **machine.describe(),
    }


def _cases(
    shape: tuple[int, int, int, int], heads: int, used: int, tokens: int, dtype: torch.dtype, memory_size: int
) -> dict[str, Callable[[int], object]]:
    batch, key_heads, room, width = shape
    numbers = batch * key_heads * room * width
    caches = cycle(
        [
            (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
            for _ in range(max(2, memory_size // (2 * numbers * dtype.itemsize)))
        ]
    )
    query, scale = torch.randn(batch, heads, tokens, width).to(dtype), width**-0.5
    mask = torch.arange(room) <= torch.arange(used - tokens, used)[None, None, :, None]
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    blocks = torch.arange(-(-used // _READ))
    index = (torch.arange(batch * key_heads)[:, None] * (room // _READ) + blocks).flatten()
    # one token: the heads of a group as positions of one head, which copies nothing
    packed = query.reshape(batch, key_heads, -1, width) if tokens == 1 else query

    def torchs(_: int) -> object:
        key, value = next(caches)
        return F.scaled_dot_product_attention(packed, key, value, added, scale=scale, enable_gqa=tokens > 1)

    def read(_: int) -> None:
        for tensor in next(caches):
            torch.ops.pi2.plain_read(tensor.view(-1, 1, _READ * width), index)

    return {
        "us": lambda _: torch.ops.pi2.attention(query, *next(caches), mask, scale),
        "torch_us": torchs,
        "read_us": read,
    }


def render(result: dict[str, Any]) -> str:
    header = ("used", "room", "us", "torch us", "read us", "GB/s", "of read", "times torch's speed")
    rows = [
        (
            str(length["used"]),
            str(length["room"]),
            f"{length['us']:.0f}",
            f"{length['torch_us']:.0f}",
            f"{length['read_us']:.0f}",
            f"{length['gb_per_s']:.1f}",
            common.percent(length["of_read"]),
            f"{length['over_torch']:.2f}",
        )
        for length in result["lengths"]
    ]
    return (
        f"attention {result['heads']} heads of {result['width']} over {result['key_heads']}, {result['dtype']}, "
        f"{result['tokens']} token(s) of {result['batch']} sequence(s), {result['threads']} threads, "
        f"{result['machine']['kernels']} kernels\n{common.table(header, rows)}\n({result['synthetic']})"
    )
