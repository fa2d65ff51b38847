"""Decoder blocks divided among the processes of a group (docs/DISTRIBUTED.md): each hands hidden states to the next.

All processes run the same model on the same inputs. Blocks of other processes have no weights here. The one before this
process' first block receives the hidden states of the stage before, the one after its last block sends its own, and
the head returns in all processes what it returns in the last one.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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
    """Take the modules out of those blocks of ``model`` (of transformers, without weights) that others have.

    Raises:
        UnsupportedModelError: its blocks return more than hidden states, other code looks into them, or some take the
            keys and values of others.
    """
    config = getattr(model, "config", None)
    if config is not None and (count := getattr(config.get_text_config(), "num_kv_shared_layers", 0)):
        expected = "decoder blocks with keys and values of their own"
        raise _unsupported(f"{type(model).__name__} in stages", expected, f"{count} that take those of others")
    _remove(model, shard, here=False)
    _try(model, shard)


def _remove(model: nn.Module, shard: Shard, here: bool) -> None:
    """Remove the blocks that are here, or those that are not."""
    blocks = _blocks(model, shard)
    for name, number in blocks.items():
        if shard.has(name) != here:
            continue
        block = model.get_submodule(name)
        if not _returns_one(type(block)):
            raise _unsupported(
                f"{type(block).__name__} in stages",
                "decoder blocks that return hidden states alone",
                "one that returns a tuple, or whose source cannot be read",
            )
        for own in (block._modules, block._parameters, block._buffers):
            own.clear()
        about = {"number": number, "count": len(blocks)}
        block.__class__ = type(type(block).__name__, (_RemoteBlock, type(block)), about)


def _try(model: nn.Module, shard: Shard) -> None:
    """Run the code around the blocks of ``model``, for a prompt and a step, on the meta device and without any block.

    All processes refuse alike. Raises UnsupportedModelError: something looks into a block, a block does not take what
    the one before returns, or keys and values are not kept by block.
    """
    tried: Any = copy.deepcopy(model).to("meta")
    _remove(tried, shard, here=True)
    order = _OrderCheck()
    order.tokens = 2
    for name in _blocks(tried, shard):
        tried.get_submodule(name).register_forward_hook(order, with_kwargs=True)
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    takes = inspect.signature(tried.forward).parameters
    with torch.no_grad(), _MetaValuesAreTrue():
        try:
            output = tried(ids[:, :2], use_cache=True)
            order.tokens, order.previous = 1, None
            cache = {name: output[name] for name in ("cache", "past_key_values") if name in takes and name in output}
            tried(ids[:, 2:], use_cache=True, attention_mask=torch.ones_like(ids), **cache)
        except UnsupportedModelError:
            raise
        except Exception:  # the model asks for values, or takes more than ids: nothing more can be tried
            return


class _MetaValuesAreTrue(TorchDispatchMode):
    """Code that asks a meta tensor for a value, such as whether all of a mask is true, gets 1."""

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype, device="cpu").item()
        return func(*args, **(kwargs or {}))


class _OrderCheck:
    """A hook of all blocks of a tried model: each has to take what the one before has returned.

    Attributes:
        tokens: of the call. previous: number of the block before, and what it returned; None: there was none.
    """

    tokens: int
    previous: tuple[int, torch.Tensor] | None = None

    def __call__(self, block: _RemoteBlock, args: tuple[Any, ...], named: dict[str, Any], output: torch.Tensor) -> None:
        taken, what = args[0] if args else named["hidden_states"], f"{type(block).__name__} in stages"
        if taken.shape[:2] != (1, self.tokens):
            expected = "hidden states [batch, tokens, ...]"
            raise _unsupported(what, expected, f"{list(taken.shape)} of {self.tokens} tokens")
        if self.previous is not None and (block.number <= self.previous[0] or taken is not self.previous[1]):
            raise _unsupported(
                what,
                "decoder blocks that are called once each, with what the one before returned",
                f"block {block.number} called with something else after block {self.previous[0]}",
            )
        self.previous = block.number, output


def connect_stages(model: Any, shard: Shard, group: Group) -> None:
    """Let ``model`` exchange hidden states and logits with the other stages of ``group``.

    Raises:
        UnsupportedModelError: it has no head.
    """
    head = model.get_output_embeddings()
    if head is None:
        raise _unsupported(f"{type(model).__name__} in stages", "a causal language model with a head", "none")
    remote = {block.number: block for block in model.modules() if isinstance(block, _RemoteBlock)}
    blocks = _blocks(model, shard)
    here = shard.blocks(max(blocks.values()) + 1)
    for name, number in blocks.items():
        block = model.get_submodule(name)
        if number in here:
            block.__class__ = type(type(block).__name__, (_LocalBlock, type(block)), {"group": group})
    for number, source in ((here.start - 1, shard.rank - 1), (here.stop, shard.rank)):
        if number in remote:
            remote[number].exchange = group, source
    head.__class__ = type(type(head).__name__, (_LastRankHead, type(head)), {"group": group})


def _returns_one(kind: type[nn.Module]) -> bool:
    """Whether ``forward`` returns no tuple or list, by its source: annotations in transformers are often wrong."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, SyntaxError, TypeError):
        return False
    nodes = [*ast.walk(tree)]
    values = [node.value for node in nodes if isinstance(node, ast.Return)]
    named = {ast.dump(value) for value in values if isinstance(value, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assign) and {ast.dump(t).replace("Store", "Load") for t in node.targets} & named:
            values.append(node.value)
    return bool(values) and not any(value is None or _is_tuple(value) for value in values)


def _is_tuple(value: ast.expr) -> bool:
    """Also ``(a,) + others``, and a conditional expression with a tuple in one of its branches."""
    parts = {ast.BinOp: ("left", "right"), ast.IfExp: ("body", "orelse")}.get(type(value), ())
    return isinstance(value, (ast.Tuple, ast.List)) or any(_is_tuple(getattr(value, part)) for part in parts)


def _blocks(model: nn.Module, shard: Shard) -> dict[str, int]:
    """The numbers of all decoder blocks, by name."""
    numbers = {name: shard.block(name) for name, _ in model.named_modules() if name == block_of(name)}
    return {name: number for name, number in numbers.items() if number is not None}


class _LocalBlock:
    """A mixin before the class of a decoder block that is here: if it fails, the others are told at once.

    They wait for its hidden states, and would take those of a second attempt for something else.
    """

    group: Group

    def forward(self, *args: Any, **named: Any) -> torch.Tensor:
        return self.group.run(super().forward, *args, **named)  # type: ignore[misc]


class _RemoteBlock:
    """A mixin before the class of a decoder block that another process has.

    It returns NaN, unless hidden states are exchanged there: nothing here must take them for the model's.
    """

    number: int
    #: Of the model's blocks.
    count: int
    #: In the block before the first one here and the one after the last: the group, and the stage that sends.
    exchange: tuple[Group, int] | None = None

    def forward(self, hidden_states: torch.Tensor, *others: Any, **named: Any) -> torch.Tensor:
        for cache in (*others, *named.values()):
            if hasattr(cache, "get_seq_length"):
                _count_tokens(cache, self.number, self.count, hidden_states)
        if self.exchange is None:
            return torch.full_like(hidden_states, math.nan)
        group, source = self.exchange
        received = group.run(group.send_next, hidden_states, source)
        return received * math.nan if source == group.rank else received  # computed, so that no compiler drops it

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError as error:
            kind, number = type(self), type(self).__dict__.get("number")
            raise _unsupported(
                f"{kind.__name__} in stages",
                "decoder blocks that only their own code looks into",
                f"code that asks for {name!r} of block {number}, which has no modules in this process",
                _LooksInside,
            ) from error


def _count_tokens(cache: Any, number: int, count: int, hidden_states: torch.Tensor) -> None:
    """Add the tokens of ``hidden_states`` to a layer of ``cache``: models ask layers of other processes for their
    length, too.

    Raises:
        UnsupportedModelError: the cache does not have a layer for each of ``count`` blocks.
    """
    cache = getattr(cache, "self_attention_cache", cache)
    layers = getattr(cache, "layers", None)
    if layers is None or len(layers) > count:
        raise _unsupported(
            f"{type(cache).__name__} of a model in stages",
            f"a layer for each of {count} decoder blocks",
            "a cache without layers" if layers is None else f"{len(layers)} layers",
        )
    batch, tokens = hidden_states.shape[:2]
    state = layers[number] if number < len(layers) else None
    for part in range(getattr(state, "number_of_states", 0)):  # linear attention
        cache.update_conv_state(hidden_states.new_zeros(batch, 1, 1), number, state_idx=part)
    if state is None or hasattr(state, "update"):
        nothing = hidden_states.new_zeros(batch, 1, tokens, 1)
        cache.update(nothing, nothing, number)


@contextmanager
def without_logits() -> Iterator[None]:
    """While this is entered, nobody reads logits: stages do not wait for the last one before they go on."""
    token = _wanted.set(False)
    try:
        yield
    finally:
        _wanted.reset(token)


class _LastRankHead:
    """A mixin before the class of a stage's head, which has ``out_features``: all return the last stage's logits."""

    group: Group
    out_features: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = self.group.size - 1
        wanted = torch.compiler.is_compiling() or _wanted.get()
        here = wanted and self.group.rank == last
        y = super().forward(x) if here else x.new_zeros(*x.shape[:-1], self.out_features)  # type: ignore[misc]
        return self.group.run(self.group.broadcast, y, last) if wanted else y
