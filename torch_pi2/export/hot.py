"""``HotChunks``: the hot neurons of a layer as a dense submodule of its own, for an accelerator (split_hot_cold).

Hot neurons go in chunks of :data:`CHUNK` neurons, y = sum over chunks of down_i(act(gate_i x) * up_i x), so that every
number of them uses the same weights: one copy serves a graph for each batch size (PowerInfer-2, section 4.1.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torch_pi2.errors import ConfigError
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.neuron_rows import row_of_each
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.types.machine_plan import HardwarePlan
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats

#: Neurons of a chunk: matrices of 512 x H keep a phone's NPU busy, and four of them are a step in the plan.
CHUNK = 512


class HotChunks(nn.Module):
    """The first neurons of a layer in plan order, densely: ``[..., H] -> [..., H]`` float32.

    Args:
        site: the layer. rows: of each neuron gate (gated layers), up and down, ``[N, H]`` float32 each.
        bias_gate, bias_up: ``[N]`` or None. Down's bias belongs to the cold part.
        chunk: neurons per chunk; N is a multiple of it, or the last chunk has what is left.

    Attributes:
        gate, up, down: a linear layer per chunk; ``gate`` is empty in plain layers.
        chunks: how many of them :meth:`forward` computes now, 1 to ``len(up)``.
    """

    def __init__(
        self,
        site: FFNSite,
        rows: Sequence[torch.Tensor],
        bias_gate: torch.Tensor | None = None,
        bias_up: torch.Tensor | None = None,
        chunk: int = CHUNK,
    ) -> None:
        super().__init__()
        self.activation, self.activation_on_up = site.activation, site.activation_on_up
        up, down = rows[-2], rows[-1]
        starts = range(0, len(up), chunk)
        self.gate = nn.ModuleList(
            linear_of(rows[0][i : i + chunk], _part(bias_gate, i, chunk)) for i in (starts if site.gated else ())
        )
        self.up = nn.ModuleList(linear_of(up[i : i + chunk], _part(bias_up, i, chunk)) for i in starts)
        self.down = nn.ModuleList(linear_of(down[i : i + chunk].T, None) for i in starts)
        self.chunks = len(self.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self._chunk(i, x) for i in range(self.chunks)]
        y = parts[0]
        for part in parts[1:]:
            y = y + part
        return y

    def _chunk(self, i: int, x: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[self.activation]
        up = self.up[i](x)
        gated_up = act(up) if self.activation_on_up or not self.gate else up
        h = act(self.gate[i](x)) * gated_up if self.gate else gated_up
        y: torch.Tensor = self.down[i](h)
        return y


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer of these very numbers, for inference."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(_own(weight), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(_own(bias), requires_grad=False)
    return made


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that is no part of a larger tensor: XNNPACK's exporter writes what lies at the beginning of that."""
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _part(bias: torch.Tensor | None, start: int, chunk: int) -> torch.Tensor | None:
    return None if bias is None else bias[start : start + chunk]


def hot_chunks(ffn: SparseFFN, chunks: int, chunk: int = CHUNK) -> HotChunks:
    """The first ``chunks`` chunks of ``ffn``, in memory or in a store, dequantised to float32."""
    count, site = min(chunks * chunk, ffn.site.intermediate), ffn.site
    neuron_rows = rows_of(ffn, 0, count)
    rows = [row_of_each(neuron_rows, r, ffn.weights, site.hidden, torch.float32) for r in range(site.rows_per_neuron)]
    gate, up = (None if b is None else b[:count].float() for b in (ffn.bias_gate, ffn.bias_up))
    return HotChunks(site, rows, gate, up, chunk)


def rows_of(ffn: SparseFFN, first: int, last: int) -> torch.Tensor:
    """Neurons ``[first, last)`` in plan order as ``ffn`` stores them, ``[n, R, ...]``, in memory or in a store."""
    if not isinstance(ffn, OffloadedFFN):
        return ffn.neuron_rows[first:last]
    from torch_pi2.store.storefile import StoreReader

    with StoreReader(ffn.store.path) as reader:
        found = reader.read_layer(ffn.store_layer, (first, last))
    return found if ffn.weights != "float" else found.view(ffn.neuron_rows.dtype)


def chunks_per_batch(
    layers: Sequence[SparseFFN],
    batches: Sequence[int],
    stats: ActivationStats | None,
    given: Mapping[int, int] | None = None,
    *,
    hot_frequency: float = 0.4,
    hardware: HardwarePlan | None = None,
    chunk: int = CHUNK,
) -> dict[int, list[int]]:
    """Batch size -> chunks of each layer that an accelerator computes, at least one.

    As ``hardware`` (of the plan that ``layers`` are those of) has planned, if it gives an accelerator anything. Else a
    neuron is hot for a batch if it fires for one of its tokens at least in ``hot_frequency`` of the cases (measured
    by ``stats`` for every batch size); without statistics, the plan's hot neurons, whatever the batch.

    Args:
        given: batch size -> chunks, instead (the same in every layer, at most all that a layer has).

    Raises:
        ConfigError: ``given`` lacks a batch size, or has a number below 1.
    """
    planned = hardware if hardware is not None and any(any(b.accelerator) for b in hardware.buckets) else None
    found: dict[int, list[int]] = {}
    for batch in batches:
        if given is not None and given.get(batch, 0) < 1:
            raise ConfigError(
                "export(hot=...)",
                expected=f"1 or more chunks for each batch size of {list(batches)}",
                found=f"{given.get(batch)} for {batch}",
                fix="Correct it. (Left out, an NPU has what the statistics say, and xnnpack nothing.)",
            )
        found[batch] = []
        for index, ffn in enumerate(layers):
            most = -(-ffn.site.intermediate // chunk)
            if given is not None:
                wanted = given[batch]
            elif planned is not None:
                wanted = -(-planned.bucket(batch).accelerator[index] // chunk)
            elif stats is None:
                wanted = -(-ffn.n_hot // chunk)
            else:
                hot = int((_frequency(stats, ffn.site.key, batch) >= hot_frequency).sum())
                wanted = round(hot / chunk)
            found[batch].append(max(1, min(wanted, most)))
    return found


def _frequency(stats: ActivationStats, key: str, batch: int) -> torch.Tensor:
    """As :meth:`LayerStats.frequency`; beyond the largest batch measured, that of tokens that fire independently."""
    layer = stats[key]
    sizes = [s for s, n in zip(layer.batch_sizes, layer.batch_groups.tolist()) if n > 0]
    if batch <= sizes[-1]:
        return layer.frequency(batch)
    return 1 - (1 - layer.frequency(sizes[-1])).pow(batch / sizes[-1])
