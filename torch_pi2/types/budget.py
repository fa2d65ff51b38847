"""``Budget``: how the memory of a model over a store is divided (:mod:`torch_pi2.decode.budget` divides it)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch_pi2.base.units import mebibytes
from torch_pi2.errors import ConfigError

#: Bookkeeping of a slot of the cache.
SLOT_BYTES = 40
#: Most tokens of a prompt that are read at a time, whatever the context.
PIECE_TOKENS = 1024


@dataclass(frozen=True)
class Budget:
    """Bytes of a model over a store, by part.

    Attributes:
        total: the whole budget.
        fixed: attention, embeddings, head, norms and biases. predictors: of all layers. neuron_tables: bookkeeping.
        kv: keys and values of ``context`` tokens, of all sequences together.
        staging: for neurons that a full cache cannot take.
        activations: of a prompt of ``context`` tokens, of which ``piece_tokens`` are read at a time
            (:class:`torch_pi2.Decoder`), with buffers of operators and some MiB for objects and threads.
        cache: the rest, for neurons (without 40 bytes a slot). neurons: size of all. token: those of an average token.
        slot: size of a neuron (or a cluster) in the cache.
        context, piece_tokens: numbers of tokens, as above.
    """

    total: int
    fixed: int
    predictors: int
    neuron_tables: int
    kv: int
    staging: int
    activations: int
    cache: int
    neurons: int
    token: int
    slot: int
    context: int
    piece_tokens: int = PIECE_TOKENS

    @property
    def smallest(self) -> int:
        """The smallest budget: everything but neurons, which are then all read from flash."""
        return self.fixed + self.predictors + self.kv + self.staging + self.activations + self.neuron_tables

    @property
    def whole(self) -> int:
        """The budget with which every neuron is in memory."""
        return self.smallest + self.in_slots(self.neurons)

    @property
    def cliff(self) -> int:
        """The budget below which one token's neurons do not fit: an LRU cache then hits almost nothing."""
        return self.smallest + self.in_slots(self.token)

    def with_total(self, total: int, folder: Path) -> Budget:
        """The same parts, with the rest of ``total`` as the cache. Raises ConfigError: they do not fit."""
        left = total - self.smallest
        if left < 0:
            raise ConfigError(
                f"budget for {folder}",
                expected=f"at least {mebibytes(self.smallest, up=True)}, for all but neurons",
                found=mebibytes(total),
                fix="Give it more.",
            )
        slots = min(self.neurons // self.slot, left // (self.slot + SLOT_BYTES))
        return replace(self, total=total, cache=slots * self.slot)

    def in_slots(self, size: int) -> int:
        """Memory of the cache for neurons of ``size`` bytes, with bookkeeping."""
        return -(-size // self.slot) * (self.slot + SLOT_BYTES)
