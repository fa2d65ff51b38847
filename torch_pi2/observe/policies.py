"""Cache policies in Python, for replays of recorded accesses (docs/RESEARCH.md)."""

from collections.abc import Sequence

import torch

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.plugins import Plugins
from torch_pi2.ops.constants import lists

#: The offline optimum, which knows the future (Belady 1966).
OPTIMAL = "optimal"


class CachePolicy:
    """Chooses what a full cache of neurons evicts. Override :meth:`victim`, and what it has to be told.

    ``name``: for :func:`~torch_pi2.register_cache_policy`. A key is a slot of the store (a neuron, or a cluster of
    them): layer l has the keys ``first[l]`` to ``first[l + 1] - 1``, mostly the most frequent first. Before
    :meth:`start` are set ``slots``, the number of places of the cache, ``first``, and ``keys``, the key in each place
    (-1: none), which stays up to date. Pinned for good are some of the most frequent (``hot_share``): a policy neither
    hears of them nor evicts them.
    """

    name = ""
    slots: int
    first: list[int]
    keys: list[int]

    def start(self) -> None:
        """A replay begins, with an empty cache."""

    def began(self, layer: int) -> None:
        """A call of ``layer`` begins: :meth:`used` for what it wants and finds, then :meth:`inserted` for the rest."""

    def used(self, slot: int) -> None:
        """A call wants the neurons in ``slot``, which are there."""

    def inserted(self, slot: int) -> None:
        """Neurons have been read into ``slot``."""

    def erased(self, slot: int) -> None:
        """``slot`` is about to be evicted, as :meth:`victim` said."""

    def victim(self, pinned: set[int]) -> int | None:
        """The slot to evict, none of ``pinned``, which this call wants; None: all stay, what is read is dropped."""
        raise NotImplementedError


_PLUGINS = Plugins(CachePolicy, "torch_pi2.cache_policies", lambda: (*lists().policies, OPTIMAL))


@checked
def register_cache_policy(policy: type[CachePolicy]) -> type[CachePolicy]:
    """Let ``torch-pi2 replay`` and :mod:`torch_pi2.observe.replay` find ``policy`` by its ``name``; returns it, as a
    decorator. Packages name theirs in the entry points ``torch_pi2.cache_policies`` instead. Raises ConfigError: no
    class that derives from :class:`CachePolicy`, no name, or that of a built-in policy.
    """
    return _PLUGINS.register(policy)


def policy_names() -> list[str]:
    """Built-in policies, the optimum, and those in Python."""
    return [*lists().policies, OPTIMAL, *_PLUGINS.names()]


def policy_in_python(policy: str | type[CachePolicy]) -> type[CachePolicy] | None:
    """``policy`` itself, or the class of that name, or ``FILE.py:CLASS``; None: there is no such class."""
    return policy if isinstance(policy, type) else _PLUGINS.find(policy)


def replay_in_python(
    kind: type[CachePolicy], layers: list[int], first: list[int], work: Sequence[torch.Tensor], slots: int
) -> torch.Tensor:
    """As ``torch.ops.pi2.replay``, int64 ``[layers, 3]``: a cache as in csrc/cache/neuron_cache.cc. ``layers``: of each
    call. ``first``: of each layer, its first key. ``work``: by ``torch.ops.pi2.replay_work``.
    """
    policy, keys, free = kind(), [-1] * slots, list(range(slots))[::-1]
    policy.slots, policy.first, policy.keys = slots, first, keys
    slot_of, fixed, pinned = dict[int, int](), set[int](), set[int]()

    def insert(key: int, stays: int) -> bool:
        if not free:
            slot = policy.victim(pinned) if len(fixed) < slots else None
            if slot is None:
                return False
            if slot in fixed or slot in pinned or slot not in range(slots):
                victim = argument(slot, f"victim of cache policy {kind.__name__}")
                victim.wrong("None, or a slot that was inserted and is not pinned")
            policy.erased(slot)
            del slot_of[keys[slot]]
            free.append(slot)
        slot_of[key] = slot = free.pop()
        keys[slot] = key
        pinned.add(slot)
        if stays:
            fixed.add(slot)
        else:
            policy.inserted(slot)
        return True

    policy.start()
    for key, stays in work[0].reshape(-1, 2).tolist():
        insert(key, stays)
    wanted, ends = work[1].reshape(-1, 3).tolist(), work[2].tolist()
    counts_L3 = [[0, 0, 0] for _ in first[1:]]
    for layer, begin, end in zip(layers, [0, *ends], ends):
        pinned.clear()
        policy.began(layer)
        counts, missing = counts_L3[layer], []
        for key, neurons, keep in wanted[begin:end]:
            slot = slot_of.get(key, -1)
            counts[0] += neurons
            counts[1] += neurons * (slot >= 0)
            if slot < 0:
                missing.append((key, keep))
                continue
            pinned.add(slot)
            if slot not in fixed:
                policy.used(slot)
        counts[2] += len(missing)
        for key, keep in missing:
            if (keep or free) and not insert(key, 0):
                break  # pins only grow until the next call
    return torch.tensor(counts_L3)
