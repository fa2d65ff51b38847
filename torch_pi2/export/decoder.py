"""Methods of a Hugging Face decoder over one static KV cache of several lanes: ``forward``, ``decode_bN``, ``fork``.

A lane holds one sequence. Methods take the positions of their tokens, so sequences of a batch may differ in length, and
a new prompt starts at position 0.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.memory import trim, untouched_zeros
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export import attention
from torch_pi2.export.attention import Select
from torch_pi2.export.program import MethodSpec, named_failures
from torch_pi2.layers.prompt import sparse_only

_NOT_YET = "Run it with PyTorch; this attention is not in the exporter yet."


class Lanes(nn.Module):
    """A Hugging Face causal language model with its KV cache as buffers ``key_i`` and ``value_i`` of each layer.

    Shape ``[lanes, KV heads, max_tokens, head size]``, see :mod:`~torch_pi2.export.attention`. For models with their
    own attention code ``[lanes * max_tokens, KV heads, head size]``: ExecuTorch writes in place only at vector indices.
    Raises UnsupportedModelError: its cache does not hold keys and values of all tokens.
    """

    def __init__(self, model: nn.Module, lanes: int, max_tokens: int, kv: str = "float32") -> None:
        super().__init__()
        self.model = model
        config: Any = model.config
        self.ours = attention.takes_attention(model)
        _check_attention(model, config.get_text_config(decoder=True), max_tokens, kv, self.ours)
        attention.reset_rotary(model)
        attention.define()
        with torch.no_grad():  # cache shapes from one token: configurations name them in many ways
            seen = cache_of(model(input_ids=torch.zeros((1, 1), dtype=torch.int64), use_cache=True)).layers
        self.layers, self.lanes, self.max_tokens = len(seen), lanes, max_tokens
        self._widths = [(layer.keys.shape[3], layer.values.shape[3]) for layer in seen]
        for i, layer in enumerate(seen):
            width = max(self._widths[i])
            for kind, one in (("key", layer.keys), ("value", layer.values)):
                if self.ours:
                    row = attention.packed(torch.zeros(width), attention.KV_DTYPES[kv])
                    cache = untouched_zeros((lanes, one.shape[1], max_tokens, len(row)), row.dtype)
                else:
                    cache = untouched_zeros((lanes * max_tokens, one.shape[1], one.shape[3]), torch.float32)
                self.register_buffer(f"{kind}_{i}", cache, persistent=False)
        self.register_buffer("slots", torch.arange(max_tokens), persistent=False)

    def variant(self) -> "Lanes":
        """A copy with modules of its own that shares weights and KV cache."""
        tensors: dict[int, Any] = {id(tensor): tensor for tensor in (*self.parameters(), *self.buffers())}
        return copy.deepcopy(self, tensors)

    def caches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(getattr(self, f"key_{i}"), getattr(self, f"value_{i}")) for i in range(self.layers)]

    def lane(self, lane: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of one lane in each layer, ``[max_tokens, KV heads, ...]``."""

        def rows(cache: torch.Tensor) -> torch.Tensor:
            return cache[lane].transpose(0, 1) if self.ours else cache.view(self.lanes, -1, *cache.shape[1:])[lane]

        return [(rows(keys), rows(values)) for keys, values in self.caches()]

    def floats(self, lane: int, tokens: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a lane's first tokens in a layer, float32 ``[tokens, KV heads, width]``."""
        held = zip(self.lane(lane)[layer], self._widths[layer])
        keys, values = (attention.unpacked(rows[:tokens])[..., :width] for rows, width in held)
        return keys, values

    def forget(self) -> None:
        """Empty all lanes."""
        for cache in (cache for pair in self.caches() for cache in pair):
            cache.zero_()

    def run(
        self, ids_BT: torch.Tensor, positions_BT: torch.Tensor, lane_B: torch.Tensor, select: Select, last: Any = 1
    ) -> Any:
        """Logits ``[B, 1, V]`` of the last tokens, or of those at ``last [1]``; ``select``: takes lanes of a cache."""
        from transformers.cache_utils import Cache

        rows_BT = lane_B[:, None] * self.max_tokens + positions_BT
        layers = attention.lane_layers(self.caches(), rows_BT, self.lanes, select, self.ours)
        slots: Any = self.slots
        seen_B1TL = slots[None, None, None, : 1 if self.ours else None] <= positions_BT[:, None, :, None]
        with attention.exportable_attention(self.model, layers):
            how: Any = {"use_cache": True, "logits_to_keep": last, cache_name(self.model): Cache(layers=layers)}
            mask = torch.where(seen_B1TL, 0.0, float("-inf"))
            output = self.model(input_ids=ids_BT, position_ids=positions_BT, attention_mask=mask, **how)
        return output.logits


class Forward(nn.Module):
    """``(ids [1, T], start [1]) -> logits [1, 1, V]``: any number of tokens of one lane.

    ``start`` is the first token's row in the cache, lane * ``max_tokens`` + position: in lane 0 the position, as
    in ExecuTorch's LLM runner. With fixed T the prompt is padded, and ``last [1]`` is the index of its last token.
    """

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, ids: torch.Tensor, start: torch.Tensor, last: torch.Tensor | int = 1) -> Any:
        most = self.lanes.max_tokens
        lane_1 = torch.div(start, most, rounding_mode="floor")
        positions_1T = (start % most + torch.arange(ids.shape[1]))[None]
        return self.lanes.run(ids, positions_1T, lane_1, lambda cache: cache.index_select(0, lane_1), last)


class Decode(nn.Module):
    """``(ids [B, 1], positions [B, 1]) -> logits [B, 1, V]`` of lanes 0 to B - 1."""

    def __init__(self, lanes: Lanes, batch: int) -> None:
        super().__init__()
        self.lanes, self.batch = lanes, batch

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.lanes.run(ids, positions, torch.arange(self.batch), lambda cache: cache[: self.batch])


class Fork(nn.Module):
    """``(lanes [L]) -> lanes``: lane i continues the sequence of lane ``lanes[i]``."""

    def __init__(self, lanes: Lanes) -> None:
        super().__init__()
        self.lanes = lanes

    def forward(self, lanes: torch.Tensor) -> torch.Tensor:
        for cache in (cache for pair in self.lanes.caches() for cache in pair):
            rows = cache.view(self.lanes.lanes, -1)
            cache.copy_(rows.index_select(0, lanes).view(cache.shape))
        return lanes + 0


def _check_attention(model: nn.Module, config: Any, max_tokens: int, kv: str, ours: bool) -> None:
    """Raises UnsupportedModelError for attention that lanes cannot hold, ConfigError for too many tokens."""

    def refuse(expected: str, found: str, fix: str = _NOT_YET) -> NoReturn:
        raise UnsupportedModelError(f"export of {type(model).__name__}", expected=expected, found=found, fix=fix)

    if getattr(config, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        fix = "Export its parts as modules, with args=... and dynamic_shapes=...."
        refuse("a decoder", "an encoder and a decoder", fix)
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        found = "attention with linear biases (ALiBi), which it makes of a mask without positions"
        refuse("positions in rotary embeddings or tables", found)
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and max_tokens > positions:
        argument(max_tokens, "export(max_tokens=...)", "Export with fewer.").wrong(
            f"at most {positions}, the positions that the model has (max_position_embeddings)"
        )
    if kv != "float32" and not ours:
        found = "one with attention in its own code, which reads keys and values in float32"
        refuse("a model that calls the attention of transformers that it is given", found, "Leave kv out.")
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    sliding = "sliding_attention" in kinds or (window and getattr(config, "use_sliding_window", True))
    others = sorted(kinds - {"full_attention", "sliding_attention"})
    if sliding and window and window < max_tokens and not ours:
        others.append(f"a sliding window of {window} tokens, fewer than {max_tokens}, in attention of its own code")
    if others:
        fix = "Export with max_tokens within the window, or a model with such attention."
        refuse("attention to all tokens before, or to those of a window", ", ".join(others), fix)


#: By method.
Programs = Mapping[str, torch.export.ExportedProgram]


def method_names(batches: Sequence[int], prompts: Sequence[int] = ()) -> list[str]:
    """Names of a decoder's methods; ``prompts``: token counts of ``prefill_N``."""
    names = ["forward", *(f"prefill_{tokens}" for tokens in prompts), *(f"decode_b{batch}" for batch in batches)]
    return [*names, "fork"] if max(batches) > 1 else names


def method_spec(name: str, lanes: Lanes, forward_tokens: int) -> MethodSpec:
    """The method ``name`` of ``lanes``; ``forward_tokens``: most tokens per call of ``forward``."""
    start = torch.zeros(1, dtype=torch.int64)
    if name == "fork":
        return MethodSpec(Fork(lanes), (torch.zeros(lanes.lanes, dtype=torch.int64),))
    if name == "forward":
        ids = torch.zeros((1, min(8, forward_tokens)), dtype=torch.int64)
        length = torch.export.Dim.DYNAMIC(min=1, max=forward_tokens)
        return MethodSpec(Forward(lanes), (ids, start), dynamic_shapes=({1: length}, None))
    batch, tokens = sizes_of(name)
    ids = torch.zeros((batch, tokens), dtype=torch.int64)
    if name.startswith("prefill_"):
        return MethodSpec(Forward(lanes), (ids, start, start + 1))
    return MethodSpec(Decode(lanes, batch), (ids, ids.clone()))


def sizes_of(method: str) -> tuple[int, int]:
    """Sequences and tokens per sequence of a method decode_bN or prefill_N."""
    kind, _, size = method.partition("_")
    return (1, int(size)) if kind == "prefill" else (int(size.removeprefix("b")), 1)


def prompt_sizes(methods: Iterable[str]) -> list[int]:
    """Token counts of the methods prefill_N among ``methods``."""
    return [sizes_of(name)[1] for name in methods if name.startswith("prefill_")]


#: Tokens compared at the first and last positions, and the smallest max_tokens.
_HEAD, _TAIL, _LEAST = 40, 8, 3
#: Largest buffer that a model may change while it runs, such as rotary frequencies.
_SMALL = 1 << 16
#: Relative differences due to rounding, in smooth models and others.
_TOLERANCE, _ROUGH_TOLERANCE = 1e-3, 2e-2


def check_traced(lanes: Lanes, programs: Programs, *, max_prompt: int, smooth: bool, decode: bool) -> None:
    """Compare ``programs`` with the model of ``lanes``, whose layers have to be those of ``forward`` (``max_prompt``
    tokens per call). ``smooth``: small differences stay small: no rounded activations, predictors or thresholds.
    ``decode``: decoding can run here, as it was not compiled for an accelerator. Raises ConfigError: they agree only up
    to a length, which the message has as the largest valid ``max_tokens``. UnsupportedModelError: they do not agree.
    """
    traced = _Traced(lanes, programs, max_prompt, decode)
    tolerance = _TOLERANCE if smooth else _ROUGH_TOLERANCE
    name = type(lanes.model).__name__

    def difference(length: int) -> float:
        with named_failures(f"export of {name}", f"a decoder that reads {length} tokens with a cache"):
            return _difference(traced, length)

    length = lanes.max_tokens
    if all(difference(n) <= tolerance for n in {min(length, _HEAD + _TAIL), length}):
        return
    if not (least := difference(_LEAST)) <= tolerance:
        expected = "the same logits with keys and values of fixed size as without"
        found = f"others ({100 * least:.2g} % off within {_LEAST} tokens): its attention is of another kind"
        raise UnsupportedModelError(f"export of {name}", expected=expected, found=found, fix=_NOT_YET)
    good, bad = _LEAST, length
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if difference(middle) <= tolerance else (good, middle)
    argument(length, "export(max_tokens=...)", f"Export with max_tokens={good}.").wrong(
        f"at most {good}: {name} computes its attention otherwise in longer sequences (rotary embeddings that "
        "depend on the length, a window, or a scale)"
    )


class _Traced:
    """Traced methods, run in the last lane."""

    def __init__(self, lanes: Lanes, programs: Programs, max_prompt: int, decode: bool) -> None:
        self.lanes, self.lane, self.max_prompt = lanes, lanes.lanes - 1, max_prompt
        self._forward: Any = programs["forward"].module()
        self._decode: Any = programs[f"decode_b{lanes.lanes}"].module() if decode else None

    def read(self, ids_1T: torch.Tensor, position: int) -> torch.Tensor:
        """Logits ``[V]`` after a prompt that starts at ``position``."""
        start = self.lane * self.lanes.max_tokens + position
        pieces = ids_1T.split(self.max_prompt, 1)
        starts = [torch.tensor([start + i * self.max_prompt]) for i in range(len(pieces))]
        logits = [self._forward(x.contiguous(), at) for x, at in zip(pieces, starts)]
        return logits[-1][0, -1]

    def step(self, id_11: torch.Tensor, position: int) -> torch.Tensor:
        """Logits ``[V]`` after one more token."""
        if self._decode is None:
            return self.read(id_11, position)
        positions_B1 = torch.zeros((self.lanes.lanes, 1), dtype=torch.int64)
        positions_B1[self.lane] = position
        logits_B1V: torch.Tensor = self._decode(id_11.repeat(self.lanes.lanes, 1), positions_B1)
        return logits_B1V[self.lane, -1]


@torch.no_grad()
def _difference(traced: _Traced, length: int) -> float:
    """The largest relative difference of logits, keys and values in a sequence of ``length`` tokens: the model reads
    the first and last ones at once, at their positions, so that it sees the length; then the last ones again after a
    filled cache.
    """
    from transformers import DynamicCache

    lanes, model = traced.lanes, traced.lanes.model
    head = min(_HEAD, length - 1)
    tail = min(_TAIL, length - head)
    before = length - tail
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids_1T = torch.randint(0, vocab, (1, head + tail), generator=torch.Generator().manual_seed(0))
    positions_1T = torch.cat((torch.arange(head), torch.arange(before, length)))[None]
    with sparse_only():  # long prompts may take another path
        beginning = {cache_name(model): DynamicCache()}  # keeps tokens outside windows, too
        whole = _run(model, input_ids=ids_1T, **beginning, **({"position_ids": positions_1T} if before > head else {}))
        differences = [_relative(traced.read(ids_1T[:, :head], 0), whole.logits[0, head - 1])]
        for i, layer in enumerate(cache_of(whole).layers):
            for found_HKD, wanted_1KTD in zip(lanes.floats(traced.lane, head, i), (layer.keys, layer.values)):
                differences.append(_relative(found_HKD, wanted_1KTD[0, :, :head].transpose(0, 1)))
        for keys_LKD, values_LKD in lanes.lane(traced.lane):
            _fill(keys_LKD, head, before, 0)
            _fill(values_LKD, head, before, 3)
        if before > head:
            cache = _cache(lanes, traced.lane, before)
            whole = _run(model, input_ids=ids_1T[:, head:], **{cache_name(model): cache})
        if tail > 1:
            traced.read(ids_1T[:, head:-1], before)
        differences.append(_relative(traced.step(ids_1T[:, -1:], length - 1), whole.logits[0, -1]))
    lanes.forget()
    return max(differences)


def _fill(rows_LKD: torch.Tensor, head: int, before: int, ramp: float) -> None:
    """Fill the rows between with random numbers of equal scale that drift, so that means over parts differ."""
    random = torch.Generator().manual_seed(0)
    shape = rows_LKD[head:before].shape
    drift_LKD = torch.linspace(-ramp, ramp, shape[0])[:, None, None] * torch.randn(shape[1:], generator=random)
    rows_LKD[head:before] = (torch.randn(shape, generator=random) + drift_LKD) * rows_LKD[:head].std(0)


def _run(model: Any, **inputs: Any) -> Any:
    """Outputs of ``model``, whose small buffers are restored: traced methods share them."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() <= _SMALL]
    try:
        return model(use_cache=True, **inputs)
    finally:
        for buffer, before in saved:
            buffer.copy_(before)


def _cache(lanes: Lanes, lane: int, tokens: int) -> Any:
    """transformers' cache of a lane's first tokens; layers are converted to float32 one at a time, to save memory."""
    from transformers.cache_utils import Cache, DynamicLayer

    class Layer(DynamicLayer):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.index, self.is_initialized = index, True
            self.keys = torch.zeros(1).expand(1, 1, tokens, 1)  # the model reads its length from it

        def update(self, *new: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
            trim()
            before = lanes.floats(lane, tokens, self.index)
            return tuple(torch.cat((rows.transpose(0, 1)[None], one), 2) for rows, one in zip(before, new))

    return Cache(layers=[Layer(i) for i in range(lanes.layers)])


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    off = float((found - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30))
    return off if off == off else float("inf")
