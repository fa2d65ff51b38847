"""What of a GPU's memory a plan may fill with neurons."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.rewrite.gpu import neuron_bytes
from torch_pi2.types.method import Method

if TYPE_CHECKING:
    from torch_pi2.machine.hardware import Hardware


def accelerator_room(model: nn.Module, hardware: Hardware, room_bytes: int) -> int:
    """Of ``room_bytes`` of a GPU, those that a plan for ``hardware`` divides among neurons of ``model``.

    0, where it has no such plan: that was not measured with a GPU, or layers have thresholds or are experts, whose
    neurons may not be hot. What else is of neurons (biases, their order) is counted first: a plan knows rows alone.
    """
    theirs, layers = hardware.accelerator, sparse_layers(model)
    if theirs is None or not theirs.holds_rest or any(map(_never_hot, layers)):
        return 0
    beside = sum(neuron_bytes(layer) * layer.site.intermediate - layer.neuron_rows.nbytes for layer in layers)
    return max(0, min(room_bytes - beside, theirs.memory_bytes))


def _never_hot(layer: SparseFFN) -> bool:
    return layer.method == Method.THRESHOLD or layer.site.experts is not None
