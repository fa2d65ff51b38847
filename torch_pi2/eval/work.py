"""The share of dense work that sparse layers did, from the operators' counters."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from torch_pi2.layers.prompt import sparse_only
from torch_pi2.observe import counters


@dataclass
class Work:
    """Counted in (token, neuron) pairs over all sparse FFNs; shares are None if none ran. ``neurons``: pairs that a
    dense model would compute. ``gate_rows``, ``up_rows``, ``down_rows``: pairs whose first matrix row (gate, or up in a
    plain FFN), up row in a gated FFN and down column were used. ``dense_rows``: rows of a dense model.
    """

    neurons: int = 0
    gate_rows: int = 0
    up_rows: int = 0
    down_rows: int = 0
    dense_rows: int = 0

    def _share(self, pairs: int) -> float | None:
        return pairs / self.neurons if self.neurons else None

    @property
    def neurons_computed(self) -> float | None:
        """Share of pairs that were computed at all: 1 for the exact gate, which computes every gate."""
        return self._share(self.gate_rows)

    @property
    def neurons_used(self) -> float | None:
        """Share of pairs that contributed to the output."""
        return self._share(self.down_rows)

    @property
    def rows_used(self) -> float | None:
        """Share of matrix rows used: the share of FFN weights read for one token."""
        used = self.gate_rows + self.up_rows + self.down_rows
        return used / self.dense_rows if self.dense_rows else None

    def to_json(self) -> dict[str, float | None]:
        shares = {name: getattr(self, name) for name in ("neurons_computed", "neurons_used", "rows_used")}
        return {**asdict(self), **shares}


@contextmanager
def work() -> Iterator[Work]:
    """Count the work inside the block, where layers are sparse for any number of tokens. The counters are process-wide:
    nothing else may run sparse layers meanwhile.
    """
    done = Work()
    before = counters.read()
    with sparse_only():
        yield done
    after = counters.read()
    for name in asdict(done):
        setattr(done, name, after[name] - before[name])
