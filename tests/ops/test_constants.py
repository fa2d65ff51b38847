"""What Python has beside lists of the core is in them."""

from __future__ import annotations

from torch_pi2.observe.trace import COUNTERS, STAGES
from torch_pi2.ops.activations import ACTIVATIONS, ON_A_GPU
from torch_pi2.ops.constants import chunk_neurons, constants, lists
from torch_pi2.types.offload import OffloadConfig


def test_names_are_the_cores() -> None:
    assert lists().activations == tuple(ACTIVATIONS)
    assert {*ON_A_GPU} <= {*lists().activations}
    assert OffloadConfig().policy in lists().policies
    assert (len(STAGES), len(COUNTERS)) == (constants().stages, constants().trace_counters)


def test_chunks_divide_a_layer() -> None:
    for neurons in (1, 64, 1000, 11008, 14336):
        assert constants().chunks * chunk_neurons(neurons) - neurons >= 0
        assert chunk_neurons(neurons) % 64 == 0
    assert chunk_neurons(14336) == 896
