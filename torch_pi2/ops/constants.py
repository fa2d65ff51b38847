"""Numbers and lists of the C++ core, as it has them itself (``torch.ops.pi2.constants``, ``torch.ops.pi2.lists``)."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from torch_pi2.formats import FORMATS
from torch_pi2.ops.library import load
from torch_pi2.ops.linear import fits


class Constants(NamedTuple):
    """In the headers named, each has a comment of its own.

    Attributes:
        chunks, pass_tokens, prompt_tokens, prompt_neurons, stream_from: ``pi2/ffn.h``. gemm_tokens, blocks (a bit for
        the code of each format that may be in them): ``pi2/linear.h``.
        mask_bytes: ``pi2/predict.h``. expert_bytes: ``pi2/experts.h``. attention_split, attention_rows:
        ``pi2/attention.h``. most_traced, stages, trace_counters: ``pi2/trace.h``.
    """

    chunks: int
    pass_tokens: int
    prompt_tokens: int
    prompt_neurons: int
    stream_from: int
    gemm_tokens: int
    blocks: int
    mask_bytes: int
    expert_bytes: int
    attention_split: int
    attention_rows: int
    most_traced: int
    stages: int
    trace_counters: int


@cache
def constants() -> Constants:
    """Read once: it loads the library."""
    load()
    pairs = dict(part.split("=") for part in str(torch.ops.pi2.constants()).split())
    return Constants(**{name: int(pairs[name]) for name in Constants._fields})


class Lists(NamedTuple):
    """The names of each kind; to add one, add a line to the file named.

    Attributes:
        activations: names without numbers, ``pi2/activations.inc``. engines: that read a store, in the order in which
            ``auto`` tries them, ``io/engines.inc``. policies: of the neuron cache, with the bytes that each remembers
            of a neuron of the store, ``cache/policies/list.inc``.
    """

    activations: tuple[str, ...]
    engines: tuple[str, ...]
    policies: dict[str, int]


@cache
def lists() -> Lists:
    """Read once: it loads the library."""
    load()
    found = {name: names.split(",") for name, names in (p.split("=") for p in str(torch.ops.pi2.lists()).split())}
    policies = {name: int(size) for name, _, size in (policy.partition(":") for policy in found["policies"])}
    return Lists(tuple(found["activations"]), tuple(found["engines"]), policies)


def chunk_neurons(neurons: int) -> int:
    """Neurons of a chunk of a layer that has so many."""
    load()
    return int(torch.ops.pi2.chunk_neurons(neurons))


def wants_blocks(weights: str, rows: int, columns: int, int8_activations: bool) -> bool:
    """Whether a matrix of this size and format has its rows in blocks on this CPU (:mod:`torch_pi2.ops.linear`)."""
    return int8_activations and bool(constants().blocks >> FORMATS[weights].code & 1) and fits(rows, columns)
