"""Attention with its projections on an accelerator, for prompts: dense graphs of fixed shape.

An accelerator cannot write in place. Cached keys and values are inputs of the graph, over all slots of a lane under a
mask; new ones are outputs, which ``pi2::write_cache`` puts into the cache. :class:`AttentionPart` is such a graph,
:func:`with_parts` puts them into a decoder.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.errors import ConfigError, Pi2Error, UnsupportedModelError
from torch_pi2.export import qnn
from torch_pi2.export.attention import masks_of
from torch_pi2.export.calibrate import calls_of
from torch_pi2.export.decoder import Lanes, sizes_of
from torch_pi2.export.hot import linear_of
from torch_pi2.export.settings import ExportSettings
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.install import replace_modules

#: Name of a part's attention function in transformers.
_NAME = "pi2_hot_attention"
#: Added to masked scores; within float16.
_MASKED = -3e4
#: Tokens of a piece of calibration text.
_PIECE = 64
#: Query heads computed at a time, at least those of one key head.
_HEADS = 4
#: Arguments of attention that a part does not get, or gets as tables.
_POSITIONS = ("hidden_states", "position_embeddings", "attention_mask", "position_ids", "cache_position")


@dataclass
class _Seen:
    """The cache given to attention while a part computes: cached and new keys and values."""

    keys: torch.Tensor
    values: torch.Tensor
    hidden: tuple[torch.Tensor, torch.Tensor]
    part: "AttentionPart"
    new: tuple[torch.Tensor, ...] = ()

    def update(self, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.new = key, value
        return key, value


@dataclass(frozen=True)
class AttentionCall:
    """How a decoder calls the attention of one layer: ``module`` of transformers, called ``name`` in the decoder, of
    ``layer``. ``cache``: name of the cache argument. ``window``: as in ``cached_attention``. ``settings``: arguments
    that are no tensors. ``widths``: of hidden states and of each tensor in ``position_embeddings``. ``lane_shape``: key
    heads, tokens and head size of a lane of the cache. ``dtype``: of cached keys and values as inputs. ``outputs``: of
    the module.
    """

    layer: int
    cache: str
    name: str
    module: nn.Module
    window: int
    settings: Mapping[str, Any]
    widths: tuple[int, ...]
    lane_shape: tuple[int, int, int]
    dtype: torch.dtype
    outputs: int

    def shapes(self, batch: int, tokens: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and dtypes of the inputs of an :class:`AttentionPart`."""
        states = [((batch, tokens, width), torch.float32) for width in self.widths]
        masks = [((batch, 1, tokens, seen), torch.float32) for seen in (self.lane_shape[1], tokens)]
        return [*states, *[((batch, *self.lane_shape), self.dtype)] * 2, *masks]

    @property
    def open(self) -> list[tuple[int, ...]]:
        """The dimensions of each input that count sequences or new tokens."""
        return [*[(0, 1)] * len(self.widths), (0,), (0,), (0, 2), (0, 2, 3)]


class AttentionPart(nn.Module):
    """``(x, *tables, keys, values, seen, own) -> (y, key, value)`` for B sequences with T new tokens each, float32.

    x, y: ``[B, T, H]``. tables: cosines and sines ``[B, T, R]``. keys, values: cached ``[B, K, L, D]``, float32 or
    float16. seen ``[B, 1, T, L]``, own ``[B, 1, T, T]``: masks over slots and new tokens, 0 where visible, else 1.
    key, value: of the new tokens ``[B, T, K, D]``.

    Attributes:
        masked: added to masked scores. largest: the largest score so far, while :func:`samples_of` collects it.
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
        replace_modules(self, rows)
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


class _Rows(nn.Module):
    """A linear layer or norm over the rows of a matrix. With more dimensions the HTP (Qualcomm's emulator, QNN 2.49) is
    wrong: for 4-bit weights with x ``[2, 1, H]``, and for RMS norms in float16 with x ``[1, 16, 2, 32]``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        if _is_linear(module) and not _is_float(module):  # a dequantised copy
            linear: Any = module
            weight = linear.dequantized() if isinstance(linear, QuantLinear) else linear.weight.dequantize()
            module = linear_of(weight.float(), linear.bias)
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.module(x.reshape(-1, x.shape[-1]))
        return y.reshape(*x.shape[:-1], y.shape[-1])


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | QuantLinear)


def _is_norm(module: nn.Module) -> bool:
    """Whether it normalises rows, without weights per head."""
    return type(module).__name__.endswith("Norm") and all(p.dim() == 1 for p in module.parameters())


def _is_float(linear: Any) -> bool:
    """Whether its weights are not quantised, by us or by torchao."""
    return not isinstance(linear, QuantLinear) and type(linear.weight.data) is torch.Tensor


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
    """transformers' attention interface, a few heads at a time: scores of all exceed an NPU's on-chip memory."""
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


class AcceleratedAttention(nn.Module):
    """Replaces transformers' attention by ``part``."""

    def __init__(self, call: AttentionCall, part: nn.Module) -> None:
        super().__init__()
        self.call, self.part = call, part

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer = kwargs[self.call.cache].layers[self.call.layer]
        before = (cache.to(self.call.dtype) for cache in layer.before())
        y, key, value = self.part(*states_of(args, kwargs), *before, *layer.masks(self.call.window))
        new = (key.transpose(1, 2).contiguous(), value.transpose(1, 2).contiguous())
        torch.ops.pi2.write_cache(*new, layer.rows_BT, layer.keys, layer.values)
        return (y, *[None] * (self.call.outputs - 1))


def states_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Hidden states and position tables of a call."""
    x: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return [x, *(kwargs.get("position_embeddings") or ())]


def with_parts(lanes: Lanes, calls: Sequence[AttentionCall], parts: Mapping[str, nn.Module]) -> Lanes:
    """A variant of ``lanes`` whose attention is computed by ``parts``, of all layers or none."""
    variant = lanes.variant()
    replacements: dict[nn.Module, nn.Module] = {
        variant.model.get_submodule(call.name): AcceleratedAttention(call, parts[part_name(call.layer)])
        for call in (calls if parts else ())
    }
    replace_modules(variant.model, replacements)
    return variant


def float_parts(calls: Sequence[AttentionCall]) -> dict[str, nn.Module]:
    return {part_name(call.layer): AttentionPart(call) for call in calls}


def part_name(layer: int) -> str:
    return f"attention{layer}"


#: Relative differences of logits due to rounding; the second where the CPU's linear layers round their inputs, too.
_TOLERANCE, _ROUGH_TOLERANCE = 2e-2, 0.2


@torch.no_grad()
def check_parts(lanes: Lanes, calls: Sequence[AttentionCall]) -> None:
    """Compare parts in float32 with the model: a few tokens at once, then one. Raises UnsupportedModelError."""
    zero, random = torch.zeros(1, dtype=torch.int64), torch.Generator().manual_seed(0)
    vocab = lanes.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    few = max(1, min(5, lanes.max_tokens - 1))
    ids_1T = torch.randint(0, vocab, (1, few + 1), generator=random)

    def read(lanes: Lanes) -> torch.Tensor:
        for cache in (cache for pair in lanes.caches() for cache in pair):  # masked slots must not matter
            cache.zero_()[:, :, few + 1 :].fill_(1)
        at = torch.arange(few + 1)[None]
        pieces = (slice(few), slice(few, None))
        return torch.cat([lanes.run(ids_1T[:, p], at[:, p], zero, lambda c: c[:1]) for p in pieces]).float()

    try:
        expected = read(lanes)
        logits = read(with_parts(lanes, calls, float_parts(calls)))
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _refused(lanes.model, f"one that cannot be called alone ({type(error).__name__}: {error})") from error
    finally:
        lanes.forget()
    difference = float((logits - expected).norm() / expected.norm().clamp_min(1e-30))
    linears = [m for call in calls for m in call.module.modules() if _is_linear(m)]
    if not difference <= (_TOLERANCE if all(map(_is_float, linears)) else _ROUGH_TOLERANCE):
        raise _refused(lanes.model, f"one that computes something else alone ({100 * difference:.2g} % off)")


@torch.no_grad()
def samples_of(part: AttentionPart, seen: Sequence[Sequence[torch.Tensor]]) -> list[tuple[torch.Tensor, ...]]:
    """Inputs of ``part`` for sequences read in pieces; ``seen``: the states and tables ``[1, T, ...]`` of each.

    A sequence has at least two pieces, as the cache of the first one is empty and would have a range of zero. Sets
    ``part.masked`` just large enough to separate scores, with which it shares 16 bits.
    """
    (heads, room, width), found = part.call.lane_shape, []
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
def attention_calls(lanes: Lanes, dtype: torch.dtype | None = None) -> list[AttentionCall]:
    """How each layer calls its attention, observed on one token.

    ``dtype``: of the cached keys and values that parts get (default: the cache's). Raises UnsupportedModelError: the
    model has attention code of its own, or calls it with other arguments than states and positions.
    """
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
            return  # a module around the attention
        x, *tables = states_of(args, kwargs)
        others = {k: v for k, v in kwargs.items() if k not in _POSITIONS and not hasattr(v, "layers")}
        strange = [k for k, v in others.items() if isinstance(v, torch.Tensor)]
        if strange or len(args) > 1 or not isinstance(output, tuple):
            raise _refused(model, f"one that is called with {', '.join(strange) or 'something else'}")
        layer = layers[index]
        shapes = (x.shape[-1], *(t.shape[-1] for t in tables)), (*layer.keys.shape[1:],)
        found[index] = AttentionCall(
            index, cache, names[module], module, layer.window, others, *shapes, dtype or layer.keys.dtype, len(output)
        )

    zero = torch.zeros((1, 1), dtype=torch.int64)
    with ExitStack() as after:
        after.callback(lanes.forget)
        for module, name in names.items():
            if name:
                after.enter_context(module.register_forward_hook(seen, with_kwargs=True))
        lanes.run(zero, zero, zero[0], lambda cache: cache[:1])
    if len(found) != lanes.layers:
        raise _refused(model, f"one that {lanes.layers - len(found)} of {lanes.layers} layers do not have")
    return [found[i] for i in range(lanes.layers)]


def _refused(model: nn.Module, found: str) -> UnsupportedModelError:
    what = f"attention of {type(model).__name__} on an accelerator"
    expected = "attention of transformers, of states, positions and a cache"
    return UnsupportedModelError(what, expected=expected, found=found, fix="Export with hot_attention='none'.")


#: The attention calls of a decoder's layers; and method -> name -> part on the accelerator, empty: on the CPU.
PlacedAttention = tuple[Sequence[AttentionCall], Mapping[str, Mapping[str, nn.Module]]]
_ON_CPU: PlacedAttention = (), {}


def place_attention(
    source: nn.Module,
    lanes: Lanes,
    methods: Sequence[str],
    settings: ExportSettings,
    calibration: Sequence[Batch],
    report: dict[str, Any],
    ffn_bytes: int,
) -> PlacedAttention:
    """Decide whether prompts have attention on the accelerator, and compile its parts. ``source``: the model that
    ``lanes`` copied. ``methods``: those with hot parts. ``calibration``: empty: no quantisation. ``report``: gets
    ``attention`` and ``parts``. ``ffn_bytes``: of FFN weights on the NPU. Raises ConfigError, UnsupportedModelError:
    what was asked for is not possible.
    """
    asked, soc = settings.hot_attention, settings.soc
    prompts = [name for name in methods if name.startswith("prefill_")]
    if asked == "none" or (asked is None and not (soc and prompts and settings.kv != "int8")):
        return _ON_CPU
    try:
        if not prompts:
            argument(asked, "export(hot_attention='prompts')", "Pass hot_prompts, sizes below max_tokens.").wrong(
                "methods that read prompts on the accelerator (hot_prompts)", "none"
            )
        # quantised graphs have no 16-bit float inputs
        quantised = soc is not None and settings.precision != "fp16"
        calls = attention_calls(lanes, torch.float32 if quantised else None)
        check_parts(lanes, calls)
        if soc is None:
            return calls, dict.fromkeys(prompts, float_parts(calls))
        block = _block([call.module for call in calls], settings, ffn_bytes)
    except Pi2Error as error:
        if asked:
            raise
        report["attention"] = f"on the CPU: {error.found}"
        return _ON_CPU

    def programs() -> Iterator[tuple[str, torch.export.ExportedProgram, Any]]:
        """Name, program and inputs of each part, for the NPU's compiler."""
        precision, gptq = "w4a16" if block else "w8a16", settings.quantization == "gptq"
        attentions = [source.get_submodule(call.name) for call in calls]
        seen: list[Any] = [[]] * len(attentions)
        if calibration:
            seen = calls_of(source, attentions, states_of, calibration)
        for call, states in zip(calls, seen):
            part = AttentionPart(call)
            graphs = {name: call.shapes(*sizes_of(name)) for name in prompts}
            samples = samples_of(part, states) if calibration else []
            program = qnn.open_program(part, qnn.zeros(call.shapes(2, 3)), call.open)
            yield part_name(call.layer), program, qnn.PartInputs(samples, graphs, call.open, precision, block, gptq)

    lowered = qnn.lower_parts(programs(), settings.qnn, progress=settings.progress)
    report |= {"attention": "prompts", "parts": lowered.report}
    return calls, lowered.modules


def _block(modules: Sequence[nn.Module], settings: ExportSettings, ffn_bytes: int) -> int:
    """4-bit weights per scale; 0: 8 bits with a scale per output channel. Raises ConfigError: neither fits the NPU."""
    widths = {m.in_features for module in modules for m in module.modules() if isinstance(m, nn.Linear | QuantLinear)}
    four_bits = settings.precision == "w4a16" and not any(width % qnn.PART_BLOCK for width in widths)
    weights = sum(p.numel() for module in modules for p in module.parameters())
    for block in (0, qnn.PART_BLOCK) if four_bits else (0,):
        size = round(weights * settings.qnn.part_bits(block) / 8)
        if ffn_bytes + size <= qnn.MOST_BYTES:
            return block
    what = f"export(hot_attention={settings.hot_attention!r}) for {settings.soc}"
    expected = f"at most {qnn.MOST_BYTES >> 20} MiB of weights, which an NPU can have"
    parts = f"attention {size >> 20} MiB, feed-forward layers {ffn_bytes >> 20} MiB in {settings.precision}"
    fix = "Leave it out (the CPU computes attention), or pass blocks=32 for smaller feed-forward layers."
    raise ConfigError(what, expected=expected, found=f"{(ffn_bytes + size) >> 20} MiB: {parts}", fix=fix)
