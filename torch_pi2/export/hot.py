"""``HotChunks``: the hot neurons of a layer as a dense module for an accelerator; and their number by batch size.

They are chunks of :data:`CHUNK` neurons: y = sum of down_i(act(gate_i x) * up_i x). Graphs of all batch sizes share one
copy of the weights and differ in the number of chunks (PowerInfer-2, section 4.1.3).
"""

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.export.manifest import CHUNK
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.layers.rows import row_of_each
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.types.plan import HardwarePlan
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats


class HotChunks(nn.Module):
    """The first neurons of a layer in plan order, dense: ``[..., H] -> [..., H]`` float32, in linear layers per chunk
    (``widths``: neurons of each).

    Args:
        rows: gate (gated layers), up and down of each neuron, ``[N, H]`` float32 each. bias_gate, bias_up: ``[N]`` or
            None. The cold part adds down's bias. chunk: neurons per chunk; the last one may be smaller.
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
        self.hidden, self.widths = up.shape[1], [len(up[i : i + chunk]) for i in range(0, len(up), chunk)]
        chunks = [slice(i, i + chunk) for i in range(0, len(up), chunk)]

        def linears(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.ModuleList:
            return nn.ModuleList(linear_of(weight[s], None if bias is None else bias[s]) for s in chunks)

        self.gate = linears(rows[0], bias_gate) if site.gated else nn.ModuleList()
        self.up = linears(up, bias_up)
        self.down = nn.ModuleList(linear_of(down[s].T, None) for s in chunks)

    def first(self, chunks: int) -> "HotChunks":
        """The first ``chunks`` chunks, with the same weights."""
        part = copy.copy(self)
        part._modules = {name: modules[:chunks] for name, modules in self._modules.items()}  # type: ignore[index]
        return part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.chunk(0, x)
        for i in range(1, len(self.up)):
            y = y + self.chunk(i, x)
        return y

    def chunk(self, i: int, x: torch.Tensor) -> torch.Tensor:
        act = ACTIVATIONS[self.activation]
        up = self.up[i](x)
        gated_up = act(up) if self.activation_on_up or not self.gate else up
        h = act(self.gate[i](x)) * gated_up if self.gate else gated_up
        return self.down[i](h)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer for inference with copies of these tensors: XNNPACK's exporter ignores the offset of views."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            copied = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(linear, name, nn.Parameter(copied, requires_grad=False))
    return linear


def hot_chunks(ffn: SparseFFN, chunks: int, chunk: int = CHUNK) -> HotChunks:
    """The first ``chunks`` chunks of ``ffn``, dequantised to float32."""
    count, site = min(chunks * chunk, ffn.site.intermediate), ffn.site
    neuron_rows = rows_of(ffn, 0, count)
    rows = [row_of_each(neuron_rows, r, ffn.weights, site.hidden, torch.float32) for r in range(site.rows_per_neuron)]
    gate, up = (None if b is None else b[:count].float() for b in (ffn.bias_gate, ffn.bias_up))
    return HotChunks(site, rows, gate, up, chunk)


def rows_of(ffn: SparseFFN, first: int, last: int) -> torch.Tensor:
    """Neurons ``[first, last)`` in plan order and in their format, ``[n, R, ...]``, from memory or the store."""
    if not isinstance(ffn, OffloadedFFN):
        return ffn.in_row_order(first, last)
    from torch_pi2.store.storefile import StoreReader

    with StoreReader(ffn.store.path) as reader:
        rows = reader.read_layer(ffn.store_layer, (first, last))
    return rows if ffn.weights != "float" else rows.view(ffn.neuron_rows.dtype)


def chunks_per_batch(
    layers: Sequence[SparseFFN],
    batches: Sequence[int],
    stats: ActivationStats | None,
    given: Mapping[int, int] | None = None,
    *,
    hot_frequency: float = 0.4,
    hardware: HardwarePlan | None = None,
) -> dict[int, list[int]]:
    """Batch size -> chunks per layer on an accelerator, at least one.

    In this order: ``given`` (batch size -> chunks of every layer); ``hardware``, the layers' plan, if it uses an
    accelerator; neurons that fire for any token of the batch in at least ``hot_frequency`` of the steps in ``stats``;
    the plan's hot neurons. Raises ConfigError: ``given`` lacks a batch size, or has a number below 1.
    """
    planned = hardware if hardware is not None and any(any(b.accelerator) for b in hardware.buckets) else None

    def wanted(batch: int, index: int, ffn: SparseFFN) -> int:
        if given is not None:
            return given[batch]
        if planned is not None:
            return -(-planned.bucket(batch).accelerator[index] // CHUNK)
        if stats is None:
            return -(-ffn.n_hot // CHUNK)
        return round(int((stats[ffn.site.key].frequency(batch) >= hot_frequency).sum()) / CHUNK)

    wrong = [] if given is None else [batch for batch in batches if given.get(batch, 0) < 1]
    if given is not None and wrong:
        fix = "Correct it. (By default an NPU gets what the statistics say, and xnnpack nothing.)"
        expected = f"1 or more chunks for each batch size of {list(batches)}"
        argument(given, "export(hot=...)", fix).wrong(expected, f"{given.get(wrong[0])} for {wrong[0]}")
    most = [-(-ffn.site.intermediate // CHUNK) for ffn in layers]
    return {batch: [max(1, min(wanted(batch, i, ffn), most[i])) for i, ffn in enumerate(layers)] for batch in batches}
