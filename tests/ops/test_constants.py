"""Names that Python needs before the library is loaded are those of the core."""

from __future__ import annotations

from torch_pi2.observe.trace import COUNTERS, STAGES
from torch_pi2.ops.constants import chunk_neurons, constants
from torch_pi2.types.offload import POLICIES


def test_names_are_the_cores() -> None:
    assert constants().policies == POLICIES
    assert (len(STAGES), len(COUNTERS)) == (constants().stages, constants().trace_counters)


def test_chunks_divide_a_layer() -> None:
    for neurons in (1, 64, 1000, 11008, 14336):
        assert constants().chunks * chunk_neurons(neurons) - neurons >= 0
        assert chunk_neurons(neurons) % 64 == 0
    assert chunk_neurons(14336) == 896
