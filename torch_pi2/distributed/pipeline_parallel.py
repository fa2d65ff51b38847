"""Decoder blocks divided among the processes of a group (docs/DISTRIBUTED.md), which pass hidden states to the next.

All processes run the same model on the same inputs, without weights for blocks of other processes. A process' last
block sends its hidden states, which the next process receives in place of the block before its first one. In all
processes the head returns the logits of the last one.

Models that cannot be divided are refused in their first call: a block returns more than hidden states, outside code
accesses a block, or the cache has no layer for each block. Hidden states of remote blocks are NaN, and so are logits
that depend on them, which the last process refuses.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from torch_pi2.distributed.group import Group
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import block_of

_wanted = ContextVar("whether the caller looks at logits", default=True)


class _LooksInside(UnsupportedModelError, AttributeError):
    """Also an AttributeError, as ``hasattr`` expects it."""


def _unsupported(
    what: str, expected: str, found: str, kind: type[UnsupportedModelError] = UnsupportedModelError
) -> UnsupportedModelError:
    fix = "Partition by neurons: torch-pi2 pack --ranks N --by neurons."
    return kind(what, expected=expected, found=found, fix=fix)


def remove_other_blocks(model: nn.Module, shard: Shard) -> None:
    """Remove others' blocks of ``model``. Raises UnsupportedModelError: some use the keys and values of others."""
    config = getattr(model, "config", None)
    if config is not None and (count := getattr(config.get_text_config(), "num_kv_shared_layers", 0)):
        expected = "decoder blocks with keys and values of their own"
        raise _unsupported(f"{type(model).__name__} in stages", expected, f"{count} that take those of others")
    blocks = _blocks(model, shard)
    for name, number in blocks.items():
        if not shard.has(name):
            block = model.get_submodule(name)
            for own in (block._modules, block._parameters, block._buffers):
                own.clear()
            _mix_in(block, _RemoteBlock, number=number, count=len(blocks))


def _mix_in(module: Any, mixin: type, **attributes: Any) -> None:
    kind = type(module)
    module.__class__ = type(kind.__name__, (mixin, kind), attributes)


def connect_stages(model: Any, shard: Shard, group: Group) -> None:
    """Let ``model`` exchange hidden states and logits with the other stages of ``group``."""
    head = model.get_output_embeddings()
    if head is None:
        raise _unsupported(f"{type(model).__name__} in stages", "a causal language model with a head", "none")
    blocks = _blocks(model, shard)
    here = shard.blocks(max(blocks.values()) + 1)
    for name, number in blocks.items():
        block = model.get_submodule(name)
        if number in here:
            _mix_in(block, _LocalBlock, group=group, sends=number + 1 == here.stop and group.rank + 1 < group.size)
        elif number + 1 == here.start:
            block.receives_from = group
    _mix_in(head, _LastRankHead, group=group)


def _blocks(model: nn.Module, shard: Shard) -> dict[str, int]:
    numbers = {name: shard.block(name) for name, _ in model.named_modules() if name == block_of(name)}
    return {name: number for name, number in numbers.items() if number is not None}


class _LocalBlock:
    """A mixin for a local decoder block: if it fails, the others, which wait for its output, are told at once."""

    group: Group
    #: Whether the next block is in another process.
    sends: bool

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        return self.group.run(self._compute, *args, **named)

    def _compute(self, *args: Any, **named: Any) -> torch.Tensor:
        y: Any = super().forward(*args, **named)  # type: ignore[misc]
        if not isinstance(y, torch.Tensor):
            expected = "decoder blocks that return hidden states alone"
            raise _unsupported(f"{type(self).__name__} in stages", expected, f"one that returns a {type(y).__name__}")
        return self.group.send_next(y, self.group.rank) if self.sends else y


class _RemoteBlock:
    """A mixin for another process' decoder block: returns NaN, not to be used, unless it receives hidden states."""

    number: int
    #: Number of blocks in the model.
    count: int
    #: Set in the block before the first local one.
    receives_from: Group | None = None

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        for cache in (*others, *named.values()):
            if hasattr(cache, "get_seq_length"):
                _count_tokens(cache, self.number, self.count, hidden_states)
        if (group := self.receives_from) is not None:
            return group.run(group.send_next, hidden_states, group.rank - 1)
        return hidden_states * math.nan  # depends on its input, so that compilers keep the preceding send

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            kind, number = type(self), type(self).__dict__.get("number")
            expected = "decoder blocks that only their own code looks into"
            found = f"code that asks for {name!r} of block {number}, which has no modules in this process"
            raise _unsupported(f"{kind.__name__} in stages", expected, found, _LooksInside) from error


def _count_tokens(cache: Any, number: int, count: int, hidden_states: torch.Tensor) -> None:
    """Add the tokens of ``hidden_states`` to a layer of ``cache``, since models ask remote layers for their length too.
    Raises UnsupportedModelError: the cache does not have a layer for each of ``count`` blocks.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) > count or hidden_states.dim() != 3:
        expected = f"a layer for each of {count} decoder blocks, with hidden states [batch, tokens, hidden]"
        found = "a cache without layers" if layers is None else f"{len(layers)} layers and {list(hidden_states.shape)}"
        raise _unsupported(f"{type(cache).__name__} of a model in stages", expected, found)
    batch, tokens = hidden_states.shape[:2]
    state = layers[number] if number < len(layers) else None
    for part in range(getattr(state, "number_of_states", 0)):  # linear attention
        cache.update_conv_state(hidden_states.new_zeros(batch, 1, 1), number, state_idx=part)
    if state is None or hasattr(state, "get_seq_length"):
        nothing = hidden_states.new_zeros(batch, 1, tokens, 1)
        cache.update(nothing, nothing, number)


@contextmanager
def without_logits() -> Iterator[None]:
    """In this block logits are not used, so stages do not wait for the last one before they go on."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


class _LastRankHead:
    """A mixin for a stage's head with ``out_features``: all processes return the last stage's logits."""

    group: Group
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wanted = torch.compiler.is_compiling() or _wanted.get()
        return self.group.run(self._compute, x) if wanted else self._no_logits(x)

    def _no_logits(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(*x.shape[:-1], self.out_features)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        last = self.group.size - 1
        y: torch.Tensor = super().forward(x) if self.group.rank == last else self._no_logits(x)  # type: ignore[misc]
        if self.group.rank == last and not self.group.logits_checked and not torch.compiler.is_compiling():
            with torch._C.DisableTorchFunction():  # not part of a step that is being recorded
                wrong = bool(y.isnan().all())
            if wrong:
                expected = "hidden states that only pass from one decoder block to the next"
                found = "code outside of blocks that uses those of several: logits are NaN"
                raise _unsupported("a model in stages", expected, found)
            self.group.logits_checked = True
        return self.group.broadcast(y, last)
