"""Decoder blocks of which each process of a group has some (docs/DISTRIBUTED.md): hidden states are handed on.

All processes compute the same model on the same inputs. Blocks of other processes have no weights: the one before the
first block here takes what the stage before found, the one after the last hands on what was found here, and the head
says in all processes what it says in the last.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from torch_pi2.base.group import Group
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.sharded import computed_together
from torch_pi2.types.shard import Shard
from torch_pi2.types.site import block_of

_BY_NEURONS = "Deal out neurons: torch-pi2 pack --ranks N --by neurons."

_wanted = ContextVar("whether somebody looks at logits", default=True)


def leave_out(model: nn.Module, shard: Shard) -> None:
    """Blocks of ``model`` (of transformers, without weights) that other processes have lose their modules.

    Raises:
        UnsupportedModelError: its blocks return more than hidden states, the model looks into them, or some take keys
            and values of others.
    """
    config = getattr(model, "config", None)
    if config is not None and (count := getattr(config.get_text_config(), "num_kv_shared_layers", 0)):
        raise UnsupportedModelError(
            f"{type(model).__name__} in stages",
            expected="decoder blocks with keys and values of their own",
            found=f"{count} that take those of others",
            fix=_BY_NEURONS,
        )
    _leave_out(model, shard, [name for name in _blocks(model, shard) if not shard.has(name)])
    _try(model, shard)


def _leave_out(model: nn.Module, shard: Shard, names: Sequence[str]) -> None:
    """Blocks with these ``names``. Raises as :func:`leave_out`."""
    count = len(_blocks(model, shard))
    for name in names:
        block = model.get_submodule(name)
        if not _returns_one(type(block)):
            raise UnsupportedModelError(
                f"{type(block).__name__} in stages",
                expected="decoder blocks that return hidden states alone",
                found="one that returns a tuple, or whose source cannot be read",
                fix=_BY_NEURONS,
            )
        for own in (block._modules, block._parameters, block._buffers):
            own.clear()
        about = {"number": shard.block(name), "count": count}
        block.__class__ = type(type(block).__name__, (_Elsewhere, type(block)), about)


def _try(model: nn.Module, shard: Shard) -> None:
    """What is around the blocks of ``model`` is called for a prompt and a step, without values and without blocks.

    All processes refuse alike. Raises UnsupportedModelError: something looks into a block, its blocks do not take what
    the one before returns, or keys and values are not kept by block.
    """
    tried: Any = copy.deepcopy(model).to("meta")
    blocks = _blocks(tried, shard)
    _leave_out(tried, shard, [name for name in blocks if shard.has(name)])
    row = _Row()
    row.begin(2)
    for name in blocks:
        tried.get_submodule(name).register_forward_hook(row, with_kwargs=True)
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    takes = inspect.signature(tried.forward).parameters
    with torch.no_grad(), _AllTrue():
        try:
            found = tried(ids[:, :2], use_cache=True)
            row.begin(1)
            cache = {name: found[name] for name in ("cache", "past_key_values") if name in takes and name in found}
            tried(ids[:, 2:], use_cache=True, attention_mask=torch.ones_like(ids), **cache)
        except UnsupportedModelError:
            raise
        except Exception:  # of models that ask for values, or take more than ids: nothing more is known of these
            return


class _AllTrue(TorchDispatchMode):
    """Code that asks a tensor without values for one, such as whether all of a mask is true, is told so."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


class _Row:
    """A hook of all blocks of a model that is tried: each is to take what the one before has returned."""

    def begin(self, tokens: int) -> None:
        """A call for so many of one sequence."""
        self._tokens = tokens
        #: Number of the block before, and what it has returned.
        self._before: tuple[int, torch.Tensor] | None = None

    def __call__(self, block: _Elsewhere, args: tuple[Any, ...], named: dict[str, Any], found: torch.Tensor) -> None:
        taken = args[0] if args else named["hidden_states"]
        if taken.shape[:2] != (1, self._tokens):
            self._refuse(block, "hidden states [batch, tokens, ...]", f"{list(taken.shape)} of {self._tokens} tokens")
        if self._before is not None and (block.number <= self._before[0] or taken is not self._before[1]):
            self._refuse(
                block,
                "decoder blocks that are called once each, with what the one before returned",
                f"block {block.number} called with something else after block {self._before[0]}",
            )
        self._before = block.number, found

    @staticmethod
    def _refuse(block: _Elsewhere, expected: str, found: str) -> None:
        raise UnsupportedModelError(
            f"{type(block).__name__} in stages", expected=expected, found=found, fix=_BY_NEURONS
        )


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
            fix=_BY_NEURONS,
        )
    elsewhere = {block.number: block for block in model.modules() if isinstance(block, _Elsewhere)}
    blocks = _blocks(model, shard)
    numbers = shard.blocks(max(blocks.values()) + 1)
    for name, number in blocks.items():
        block = model.get_submodule(name)
        if number in numbers:
            block.__class__ = type(type(block).__name__, (_Here, type(block)), {"group": group})
    for number, source in ((numbers.start - 1, shard.rank - 1), (numbers.stop, shard.rank)):
        if number in elsewhere:
            elsewhere[number].hands_on = group, source
    head.__class__ = type(type(head).__name__, (_Head, type(head)), {"group": group})


def _returns_one(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` returns no tuple or list, by its source: what transformers annotates is often wrong."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = [*ast.walk(tree)]
    found = [node.value for node in nodes if isinstance(node, ast.Return)]
    named = {ast.dump(value) for value in found if isinstance(value, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assign) and {ast.dump(t).replace("Store", "Load") for t in node.targets} & named:
            found.append(node.value)
    return bool(found) and not any(value is None or _is_tuple(value) for value in found)


def _is_tuple(value: ast.expr) -> bool:
    """Also ``(a,) + others``, and either one of a choice."""
    parts = {ast.BinOp: ("left", "right"), ast.IfExp: ("body", "orelse")}.get(type(value), ())
    return isinstance(value, (ast.Tuple, ast.List)) or any(_is_tuple(getattr(value, part)) for part in parts)


def _blocks(model: nn.Module, shard: Shard) -> dict[str, int]:
    """The numbers of all decoder blocks, by name."""
    numbers = {name: shard.block(name) for name, _ in model.named_modules() if name == block_of(name)}
    return {name: number for name, number in numbers.items() if number is not None}


class _LooksInside(UnsupportedModelError, AttributeError):
    """Also what whoever asks whether there is such an attribute expects."""


class _Here:
    """Before the class of a decoder block among its bases: what fails in it the others are told at once.

    They wait for what it finds, and who tries again would send them something else for it.
    """

    group: Group

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        return computed_together(self.group, super().forward, *args, **named)  # type: ignore[misc]


class _Elsewhere:
    """Before the class of a decoder block among its bases: one that another process has.

    It gives what is no number, unless that is handed on: nobody is to take hidden states here for the model's.
    """

    number: int
    #: Of the model's blocks.
    count: int
    #: Of the first block before or after those here: the group, and the stage that found what is handed on.
    hands_on: tuple[Group, int] | None = None

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        for cache in (*others, *named.values()):
            if hasattr(cache, "get_seq_length"):
                _count_tokens(cache, self.number, self.count, hidden_states)
        if self.hands_on is None:
            return torch.full_like(hidden_states, math.nan)
        group, source = self.hands_on
        found = computed_together(group, group.hand_on, hidden_states, source)
        return found * math.nan if source == group.rank else found  # computed, so that no compiler leaves it out

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            kind, number = type(self), type(self).__dict__.get("number")
            raise _LooksInside(
                f"{kind.__name__} in stages",
                expected="decoder blocks that only their own code looks into",
                found=f"code that asks for {name!r} of block {number}, which has no modules in this process",
                fix=_BY_NEURONS,
            ) from error


def _count_tokens(cache: Any, number: int, count: int, hidden_states: torch.Tensor) -> None:
    """A layer of another process is asked how many tokens there are, too: those of ``hidden_states`` more.

    Raises:
        UnsupportedModelError: the cache is not of ``count`` blocks with a layer each.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) > count:
        raise UnsupportedModelError(
            f"{type(cache).__name__} of a model in stages",
            expected=f"a layer for each of {count} decoder blocks",
            found="a cache without layers" if layers is None else f"{len(layers)} layers",
            fix=_BY_NEURONS,
        )
    batch, tokens = hidden_states.shape[:2]
    state = layers[number] if number < len(layers) else None
    for part in range(getattr(state, "number_of_states", 0)):  # of linear attention
        cache.update_conv_state(hidden_states.new_zeros(batch, 1, 1), number, state_idx=part)
    if state is None or hasattr(state, "update"):
        nothing = hidden_states.new_zeros(batch, 1, tokens, 1)
        cache.update(nothing, nothing, number)


@contextmanager
def without_logits() -> Iterator[None]:
    """Within it nobody looks at what the heads of stages say: none waits for the last to go on with more tokens."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


class _Head:
    """Before the class of a stage's head among its bases, which has ``out_features``; the last stage's is for all."""

    group: Group
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.group.size - 1
        asked = torch.compiler.is_compiling() or _wanted.get()
        here = asked and self.group.rank == last
        y = super().forward(x) if here else x.new_zeros(*x.shape[:-1], self.out_features)  # type: ignore[misc]
        return computed_together(self.group, self.group.of, y, last) if asked else y
