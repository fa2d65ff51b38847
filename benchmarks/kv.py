"""Keys and values in 8 and 4 bits on real GGUF files (`make real-models`): loss, bytes, and the time of attention."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

import torch_pi2
from benchmarks.arguments import names_of
from benchmarks.attention import attention_ms
from benchmarks.real import MODELS, texts, windows_of
from benchmarks.real_models import path
from benchmarks.tables import Result, Table, at
from torch_pi2.checkpoint.gguf.importing import cached_import
from torch_pi2.cli import common
from torch_pi2.decode.attention import packed_attention
from torch_pi2.decode.decoder import Decoder
from torch_pi2.formats import ACTIVATIONS
from torch_pi2.ops.attention import KV_DTYPES

#: Tokens that are computed together.
PIECE = 512
KINDS = (None, *KV_DTYPES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--models", type=names_of(MODELS), default=MODELS[:1], metavar="NAME,...", help=", ".join(MODELS))
    add("--loss", type=common.count, default=8192, metavar="N", help="scored tokens of each of two texts; 0: none")
    add("--activations", choices=ACTIVATIONS, default="int8", help="float: ten times as slow, with less noise")
    add("--context", type=common.positive, default=4096, metavar="T", help="tokens of a window, and before timed steps")
    add("--rounds", type=common.count, default=7, metavar="N", help="timed rounds, in alternation; 0: none")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """``losses``: rows of a model, a text and a format; ``more`` is relative, ``error`` its standard error over tokens.
    ``speed``: rows of a model, a dtype and a format.
    """
    rows: dict[str, list[dict[str, Any]]] = {"losses": [], "speed": []}
    for name in args.models:
        model = torch_pi2.load(path(name), activations=args.activations)
        if args.loss:
            rows["losses"] += _losses(name, model, args.loss, args.context)
        if args.rounds:
            rows["speed"] += _speeds(name, args.context, args.rounds)
    return {"synthetic": False, **rows}


def _losses(name: str, model: Any, tokens: int, window: int) -> Iterator[dict[str, Any]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(cached_import(path(name), packed=False) / "tokenizer.json"))
    decoders = {kv: Decoder(model, max_tokens=window, kv=kv) for kv in KINDS}
    for title, text in texts().items():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows = windows_of(ids, tokenizer.encode("").ids, tokens, window)
        plain = torch.cat([loss_of(decoders[None], ids) for ids in windows])
        for kv, decoder in decoders.items():
            found = plain if kv is None else torch.cat([loss_of(decoder, ids) for ids in windows])
            more, base = found - plain, float(plain.mean())
            row = {"model": name, "text": title, "kv": kv or "float32", "tokens": len(found)}
            error = float(more.std()) / len(more) ** 0.5 / base
            yield {**row, "loss": float(found.mean()), "more": float(more.mean()) / base, "error": error}


@torch.inference_mode()
def loss_of(decoder: Decoder, window: Sequence[int]) -> torch.Tensor:
    """Nats of each token of ``window`` but the first, with the keys and values that ``decoder`` would keep."""
    decoder._measure_keys()
    cache, found = decoder._kv.reading(0, 1, len(window)), []
    for ids_T, next_T in zip(*(torch.tensor(part).split(PIECE) for part in (window[:-1], window[1:])), strict=True):
        with packed_attention(decoder.model):
            logits = decoder.model(input_ids=ids_T[None], use_cache=True, **{decoder._cache_name: cache}).logits[0]
        found.append(cross_entropy(logits.float(), next_T, reduction="none"))
    return torch.cat(found)


def _speeds(name: str, context: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Attention of a step after ``context`` tokens, in bfloat16."""
    model = torch_pi2.load(path(name), dtype=torch.bfloat16)
    ids_BT = 1 + torch.arange(context).remainder(100)[None]
    decoders = {kv: Decoder(model, max_tokens=context + 8, kv=kv) for kv in KINDS}
    next_B1 = {kv: decoder.prompt(ids_BT) for kv, decoder in decoders.items()}
    swept = torch.empty(64 << 20, dtype=torch.uint8)  # the weights of a step, which come between two layers' caches
    ms: dict[str | None, list[float]] = {kv: [] for kv in KINDS}
    for _, (kv, decoder) in itertools.product(range(rounds), decoders.items()):
        ms[kv].append(attention_ms(model, decoder, next_B1[kv], lambda: swept.fill_(1)))
    for kv, decoder in decoders.items():
        size = sum(t.nbytes for memory in decoder._kv._memory for t in memory.tensors()) / decoder.max_tokens
        faster = [before / after for before, after in zip(ms[None], ms[kv], strict=True)]
        row = {"model": name, "kv": kv or "bfloat16", "bytes_per_token": size, "context": context}
        yield {**row, "ms": statistics.median(ms[kv]), "ms_all": ms[kv], "times": statistics.median(faster)}


TABLES = (
    Table(
        "Loss with quantised keys and values",
        lambda result: result["losses"],
        {
            "model": at("model"),
            "text": at("text"),
            "keys and values": at("kv"),
            "tokens": at("tokens"),
            "nats/token": at("loss", ".4f"),
            "more": at("more", "+.3%"),
            "standard error": at("error", ".3%"),
        },
    ),
    Table(
        "Attention of a step",
        lambda result: result["speed"],
        {
            "model": at("model"),
            "keys and values": at("kv"),
            "bytes/token": at("bytes_per_token", ".0f"),
            "ms": at("ms", ".2f"),
            "times as fast": at("times", ".2f"),
        },
        "All layers.",
    ),
)


def about(result: Result) -> str:
    return f"keys and values in 8 and 4 bits, {result['threads']} threads"
