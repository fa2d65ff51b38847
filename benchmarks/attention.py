"""Attention of new tokens over a static cache: our operator, torch's SDPA, and a plain read of what is used.

Medians of alternating rounds in one process; every call takes the next of several caches, so that none is in the CPU's.
torch reads the whole cache, whatever its mask says. Numbers are random: speed only.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.arguments import list_of
from benchmarks.figures import spread, timed
from benchmarks.tables import Result, Table, at
from torch_pi2.base.dtypes import DTYPES
from torch_pi2.cli import common
from torch_pi2.errors import ConfigError
from torch_pi2.ops import load

#: Bytes over which caches are spread.
_BYTES = 1 << 28
#: Positions that a plain read takes at once.
_READ = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add, lengths = parser.add_argument, list_of(common.positive)
    add("--heads", type=common.positive, default=32, metavar="N", help="of queries")
    add("--key-heads", type=common.positive, default=8, metavar="K", help="that groups of query heads share")
    add("--width", type=common.positive, default=128, metavar="D", help="of a head")
    add("--used", type=lengths, default=[512, 4000, 16000], metavar="TOKENS", help="lengths, comma-separated")
    add("--room", type=lengths, default=[640, 4096, 16384], metavar="TOKENS", help="of the cache, for each length")
    add("--tokens", type=common.positive, default=1, metavar="T", help="new ones, at the end of what is used")
    add("--batch", type=common.positive, default=1, metavar="B")
    add("--dtype", default="bfloat16", choices=DTYPES)
    add("--rounds", type=common.positive, default=15, metavar="N")
    parser.set_defaults(memory_size=_BYTES)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Time one attention on torch's current number of threads; ``room`` are multiples of 64.

    Returns:
        ``lengths``: for each length ``us``, ``torch_us``, ``read_us``; ``gb_per_s`` of keys and values that are used,
        ``of_read`` (share of that read's speed) and ``over_torch`` (times as fast); and the spread of ``us``.

    Raises:
        ConfigError: heads or lengths that do not fit together.
    """
    fits = all(args.tokens <= n <= most and most % _READ == 0 for n, most in zip(args.used, args.room, strict=False))
    if len(args.used) != len(args.room) or not fits or args.heads % args.key_heads:
        raise ConfigError(
            "used, room, heads",
            expected=f"lengths of {args.tokens} and more, for each a larger room (a multiple of {_READ}), and heads in "
            f"groups of {args.key_heads}",
            found=f"{args.used}, {args.room}, {args.heads}",
            fix="Choose other values.",
        )
    load()
    dtype, lengths = DTYPES[args.dtype], []
    for used, room in zip(args.used, args.room, strict=True):
        shape = (args.batch, args.key_heads, room, args.width)
        samples = timed(_cases(shape, args.heads, used, args.tokens, dtype, args.memory_size), args.rounds)
        us = {name: statistics.median(values) * 1e3 for name, values in samples.items()}
        kv_bytes = 2 * args.batch * args.key_heads * used * args.width * dtype.itemsize
        lengths.append(
            {
                "used": used,
                "room": room,
                **{name: round(value, 1) for name, value in us.items()},
                "gb_per_s": round(kv_bytes / us["us"] / 1e3, 2),
                "of_read": round(us["read_us"] / us["us"], 3),
                "over_torch": round(us["torch_us"] / us["us"], 2),
                "spread_us": spread([ms * 1e3 for ms in samples["us"]], 1),
            }
        )
    return {"lengths": lengths, "synthetic": "random queries, keys and values"}


def _cases(
    shape: tuple[int, int, int, int], heads: int, used: int, tokens: int, dtype: torch.dtype, memory_size: int
) -> dict[str, Callable[[int], object]]:
    batch, key_heads, room, width = shape
    one_bytes = 2 * batch * key_heads * room * width * dtype.itemsize
    count = max(2, memory_size // one_bytes)
    caches = cycle([(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(count)])
    query, scale = torch.randn(batch, heads, tokens, width).to(dtype), width**-0.5
    mask = torch.arange(room) <= torch.arange(used - tokens, used)[None, None, :, None]
    added = torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
    blocks = torch.arange(-(-used // _READ))
    index = (torch.arange(batch * key_heads)[:, None] * (room // _READ) + blocks).flatten()
    # one token: the heads of a group as positions of one head, which copies nothing
    packed = query.reshape(batch, key_heads, -1, width) if tokens == 1 else query

    def sdpa(_: int) -> object:
        key, value = next(caches)
        return F.scaled_dot_product_attention(packed, key, value, added, scale=scale, enable_gqa=tokens > 1)

    def read(_: int) -> None:
        for tensor in next(caches):
            torch.ops.pi2.plain_read(tensor.view(-1, 1, _READ * width), index)

    return {
        "us": lambda _: torch.ops.pi2.attention(query, *next(caches), mask, scale),
        "torch_us": sdpa,
        "read_us": read,
    }


TABLES = (
    Table(
        "Attention",
        lambda result: result["lengths"],
        {
            "used": at("used"),
            "room": at("room"),
            "us": at("us", ".0f"),
            "torch us": at("torch_us", ".0f"),
            "read us": at("read_us", ".0f"),
            "GB/s": at("gb_per_s", ".1f"),
            "of read": at("of_read", common.percent),
            "times torch's speed": at("over_torch", ".2f"),
        },
        "Torch's SDPA reads the whole room. *Read* is a plain read of the keys and values that are used.",
    ),
)


def about(result: Result) -> str:
    return (
        f"attention {result['heads']} heads of {result['width']} over {result['key_heads']}, {result['dtype']}, "
        f"{result['tokens']} token(s) of {result['batch']} sequence(s), {result['threads']} threads"
    )
