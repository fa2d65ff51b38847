"""``Budget``: what the memory of a model over a store is divided into."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from torch_pi2.base.units import mebibytes
from torch_pi2.errors import ConfigError

#: Bookkeeping per slot of the cache.
SLOT_BYTES = 40
#: Tokens of a prompt whose activations a budget has room for at a time, whatever its context.
PIECE_TOKENS = 1024


@dataclass(frozen=True)
class Budget:
    """Bytes of a model over a store, by part.

    Attributes:
        total: what was asked for.
        fixed: attention, embeddings, head, norms and biases. predictors: of all layers. neuron_tables: bookkeeping.
        kv: keys and values of ``context`` tokens, of all sequences together.
        staging: where neurons go that a full cache has no room for.
        activations: of a prompt of ``context`` tokens, of which ``piece_tokens`` are read at a time
            (:class:`torch_pi2.Decoder`), what operators need besides, and some MiB for objects and threads.
        cache: what is left, for neurons (and 40 bytes a slot). neurons: all of them. token: those of an average token.
        slot: one of them (or a cluster, if a store has such) in the cache.
        context, piece_tokens: tokens, as above.
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
        """The least that is accepted: everything but neurons, which then all come from flash."""
        return self.fixed + self.predictors + self.kv + self.staging + self.activations + self.neuron_tables

    @property
    def whole(self) -> int:
        """What the model takes with every neuron in memory."""
        return self.smallest + self.in_slots(self.neurons)

    @property
    def cliff(self) -> int:
        """Below it, what one token wants does not fit: a cache that evicts the oldest then hits next to nothing."""
        return self.smallest + self.in_slots(self.token)

    def with_total(self, total: int, folder: Path) -> Budget:
        """The same parts, and a cache of what is left of ``total``. Raises ConfigError: they do not fit."""
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
        """What the cache takes for neurons of ``size`` bytes, bookkeeping included."""
        return -(-size // self.slot) * (self.slot + SLOT_BYTES)
