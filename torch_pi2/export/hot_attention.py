"""``AttentionPart``: a layer's attention with its projections as a dense graph of fixed shape, for an accelerator.

An accelerator cannot write in place, so keys and values of earlier tokens are inputs of the graph and those of new ones
are outputs, which ``pi2::write_cache`` puts into the cache. It computes over all the room of a lane under a mask.
:class:`AttentionSwitch` stands in a decoder where the attention was, and is either of the two: what
:mod:`~torch_pi2.export.cached_attention` does on the CPU, or a part.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.attention import masks_of
from torch_pi2.export.decoder import Lanes
from torch_pi2.export.hot import linear_of
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.rewrite.install import everywhere, exchange

#: Under this name transformers finds the attention of a part.
_NAME = "pi2_hot_attention"
#: The name of the last linear layer among parts.
HEAD = "head"
#: Added to the scores of what a token does not see. Float16 holds it, too.
_MASKED = -3e4
#: Tokens of a piece in which calibration texts are read.
_PIECE = 64
#: Query heads that are computed at a time, or those of one key head if these are more.
_HEADS = 4
#: Arguments of an attention of which a part gets none, or tables instead.
_POSITIONS = ("hidden_states", "position_embeddings", "attention_mask", "position_ids", "cache_position")


@dataclass
class _Seen:
    """In the place of a cache while a part computes: what the new tokens bring, and what was there before them."""

    keys: torch.Tensor
    values: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]
    part: AttentionPart
    new: tuple[torch.Tensor, ...] = ()

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.new = key, value
        return key, value


@dataclass(frozen=True)
class AttentionCall:
    """How a decoder calls the attention of one layer.

    Attributes:
        layer: its number. cache: the argument that is the cache. name: of the module in the decoder. module: of
            transformers. window: as ``cached_attention`` has it. settings: arguments that are no tensors.
        widths: of the states, and of each tensor of positions that it is given (``position_embeddings``). room: key
            heads, tokens and head size of a lane of the cache, which is given in ``dtype``. outputs: how many it
            returns.
    """

    layer: int
    cache: str
    name: str
    module: nn.Module
    window: int
    settings: Mapping[str, Any]
    widths: tuple[int, ...]
    room: tuple[int, int, int]
    dtype: torch.dtype
    outputs: int

    def shapes(self, batch: int, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Of what an :class:`AttentionPart` takes: sizes and dtypes."""
        states = [((batch, tokens, width), torch.float32) for width in self.widths]
        masks = [((batch, 1, tokens, seen), torch.float32) for seen in (self.room[1], tokens)]
        return [*states, *[((batch, *self.room), self.dtype)] * 2, *masks]

    @property
    def open(self) -> list[tuple[int, ...]]:
        """Of each input the dimensions that are sequences or new tokens."""
        return [*[(0, 1)] * len(self.widths), (0,), (0,), (0, 2), (0, 2, 3)]


class AttentionPart(nn.Module):
    """``(x, *tables, keys, values, seen, own) -> (y, key, value)`` of B sequences with T new tokens each, all float32.

    x, y: ``[B, T, H]``. tables: ``[B, T, R]``, of the positions (cosines and sines). keys, values: of a lane
    ``[B, K, L, D]``, float32 or float16. seen ``[B, 1, T, L]``, own ``[B, 1, T, T]``: 1 for slots and for
    new tokens that a token does not see, or else 0. key, value: of the new tokens ``[B, T, K, D]``.

    Attributes:
        call: what it stands for. masked: added to scores of what a token does not see. largest: score so far, while
            :func:`samples_of` looks.
    """

    def __init__(self, call: AttentionCall) -> None:
        from transformers import AttentionInterface

        super().__init__()
        self.call, self.masked = call, _MASKED
        self.largest: float | None = None
        shared: dict[int, Any] = {id(t): t for t in (*call.module.parameters(), *call.module.buffers())}
        attention: Any = copy.deepcopy(call.module, shared)
        attention.config._attn_implementation = _NAME  # its own copy
        self.attention: nn.Module = attention
        rows: dict[nn.Module, nn.Module] = {m: _Rows(m) for m in attention.modules() if _is_linear(m) or _is_norm(m)}
        exchange(everywhere(self, rows))
        AttentionInterface.register(_NAME, _attend)

    def forward(self, x: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        *tables, keys, values, seen, own = inputs
        cache = _Seen(keys.float(), values.float(), (seen, own), self)
        given = {**self.call.settings, self.call.cache: cache, "pi2_seen": cache}
        if tables:
            given["position_embeddings"] = tuple(tables)
        y = self.attention(hidden_states=x, attention_mask=None, **given)[0]
        key, value = (t.transpose(1, 2) for t in cache.new)
        return y, key, value


class HeadPart(nn.Module):
    """``(x,) -> (logits,)``: the last linear layer, ``[B, T, H] -> [B, T, V]``."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.rows = _Rows(linear)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.rows(x),)


class _Rows(nn.Module):
    """A linear layer, or a norm, that sees all that it is given as rows of one matrix. Otherwise the HTP (Qualcomm's
    emulator, QNN 2.49) computes something else: of 4-bit weights and x ``[2, 1, H]``, of root mean squares in float16
    and x ``[1, 16, 2, 32]``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = _in_floats(module) if _is_linear(module) and not _is_float(module) else module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | QuantLinear)


def _is_norm(module: nn.Module) -> bool:
    """Whether it is one of rows, and not of several heads with weights of their own."""
    return type(module).__name__.endswith("Norm") and all(p.dim() == 1 for p in module.parameters())


def _is_float(linear: nn.Module) -> bool:
    """Whether its weights are plain numbers, and none of ours or of torchao that stand for others."""
    return not isinstance(linear, QuantLinear) and type(linear.weight.data) is torch.Tensor


def _in_floats(linear: Any) -> nn.Linear:
    """The numbers that its weights stand for."""
    weight = linear.dequantized() if isinstance(linear, QuantLinear) else linear.weight.dequantize()
    return linear_of(weight.float(), linear.bias)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    pi2_seen: _Seen,
    scaling: float | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface. Query heads of a key head are rows of one product.

    A few heads at a time, over keys and values that are joined first: of a piece of 128 tokens the scores of all heads
    do not fit into an NPU's memory on the chip, and each further step over them would be written out and read again.
    """
    batch, heads, tokens, width = query.shape
    group = heads // key.shape[1]
    scale = width**-0.5 if scaling is None else scaling
    q = (query * scale).reshape(batch, key.shape[1], group * tokens, width)
    part, step = pi2_seen.part, max(1, _HEADS // group)
    hidden = torch.cat([mask * part.masked for mask in pi2_seen.hidden], -1).repeat(1, 1, group, 1)
    found = []
    for i in range(0, key.shape[1], step):
        few = slice(i, i + step)
        keys = torch.cat([pi2_seen.keys[:, few], key[:, few]], 2)
        values = torch.cat([pi2_seen.values[:, few], value[:, few]], 2)
        scores = q[:, few] @ keys.transpose(2, 3)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if part.largest is not None:
            part.largest = max(part.largest, float(scores.abs().max()))
        found.append((scores + hidden).softmax(-1) @ values)
    return torch.cat(found, 1).reshape(batch, heads, tokens, width).transpose(1, 2), None


class Head(nn.Module):
    """In the place of a decoder's last linear layer. part: on the accelerator; None: as it was."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole
        self.part: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.whole(x) if self.part is None else self.part(x)[0]


class AttentionSwitch(nn.Module):
    """In the place of an attention of transformers. part: on the accelerator; None: as it was."""

    def __init__(self, call: AttentionCall) -> None:
        super().__init__()
        self.whole, self.call = call.module, call
        self.part: nn.Module | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.part is None:
            return self.whole(*args, **kwargs)
        layer = kwargs[self.call.cache].layers[self.call.layer]
        before = (cache.to(self.call.dtype) for cache in layer.before())
        y, key, value = self.part(*states_of(args, kwargs), *before, *layer.masks(self.call.window))
        new = (key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous())
        torch.ops.pi2.write_cache(*new, layer.rows_BT, layer.keys, layer.values)
        return (y, *[None] * (self.call.outputs - 1))


def states_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Hidden states of a call, and tables of positions."""
    x: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return [x, *(kwargs.get("position_embeddings") or ())]


def switched(lanes: Lanes, dtype: torch.dtype | None = None) -> tuple[list[AttentionSwitch], Head | None]:
    """Put an :class:`AttentionSwitch` in the place of each attention of the model of ``lanes``, and a :class:`Head`.

    Returns them: of each layer in order; None if the model has no last linear layer of its own. dtype: what keys and
    values are given to parts in; default: that of the cache.

    Raises:
        UnsupportedModelError: its attention is not one that transformers gives it, or is called with something else
            than states and positions.
    """
    calls = _calls(lanes)
    made = [AttentionSwitch(call if dtype is None else replace(call, dtype=dtype)) for call in calls]
    last: Any = lanes.model.get_output_embeddings()  # type: ignore[operator]
    head = Head(last) if _is_linear(last) else None
    new: dict[nn.Module, nn.Module] = {switch.whole: switch for switch in made}
    exchange(everywhere(lanes.model, new | ({} if head is None else {head.whole: head})))
    return made, head


def float_parts(switches: Sequence[AttentionSwitch], head: Head | None) -> dict[str, nn.Module]:
    """By name: a part of each, in floats."""
    parts: dict[str, nn.Module] = {part_name(i): AttentionPart(switch.call) for i, switch in enumerate(switches)}
    return parts if head is None else parts | {HEAD: HeadPart(head.whole)}


def place(switches: Sequence[AttentionSwitch], head: Head | None, parts: Mapping[str, nn.Module]) -> None:
    """Give each its part of that name, or none."""
    for i, switch in enumerate(switches):
        switch.part = parts.get(part_name(i))
    if head is not None:
        head.part = parts.get(HEAD)


def part_name(layer: int) -> str:
    """The name of the attention of a layer."""
    return f"attention{layer}"


#: Relative differences of logits that are rounding: of models that choose neurons by it, and where the CPU's linear
#: layers round their inputs, too.
_TOLERANCE, _ROUGH_TOLERANCE = 2e-2, 0.2


@torch.no_grad()
def check_parts(lanes: Lanes, switches: Sequence[AttentionSwitch], head: Head | None) -> None:
    """See that parts, in floats, compute what the model does: a few tokens at once, then one.

    Raises:
        UnsupportedModelError: they do not.
    """
    zero, random = torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(0)
    vocab = lanes.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    few = max(1, min(5, lanes.max_tokens - 1))
    ids_1T = torch.randint(0, vocab, (1, few + 1), generator=random)

    def read() -> torch.Tensor:
        for pair in lanes.caches():
            for cache in pair:  # what is not seen must not matter
                cache.view(torch.uint8).fill_(0)
                cache[:, :, few + 1 :].fill_(1)
        at = torch.arange(few + 1)[None]
        found = [
            lanes.run(ids_1T[:, part], at[:, part], zero, lambda c: c[:1]) for part in (slice(few), slice(few, None))
        ]
        return torch.cat(found).float()

    try:
        wanted = read()
        place(switches, head, float_parts(switches, head))
        found = read()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _refused(lanes.model, f"one that cannot be called alone ({type(error).__name__}: {error})") from error
    finally:
        place(switches, head, {})
        lanes.forget()
    off = float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
    linears = [m for switch in switches for m in switch.whole.modules() if _is_linear(m)]
    if not off <= (_TOLERANCE if all(map(_is_float, linears)) else _ROUGH_TOLERANCE):
        raise _refused(lanes.model, f"one that computes something else alone ({100 * off:.2g} % off)")


@torch.no_grad()
def samples_of(part: AttentionPart, seen: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of ``part`` when it reads sequences in pieces: the states and tables ``[1, T, ...]`` of each.

    Of every sequence there are two pieces or more: in the first the cache has nothing, and its range would be none.
    ``part`` masks by no more than what keeps its scores apart after that: 16 bits are for them, too.
    """
    (heads, room, width), found = part.call.room, []
    part.largest = 0.0
    for states in seen:
        size = max(1, min(_PIECE, room // 4, states[0].shape[1] // 2))
        caches = [torch.zeros(1, heads, room, width, dtype=part.call.dtype) for _ in range(2)]
        for at in range(0, min(room, states[0].shape[1]), size):
            piece = [x[:, at : min(room, at + size)].float() for x in states]
            end = at + piece[0].shape[1]
            masks = masks_of(torch.arange(at, end)[None], room, part.call.window)
            found.append((*piece, *(cache.clone() for cache in caches), *masks))
            for cache, new_1TKD in zip(caches, part(*found[-1])[1:]):
                cache[:, :, at:end] = new_1TKD.transpose(1, 2)
    part.masked, part.largest = -(3 * part.largest + 32), None
    return found


@torch.no_grad()
def _calls(lanes: Lanes) -> list[AttentionCall]:
    """How each layer calls its attention, seen on one token."""
    model = lanes.model
    if not lanes.ours:
        raise _refused(model, "attention in its own code")
    found: dict[int, AttentionCall] = {}
    names = {module: name for name, module in model.named_modules()}

    def seen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = next((key for key, value in kwargs.items() if hasattr(value, "layers")), "")
        layers = kwargs[cache].layers if cache else []
        index = next((i for i, layer in enumerate(layers) if layer.caller is module), None)
        if index is None:
            return  # no attention, but what has one in it
        x, *tables = states_of(args, kwargs)
        others = {k: v for k, v in kwargs.items() if k not in _POSITIONS and not hasattr(v, "layers")}
        strange = [k for k, v in others.items() if isinstance(v, torch.Tensor)]
        strange += [f"{len(args)} positional arguments"] * (len(args) > 1)
        strange += ["tables of other numbers than float32"] * any(t.dtype != torch.float32 for t in tables)
        strange += ["further results"] * (not isinstance(output, tuple) or any(o is not None for o in output[1:]))
        layer = layers[index]
        strange += ["sinks"] * layer.has_sinks
        strange += ["values of another width than keys"] * (layer.keys.shape[-1] != layer.values.shape[-1])
        if strange or x.dim() != 3:
            raise _refused(model, f"one with {', '.join(strange)}")
        shapes = (x.shape[-1], *(t.shape[-1] for t in tables)), (*layer.keys.shape[1:],)
        found[index] = AttentionCall(
            index, cache, names[module], module, layer.window, others, *shapes, layer.keys.dtype, len(output)
        )

    hooks = [m.register_forward_hook(seen, with_kwargs=True) for m, name in names.items() if name]
    zero = torch.zeros((1, 1), dtype=torch.int64)
    try:
        lanes.run(zero, zero, zero[0], lambda cache: cache[:1])
    finally:
        for hook in hooks:
            hook.remove()
        lanes.forget()
    if len(found) != lanes.layers:
        raise _refused(model, f"one that {lanes.layers - len(found)} of {lanes.layers} layers do not have")
    return [found[i] for i in range(lanes.layers)]


def _refused(model: nn.Module, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"attention of {type(model).__name__} on an accelerator",
        expected="attention of transformers, of states, positions and a cache",
        found=found,
        fix="Export with hot_attention='none'.",
    )
