"""A model whose hot neurons are on a GPU, with all that is no feed-forward layer; the cold ones stay on the CPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from torch_pi2.base.units import parse_bytes, size
from torch_pi2.errors import ConfigError, OutOfMemoryError
from torch_pi2.layers.experts import OffloadedExperts, SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import check_gpu, device_of, on_gpu
from torch_pi2.layers.hybrid import CudaTransferBuffer, HybridFFN, TransferBuffer
from torch_pi2.layers.of_model import homes
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.rewrite.state import ModelState, SparseState, stored_stats
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats

_log = logging.getLogger("torch_pi2")


def checked_memory(gpu_memory: float | str) -> int:
    """Bytes. Raises, before there is anything to lose: ConfigError: it is no size; DeviceError: see ``check_gpu``."""
    memory_bytes = parse_bytes(gpu_memory, "gpu_memory")
    check_gpu(torch.device("cuda"))
    return memory_bytes


@contextmanager
def on_the_cpu(model: nn.Module, stays_here: bool = False) -> Iterator[None]:
    """Within it a model of a GPU is on the CPU, and afterwards where it was; ``stays_here``: only after an error.

    Raises:
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
    """Move ``model`` to a GPU. Raises what the move raised, or OutOfMemoryError: all of it is on the CPU then."""
    with _or_here(model, sum(t.nbytes for t in (*model.parameters(), *model.buffers())), device):
        model.to(device)


@contextmanager
def _or_here(model: nn.Module, nbytes: int, device: torch.device) -> Iterator[None]:
    """Within it ``nbytes`` of ``model`` go to a GPU; on any error all of it is on the CPU.

    Raises:
        OutOfMemoryError: the GPU has less memory.
    """
    try:
        yield
    except BaseException as error:
        _end_splits(model)
        model.to("cpu")
        if isinstance(error, torch.OutOfMemoryError):
            raise OutOfMemoryError(
                f"moving {type(model).__name__} to a GPU",
                expected=f"{size(nbytes)} free on {device}",
                found=" ".join(str(error).split())[:300],
                fix="Give it less (gpu_memory), or end what else is there.",
            ) from error
        raise


def _end_splits(model: nn.Module) -> None:
    for home in homes(model):
        if home.split is not None:
            home.end_split()


def rest_bytes(model: nn.Module) -> int:
    """Bytes of what is no feed-forward layer of ``model``, which is optimised."""
    inside = {id(tensor) for home in homes(model) for tensor in home.buffers()}
    held = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers()) if id(tensor) not in inside}
    return sum(tensor.nbytes for tensor in held.values() if tensor.device.type != "meta")


def room_on_gpu(model: nn.Module, memory_bytes: int) -> int:
    """Bytes for neurons of ``model``, which is optimised, where ``memory_bytes`` have all else of it, too.

    Raises:
        OutOfMemoryError: the rest of the model has no room.
    """
    least_bytes = rest_bytes(model)
    if memory_bytes < least_bytes:
        raise OutOfMemoryError(
            "gpu_memory",
            expected=f"{size(least_bytes)} or more: what is no feed-forward layer is there as a whole",
            found=size(memory_bytes),
            fix="Give it more, or leave the model on the CPU.",
        )
    return memory_bytes - least_bytes


def hot_on_gpu(model: nn.Module, memory_bytes: int, link: TransferBuffer | None = None) -> dict[str, int]:
    """Put as many neurons of ``model``, which is optimised and on the CPU, on a GPU as have room, and all else.

    Those that its plan gives to an accelerator, if it gives it any and all have room. Else those that are wanted most,
    of all layers; of mixtures whole experts, or the first neurons of every expert of a module, whichever are wanted
    more; without statistics an equal share of each layer, and of mixtures of whole experts. Of a model in memory they
    stay on the CPU, too: what is saved and restored is there. Of one over a store they are read into the GPU's memory,
    and the cache is for the others (:meth:`~torch_pi2.layers.offloaded.Store.preload`).

    Args:
        memory_bytes: of weights there; keys, values and activations come on top.
        link: to the GPU (None: torch's current one).

    Returns:
        neurons there, by the key of their layer.

    Raises:
        OutOfMemoryError: the rest of the model has no room, or the GPU has less memory free. ArtifactError: a store
            cannot be read. On any error no layer is divided, and from the first move on all is on the CPU.
    """
    _end_splits(model)
    room_bytes = room_on_gpu(model, memory_bytes)
    found, handle = homes(model), ModelState.of(model)
    parts = handle if isinstance(handle, SparseState) else None
    there = None if parts is None else _planned(found, parts.plan, room_bytes)
    if there is None:
        there = _most_wanted(found, None if parts is None else parts.stats or stored_stats(model), room_bytes)
    link = link or CudaTransferBuffer(torch.device("cuda", torch.cuda.current_device()))
    with _or_here(model, memory_bytes, link.device):
        for home, units in zip(found, there, strict=True):
            _split_off(home, units, link)
        model.to(link.device)
    return {layer.site.key: count for home in found for layer, count in _counts(home)}


def _split_off(home: SparseFFN | SparseExperts, there: Sequence[int], link: TransferBuffer) -> None:
    """``there``: neurons that are there, the first ones: of the layer, or of each expert."""
    if isinstance(home, SparseExperts):
        home.split_off(there, link, _stored_experts(home, there))
    else:
        (count,) = there
        if not home.in_memory and count < home.site.intermediate:
            count = count // HybridFFN.CHUNK * HybridFFN.CHUNK
        home.split_off(count, link, _stored_neurons(home, count))


def _counts(home: SparseFFN | SparseExperts) -> list[tuple[SparseFFN, int]]:
    """Layers of ``home``, which is split, and how many neurons of each are there."""
    if isinstance(home, SparseExperts):
        assert home.split is not None
        return list(zip(home.experts(), home.split.n_gpu, strict=True))
    assert home.split is not None
    return [(home, home.split.n_gpu)]


def _stored_neurons(layer: SparseFFN, count: int) -> torch.Tensor | None:
    """The first ``count`` neurons of a layer over a store; None: of one in memory, which has them."""
    if not isinstance(layer, OffloadedFFN):
        return None
    with StoreReader(layer.store.path) as reader:
        return reader.as_computed(reader.read_layer(layer.store_layer, (0, count)))


def _stored_experts(home: SparseExperts, there: Sequence[int]) -> torch.Tensor | None:
    """The first so many neurons of each expert, of those that have any, as :func:`_stored_neurons`."""
    if not isinstance(home, OffloadedExperts):
        return None
    rows, counts = home.neuron_rows, [(expert, count) for expert, count in enumerate(there) if count]
    found = torch.empty((len(counts), max(there), *rows.shape[2:]), dtype=rows.dtype)
    with StoreReader(home.store.path) as reader:
        for place, (expert, count) in enumerate(counts):
            found[place] = reader.as_computed(reader.read_layer(home.first_layer + expert, (0, count)))
    return found


def _planned(found: Sequence[SparseFFN | SparseExperts], plan: Plan, room_bytes: int) -> list[list[int]] | None:
    """Of each layer what ``plan`` gives to an accelerator at any batch size; None: nothing, or more than has room."""
    layers = [home for home in found if isinstance(home, SparseFFN)]
    if plan.hardware is None or not plan.hardware.accelerator_bytes or len(layers) < len(found):
        return None
    by_key = {
        layer.site.key: max(bucket.accelerator[i] for bucket in plan.hardware.buckets)
        for i, layer in enumerate(plan.layers)
    }
    counts = [by_key[layer.site.key] for layer in layers]
    wanted = sum(count * neuron_bytes(layer) for layer, count in zip(layers, counts, strict=True))
    if wanted > room_bytes:
        _log.warning(
            "the plan has neurons of %s on a GPU, gpu_memory has room for %s: those that fire most go there instead",
            size(wanted),
            size(room_bytes),
        )
        return None
    return [[count] for count in counts]


def neuron_bytes(layer: SparseFFN) -> int:
    """Bytes of one neuron on a GPU, with its biases, place in the order, and part of a predictor that the layer has."""
    held = sum(t.nbytes for name, t in layer.named_buffers() if name not in ("bias_down", "inverse"))
    return held // layer.site.intermediate


def _most_wanted(
    found: Sequence[SparseFFN | SparseExperts], stats: ActivationStats | None, room_bytes: int
) -> list[list[int]]:
    """Of each layer, and of each expert, how many of its first neurons are wanted most and have room.

    Of mixtures these are whole experts or the first neurons of all of them: which of both is wanted more.
    """
    ways: list[Callable[..., _Units]] = [_experts]
    if stats is not None and any(isinstance(home, SparseExperts) for home in found):
        ways.append(_of_every_expert)

    def filled(way: Callable[..., _Units]) -> tuple[float, list[list[int]]]:
        units = [way(h, stats) if isinstance(h, SparseExperts) else _neurons(h, stats) for h in found]
        return _fill(units, room_bytes)

    return max(map(filled, ways), key=lambda found: found[0])[1]


class _Units(NamedTuple):
    """What a GPU may have of a layer or mixture; of two with the same rank the first one.

    Attributes:
        rank: float64 ``[units]``, in what share of the model's tokens a neuron of each is wanted. nbytes, neurons: of
            each unit. experts: of a mixture, so many. whole: its units are experts, and not neurons of all of them.
        beside_bytes: there beside units, however many these are.
    """

    rank: torch.Tensor
    nbytes: int
    neurons: int
    experts: int = 1
    whole: bool = False
    beside_bytes: int = 0

    def there(self, taken: torch.Tensor) -> list[int]:
        """Neurons of the layer, or of each expert, of the units that are ``taken``."""
        if self.whole:
            return [self.neurons * int(unit) for unit in taken]
        return [int(taken.sum()) * self.neurons // self.experts] * self.experts


def _fill(units: Sequence[_Units], room_bytes: int) -> tuple[float, list[list[int]]]:
    """How many neurons a token wants of those units that are wanted most and have room, by byte; and these."""
    rank = torch.cat([one.rank for one in units])
    nbytes = torch.cat([torch.full((len(one.rank),), one.nbytes, dtype=torch.int64) for one in units])
    neurons = torch.cat([torch.full((len(one.rank),), one.neurons, dtype=torch.int64) for one in units])
    by_rank = rank.argsort(descending=True, stable=True)
    taken = torch.zeros(len(by_rank), dtype=torch.bool)
    taken[by_rank] = nbytes[by_rank].cumsum(0) <= room_bytes - sum(one.beside_bytes for one in units)
    parts = taken.split([len(one.rank) for one in units])
    wanted = float((rank * neurons)[taken].sum())
    return wanted, [one.there(part) for one, part in zip(units, parts, strict=True)]


def _neurons(layer: SparseFFN, stats: ActivationStats | None) -> _Units:
    """How often each neuron fires, falling: one comes after those before it."""
    neurons = layer.site.intermediate
    if stats is None:
        rank = 1 - torch.arange(neurons, dtype=torch.float64) / neurons
    else:
        of_layer = stats[layer.site.key]
        rank = of_layer.fired[layer.order.cpu()].double() / max(1, of_layer.tokens)
    return _Units(rank.cummin(0).values, neuron_bytes(layer), 1)


def _experts(home: SparseExperts, stats: ActivationStats | None) -> _Units:
    """How often a neuron of each expert is wanted: how often the router asks for it, times the share that fires."""
    experts, neurons = len(home.sites), home.site.intermediate
    nbytes = sum(t.nbytes for t in home.buffers()) // experts
    if stats is None:
        rank = 1 - torch.arange(experts, dtype=torch.float64) / experts
    else:
        shares = [stats[site.key].active_share for site in home.sites]
        rank = _asked(home, stats) * torch.tensor(shares, dtype=torch.float64)
    return _Units(rank, nbytes, neurons, experts, whole=True)


def _of_every_expert(home: SparseExperts, stats: ActivationStats) -> _Units:
    """The same of chunks of neurons, those of all experts in the same places at once; without their predictors."""
    experts, chunk = len(home.sites), HybridFFN.CHUNK
    chunks = (home.site.intermediate - 1) // chunk
    layers = [stats[site.key] for site in home.sites]
    fired_EI = torch.stack(
        [of.fired[order].double() / max(1, of.tokens) for of, order in zip(layers, home.order.cpu(), strict=True)]
    )
    wanted_I = (_asked(home, stats)[:, None] * fired_EI).mean(0)
    rank = wanted_I[: chunks * chunk].view(chunks, chunk).mean(1)
    nbytes = (home.neuron_rows.nbytes + home.order.nbytes) // home.site.intermediate
    beside_bytes = 8 * (3 * experts + 1)  # thresholds, cuts and places of experts
    return _Units(rank.cummin(0).values, nbytes * chunk, chunk * experts, experts, beside_bytes=beside_bytes)


def _asked(home: SparseExperts, stats: ActivationStats) -> torch.Tensor:
    """``[E]`` float64: share of tokens that the router sends to each expert."""
    layers = [stats[site.key] for site in home.sites]
    return torch.tensor([(of.tokens - of.borrowed) / max(1, stats.tokens) for of in layers], dtype=torch.float64)


def refuse_split(model: nn.Module, what: str, whole: bool = False) -> None:
    """Raises ConfigError: neurons of ``model`` are on a GPU, and ``what`` wants all of it on the CPU; ``whole``: also
    where all of them are there.
    """
    if any(home.split is not None or (whole and on_gpu(home.order)) for home in homes(model)):
        raise ConfigError(
            f"{what} {type(model).__name__}",
            expected="a model on the CPU",
            found="one with neurons on a GPU",
            fix="Call model.to('cpu') first.",
        )
