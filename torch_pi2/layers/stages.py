"""Decoder blocks of which each process of a group has some (docs/DISTRIBUTED.md): hidden states are handed on.

All processes compute the same model on the same inputs. Blocks of other processes have no weights: the one before the
first block here takes what the stage before found, the one after the last hands on what was found here, and the head
says in all processes what it says in the last.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from torch_pi2.base.group import Group
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.sharded import computed_together
from torch_pi2.spec.shard import Shard
from torch_pi2.spec.site import block_of

_wanted = ContextVar("whether somebody looks at logits", default=True)


def leave_out(model: nn.Module, shard: Shard) -> None:
    """Blocks of ``model`` (of transformers, without weights) that other processes have lose their modules.

    Raises:
        UnsupportedModelError: its blocks return more than hidden states.
    """
    for name, block in list(model.named_modules()):
        number = shard.block(name)
        if name != block_of(name) or number is None or shard.has(name):
            continue
        if "tuple" in str(type(block).forward.__annotations__.get("return", "")).lower():
            raise UnsupportedModelError(
                f"{type(block).__name__} in stages",
                expected="decoder blocks that return hidden states alone",
                found="one that returns a tuple",
                fix="Deal out neurons: torch-pi2 pack --ranks N --by neurons.",
            )
        block._modules.clear()
        block.__class__ = type(type(block).__name__, (_Elsewhere, type(block)), {"number": number})


def join_stages(model: Any, shard: Shard, group: Group) -> None:
    """The stage ``model`` takes hidden states and logits from the others of ``group``, and hands on its own.

    Raises:
        UnsupportedModelError: it has no head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} in stages",
            expected="a causal language model with a head",
            found="none",
            fix="Deal out neurons: torch-pi2 pack --ranks N --by neurons.",
        )
    elsewhere = {block.number: block for block in model.modules() if isinstance(block, _Elsewhere)}
    numbers = shard.blocks(max(_numbers(model, shard)) + 1)
    for number, source in ((numbers.start - 1, shard.rank - 1), (numbers.stop, shard.rank)):
        if number in elsewhere:
            elsewhere[number].hands_on = group, source
    kind: type = _Head if shard.rank == group.size - 1 else _HeadElsewhere
    head.__class__ = type(type(head).__name__, (kind, type(head)), {"group": group})


def _numbers(model: nn.Module, shard: Shard) -> list[int]:
    """Of all blocks."""
    return [number for name, _ in model.named_modules() if (number := shard.block(name)) is not None]


class _Elsewhere:
    """Before the class of a decoder block among its bases: one that another process has."""

    number: int
    #: Of the first block before or after those here: the group, and the stage that found what is handed on.
    hands_on: tuple[Group, int] | None = None

    def forward(self, hidden_states: torch.Tensor, *_: Any, **named: Any) -> torch.Tensor:
        cache = named.get("cache", named.get("past_key_values"))
        if cache is not None:  # whose first layers are asked how many tokens there are
            nothing = hidden_states.new_zeros(len(hidden_states), 1, hidden_states.shape[1], 1)
            cache.update(nothing, nothing, self.number)
        if self.hands_on is None:
            return hidden_states
        group, source = self.hands_on
        return computed_together(group, group.hand_on, hidden_states, source)


@contextmanager
def without_logits() -> Iterator[None]:
    """Within it nobody looks at what the heads of stages say: none waits for the last to go on with more tokens."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


class _Head:
    """Before the class of the last stage's head among its bases."""

    group: Group
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and not _wanted.get():
            return x.new_zeros(*x.shape[:-1], self.out_features)
        return computed_together(self.group, self.group.of, super().forward(x), self.group.size - 1)  # type: ignore[misc]


class _HeadElsewhere:
    """The same of other stages, where nothing is computed. ``out_features``: of the class that it is before."""

    group: Group
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        room = x.new_zeros(*x.shape[:-1], self.out_features)
        if not torch.compiler.is_compiling() and not _wanted.get():
            return room
        return computed_together(self.group, self.group.of, room, self.group.size - 1)
