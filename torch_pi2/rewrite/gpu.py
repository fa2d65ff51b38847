"""Dividing a model: hot neurons and everything but FFNs on a GPU, cold neurons on the CPU."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.progress import log
from torch_pi2.base.units import parse_bytes, size
from torch_pi2.errors import OutOfMemoryError
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import HybridFFN, TransferBuffer, check_gpu, device_of, on_gpu
from torch_pi2.layers.of_model import homes
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.rewrite.state import ModelState, SparseState, stored_stats
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats


def checked_memory(gpu_memory: float | str) -> int:
    """``gpu_memory`` in bytes. Raises ConfigError: not a size; DeviceError: see ``check_gpu``."""
    memory_bytes = parse_bytes(gpu_memory, "gpu_memory")
    check_gpu(torch.device("cuda"))
    return memory_bytes


@contextmanager
def on_the_cpu(model: nn.Module, stays_here: bool = False) -> Iterator[None]:
    """Context with ``model`` on the CPU; afterwards it is back on its GPU (``stays_here``: only after an error). Raises
    DeviceError: its parameters are on several GPUs, or see :func:`check_gpu`. ConfigError: it is divided.
    """
    refuse_split(model, "taking to the CPU")
    device = device_of(model)
    if device.type == "cpu":
        yield
        return
    check_gpu(device)
    model.to("cpu")
    done = False
    try:
        yield
        done = True
    finally:
        if not (done and stays_here):
            move_whole(model, device)


def move_whole(model: nn.Module, device: torch.device) -> None:
    """Move ``model`` to a GPU. On any error, such as OutOfMemoryError, all of it is on the CPU."""
    with _or_here(model, sum(t.nbytes for t in (*model.parameters(), *model.buffers())), device):
        model.to(device)


@contextmanager
def _or_here(model: nn.Module, nbytes: int, device: torch.device) -> Iterator[None]:
    """Context in which ``nbytes`` of ``model`` go to a GPU. On any error (OutOfMemoryError) it is on the CPU."""
    try:
        yield
    except BaseException as error:
        _end_splits(model)
        model.to("cpu")
        if isinstance(error, torch.OutOfMemoryError):
            what = f"moving {type(model).__name__} to a GPU"
            found, fix = " ".join(str(error).split())[:300], "Give it less (gpu_memory), or end what else is there."
            raise OutOfMemoryError(what, expected=f"{size(nbytes)} free on {device}", found=found, fix=fix) from error
        raise


def _end_splits(model: nn.Module) -> None:
    for home in homes(model):
        if home.split is not None:
            home.end_split()


def rest_bytes(model: nn.Module) -> int:
    """Bytes of everything but the sparse layers of an optimised model."""
    inside = {id(tensor) for home in homes(model) for tensor in home.buffers()}
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside}
    return sum(tensor.nbytes for tensor in held.values() if tensor.device.type != "meta")


def room_on_gpu(model: nn.Module, memory_bytes: int) -> int:
    """Bytes of ``memory_bytes`` left for neurons. Raises OutOfMemoryError if the rest of the model does not fit."""
    least_bytes = rest_bytes(model)
    if memory_bytes < least_bytes:
        expected = f"{size(least_bytes)} or more: what is no feed-forward layer is there as a whole"
        fix = "Give it more, or leave the model on the CPU."
        raise OutOfMemoryError("gpu_memory", expected=expected, found=size(memory_bytes), fix=fix)
    return memory_bytes - least_bytes


def hot_on_gpu(model: nn.Module, memory_bytes: int, link: TransferBuffer | None = None) -> None:
    """Put as many neurons of ``model``, which is optimised and on the CPU, on a GPU as fit, and everything but FFNs.

    If its plan assigns neurons to an accelerator and all of them fit, those. Otherwise the most frequent of all layers
    (whole experts of mixtures), or an equal share of each layer without statistics. A model in memory keeps all neurons
    on the CPU as well, for saving and restoring. Over a store, the neurons are read into the GPU's memory and the cache
    serves the others (:meth:`~torch_pi2.layers.offloaded.Store.preload`).

    Args:
        memory_bytes: of weights on the GPU; KV cache and activations come on top.
        link: to the GPU (None: torch's current one).

    Raises:
        OutOfMemoryError: the rest of the model does not fit, or the GPU has less free memory. ArtifactError: a store
            cannot be read. On any error no layer is divided, and after the first move everything is on the CPU.
    """
    _end_splits(model)
    room_bytes = room_on_gpu(model, memory_bytes)
    found, handle = homes(model), ModelState.of(model)
    parts = handle if isinstance(handle, SparseState) else None
    there = None if parts is None else _planned(found, parts.plan, room_bytes)
    if there is None:
        # the most frequent neurons and experts that fit
        stats = None if parts is None else parts.stats or stored_stats(model)
        ranked = [_experts(h, stats) if isinstance(h, SparseExperts) else _neurons(h, stats) for h in found]
        rank = torch.cat([rank for rank, _ in ranked])
        nbytes = torch.cat([torch.full((len(rank),), nbytes, dtype=torch.int64) for rank, nbytes in ranked])
        by_rank = rank.argsort(descending=True, stable=True)
        taken = torch.zeros(len(by_rank), dtype=torch.bool)
        taken[by_rank] = nbytes[by_rank].cumsum(0) <= room_bytes
        there = [
            part.nonzero().flatten().tolist() if isinstance(home, SparseExperts) else [int(part.sum())]
            for home, part in zip(found, taken.split([len(rank) for rank, _ in ranked]), strict=True)
        ]
    link = link or TransferBuffer(torch.device("cuda", torch.cuda.current_device()))
    with _or_here(model, memory_bytes, link.device):
        for home, units in zip(found, there, strict=True):
            if isinstance(home, SparseExperts):
                home.split_off(units, link, _stored_experts(home, units))
            else:
                (count,) = units
                if not home.in_memory and count < home.site.intermediate:
                    count = count // HybridFFN.CHUNK * HybridFFN.CHUNK
                neuron_rows = None
                if isinstance(home, OffloadedFFN):
                    with StoreReader(home.store.path) as reader:
                        neuron_rows = reader.as_computed(reader.read_layer(home.store_layer, (0, count)))
                home.split_off(count, link, neuron_rows)
        model.to(link.device)


def _stored_experts(home: SparseExperts, there: Sequence[int]) -> torch.Tensor | None:
    if not isinstance(home, OffloadedExperts):
        return None
    rows = home.neuron_rows
    found = torch.empty((len(there), *rows.shape[1:]), dtype=rows.dtype)
    with StoreReader(home.store.path) as reader:
        for place, expert in enumerate(there):
            found[place] = reader.as_computed(reader.read_layer(home.first_layer + expert))
    return found


def _planned(found: Sequence[SparseFFN | SparseExperts], plan: Plan, room_bytes: int) -> list[list[int]] | None:
    """Neurons that ``plan`` assigns to an accelerator at any batch size, per layer; None: none, or too many."""
    layers = [home for home in found if isinstance(home, SparseFFN)]
    if plan.hardware is None or not plan.hardware.accelerator_bytes or len(layers) < len(found):
        return None
    most = [max(counts) for counts in zip(*(bucket.accelerator for bucket in plan.hardware.buckets))]
    by_key = {layer.site.key: count for layer, count in zip(plan.layers, most, strict=True)}
    counts = [by_key[layer.site.key] for layer in layers]
    wanted = sum(count * neuron_bytes(layer) for layer, count in zip(layers, counts, strict=True))
    if wanted > room_bytes:
        why = "the plan has neurons of %s on a GPU, gpu_memory has room for %s: those that fire most go there instead"
        log.warning(why, size(wanted), size(room_bytes))
        return None
    return [[count] for count in counts]


def neuron_bytes(layer: SparseFFN) -> int:
    """Bytes of one neuron on a GPU, with its share of biases, order and predictor."""
    held = sum(t.nbytes for name, t in layer.named_buffers() if name not in ("bias_down", "inverse"))
    return held // layer.site.intermediate


def _neurons(layer: SparseFFN, stats: ActivationStats | None) -> tuple[torch.Tensor, int]:
    """Firing rate of each neuron, made non-increasing since only first neurons can move; and a neuron's bytes."""
    neurons = layer.site.intermediate
    if stats is None:
        rank = 1 - torch.arange(neurons, dtype=torch.float64) / neurons
    else:
        of_layer = stats[layer.site.key]
        rank = of_layer.fired[layer.order.cpu()].double() / max(1, of_layer.tokens)
    return rank.cummin(0).values, neuron_bytes(layer)


def _experts(home: SparseExperts, stats: ActivationStats | None) -> tuple[torch.Tensor, int]:
    """Per expert, the router's frequency times the share of neurons that fire; and an expert's bytes."""
    experts = len(home.sites)
    nbytes = sum(t.nbytes for t in home.buffers()) // experts
    if stats is None:
        return 1 - torch.arange(experts, dtype=torch.float64) / experts, nbytes
    layers = [stats[site.key] for site in home.sites]
    wanted = [(of.tokens - of.borrowed) / max(1, stats.tokens) * of.active_share for of in layers]
    return torch.tensor(wanted, dtype=torch.float64), nbytes


def refuse_split(model: nn.Module, what: str, whole: bool = False) -> None:
    """Raises ConfigError if ``model`` is divided (``whole``: or on a GPU), for the operation ``what``."""
    if any(home.split is not None or (whole and on_gpu(home.order)) for home in homes(model)):
        divided = argument(model, f"{what} {type(model).__name__}", "Call model.to('cpu') first.")
        divided.wrong("a model on the CPU", "one with neurons on a GPU")
