"""Constants and name lists of the C++ core (``torch.ops.pi2.constants``, ``torch.ops.pi2.lists``)."""

from functools import cache
from typing import NamedTuple

import torch

from torch_pi2.formats import FORMATS
from torch_pi2.ops.library import load
from torch_pi2.ops.linear import fits


class Constants(NamedTuple):
    """Constants, documented in these headers.

    Attributes:
        chunks, pass_tokens, prompt_tokens, prompt_neurons, stream_from: ``pi2/ffn.h``.
        gemm_tokens, blocks (one bit per format code that may be in blocks): ``pi2/linear.h``.
        mask_bytes: ``pi2/predict.h``. expert_bytes: ``pi2/experts.h``. gate_buffers: ``pi2/offload.h``.
        attention_split, attention_rows: ``pi2/attention.h``. most_traced, stages, trace_counters: ``pi2/trace.h``.
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
    gate_buffers: int
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
    """Names by kind; a new one is a line in the file named.

    Attributes:
        activations: without parameters, ``pi2/activations.inc``. engines: reading a store, in the order that ``auto``
            tries them, ``io/engines.inc``. policies: of the neuron cache, with the bytes that each keeps per neuron of
            the store, ``cache/policies/list.inc``.
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
    """Neurons per chunk of a layer with ``neurons`` neurons."""
    load()
    return int(torch.ops.pi2.chunk_neurons(neurons))


def wants_blocks(weights: str, rows: int, columns: int, int8_activations: bool) -> bool:
    """Whether this CPU's kernels want a matrix of this size and format in blocks (:mod:`torch_pi2.ops.linear`)."""
    return int8_activations and bool(constants().blocks >> FORMATS[weights].code & 1) and fits(rows, columns)
