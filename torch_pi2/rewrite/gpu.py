"""A model whose hot neurons are on a GPU, with all that is no feed-forward layer; the cold ones stay on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_pi2.base.units import parse_bytes, size
from torch_pi2.errors import ConfigError, OutOfMemoryError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import check_gpu, stays
from torch_pi2.layers.of_model import homes, sparse_layers
from torch_pi2.layers.split import CudaLink, Link, Split
from torch_pi2.rewrite.handle import Handle, Optimized
from torch_pi2.spec.stats import ActivationStats


def checked_memory(gpu_memory: float | str) -> int:
    """Bytes. Raises, before there is anything to lose: ConfigError: it is no size; DeviceError: see ``check_gpu``."""
    memory_bytes = parse_bytes(gpu_memory, "gpu_memory")
    check_gpu(torch.device("cuda"))
    return memory_bytes


def hot_on_gpu(model: nn.Module, memory_bytes: int, link: Link | None = None) -> dict[str, int]:
    """Put as many neurons of ``model``, which is optimised and on the CPU, on a GPU as have room, and all else.

    Those that fire most, of all layers; without statistics an equal share of each. They stay on the CPU, too: what is
    saved and restored is there.

    Args:
        memory_bytes: of weights there; keys, values and activations come on top.
        link: to the GPU (None: torch's current one).

    Returns:
        neurons there, by the key of their layer.

    Raises:
        DeviceError: layers that have no kernels. OutOfMemoryError: the rest of the model has no room.
    """
    layers = sparse_layers(model)
    if len(layers) != len(homes(model)) or not all(layer.in_memory for layer in layers):
        raise stays(f"{type(model).__name__}, with mixtures of experts or over a store,")
    inside = {id(tensor) for layer in layers for tensor in layer.buffers()}
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside}
    rest_bytes = sum(tensor.nbytes for tensor in held.values() if tensor.device.type != "meta")
    if memory_bytes < rest_bytes:
        raise OutOfMemoryError(
            "gpu_memory",
            expected=f"{size(rest_bytes)} or more: what is no feed-forward layer is there as a whole",
            found=size(memory_bytes),
            fix="Give it more, or leave the model on the CPU.",
        )
    handle = Handle.of(model)
    stats = handle.stats if isinstance(handle, Optimized) else None
    counts = _most_fired(layers, stats, memory_bytes - rest_bytes)
    link = link or CudaLink(torch.device("cuda", torch.cuda.current_device()))
    for layer, count in zip(layers, counts, strict=True):
        layer.split = Split(layer, count, link)
    model.to(link.device)
    return {layer.site.key: count for layer, count in zip(layers, counts, strict=True)}


def _most_fired(layers: Sequence[SparseFFN], stats: ActivationStats | None, room_bytes: int) -> list[int]:
    """Of each layer so many of its first neurons that all have room, those that fire most before others."""
    ranks, sizes, owners = [], [], []
    for i, layer in enumerate(layers):
        neurons = layer.site.intermediate
        if stats is None:
            rank = 1 - torch.arange(neurons, dtype=torch.float64) / neurons
        else:
            of_layer = stats[layer.site.key]
            rank = of_layer.fired[layer.order.cpu()].double() / max(1, of_layer.tokens)
        ranks.append(rank.cummin(0).values)  # a neuron comes after those before it
        per_neuron = sum(t.nbytes for t in (layer.neuron_rows, layer.bias_gate, layer.bias_up) if t is not None)
        sizes.append(torch.full((neurons,), per_neuron // neurons, dtype=torch.int64))
        owners.append(torch.full((neurons,), i, dtype=torch.int64))
    by_rank = torch.cat(ranks).argsort(descending=True, stable=True)
    taken = torch.cat(sizes)[by_rank].cumsum(0) <= room_bytes
    counts = torch.bincount(torch.cat(owners)[by_rank][taken], minlength=len(layers))
    return [int(count) for count in counts]


def refuse_split(model: nn.Module, what: str) -> None:
    """Raises ConfigError: neurons of ``model`` are on a GPU, and ``what`` wants all of it on the CPU."""
    if any(layer.split is not None for layer in sparse_layers(model)):
        raise ConfigError(
            f"{what} {type(model).__name__}",
            expected="a model on the CPU",
            found="one with its hot neurons on a GPU",
            fix="Call model.to('cpu') first.",
        )
