"""See that a traced decoder computes what its model does, for sequences of every length that it has room for.

What depends on the length of a sequence (windows, rotary embeddings, tables of positions) is fixed by tracing, and no
configuration tells all of it. So the traced methods read a few tokens at the beginning and at the end of their room;
in between the cache is filled at random, which costs little however large the room is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from torch_pi2.base.heap import trim
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.decoder import Lanes
from torch_pi2.export.program import named_failures
from torch_pi2.layers.prompt import sparse_only

#: Tokens that are read at the beginning and at the end, and the fewest that a bundle has room for.
_HEAD, _TAIL, _LEAST = 40, 8, 3
#: Numbers of a buffer that a model may change while it runs, such as frequencies.
_SMALL = 1 << 16
#: Relative differences that are rounding: of models that are smooth, and of others.
_TOLERANCE, _ROUGH_TOLERANCE = 1e-3, 2e-2


def check_traced(
    lanes: Lanes, programs: Mapping[str, torch.export.ExportedProgram], *, max_prompt: int, smooth: bool, decode: bool
) -> None:
    """Compare ``programs`` with the model of ``lanes``, whose layers have to be as in ``forward``.

    Args:
        max_prompt: tokens of one call of ``forward``. smooth: whether small differences stay small (nothing rounds
            activations, and neurons are neither predicted nor cut).
        decode: whether decoding runs here, too (not what was compiled for an accelerator).

    Raises:
        ConfigError: they agree up to some length; the message has it, the largest ``max_tokens`` that can be exported.
        UnsupportedModelError: they do not agree.
    """
    traced = _Traced(lanes, programs, max_prompt, decode)
    tolerance = _TOLERANCE if smooth else _ROUGH_TOLERANCE
    name = type(lanes.model).__name__

    def off(length: int) -> float:
        with named_failures(f"export of {name}", f"a decoder that reads {length} tokens with a cache"):
            return _difference(traced, length)

    room = lanes.max_tokens
    if all(off(length) <= tolerance for length in {min(room, _HEAD + _TAIL), room}):
        return
    if not (found := off(_LEAST)) <= tolerance:
        raise UnsupportedModelError(
            f"export of {name}",
            expected="the same logits with keys and values of fixed size as without",
            found=f"others ({100 * found:.2g} % off within {_LEAST} tokens): its attention is of another kind",
            fix="Run it with PyTorch; this attention is not in the exporter yet.",
        )
    most = _largest(lambda length: off(length) <= tolerance, _LEAST, room)
    raise ConfigError(
        "export(max_tokens=...)",
        expected=f"at most {most}: {name} computes its attention otherwise in longer sequences (rotary embeddings that "
        "depend on the length, a window, or a scale)",
        found=str(room),
        fix=f"Export with max_tokens={most}.",
    )


def _largest(fits: Callable[[int], bool], good: int, bad: int) -> int:
    """The largest number that fits; ``good`` does, ``bad`` and those above it do not."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


class _Traced:
    """Traced methods, and what they have in the last lane."""

    def __init__(
        self, lanes: Lanes, programs: Mapping[str, torch.export.ExportedProgram], max_prompt: int, decode: bool
    ) -> None:
        self.lanes, self.lane, self.max_prompt = lanes, lanes.lanes - 1, max_prompt
        self._forward: Any = programs["forward"].module()
        self._decode: Any = programs[f"decode_b{lanes.lanes}"].module() if decode else None

    def read(self, ids_1T: torch.Tensor, position: int) -> torch.Tensor:
        """Logits ``[V]`` after a prompt, whose first token is at ``position``."""
        logits_11V = torch.empty(1, 1, 0)
        for at in range(0, ids_1T.shape[1], self.max_prompt):
            part_1T = ids_1T[:, at : at + self.max_prompt].contiguous()
            start = self.lane * self.lanes.max_tokens + position + at
            logits_11V = self._forward(part_1T, torch.tensor([start]))
        return logits_11V[0, -1]

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
    """The largest relative difference of logits, keys and values in a sequence of ``length`` tokens.

    The model reads its first and last tokens at once, each at its position, so that it knows how long the sequence is;
    then the last ones after what a cache has of all others.
    """
    from transformers import DynamicCache

    lanes, model = traced.lanes, traced.lanes.model
    head = min(_HEAD, length - 1)
    tail = min(_TAIL, length - head)
    before = length - tail
    vocab = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids_1T = torch.randint(0, vocab, (1, head + tail), generator=torch.Generator().manual_seed(0))
    positions_1T = torch.cat((torch.arange(head), torch.arange(before, length)))[None]
    with sparse_only():  # long prompts may be computed otherwise
        beginning = {cache_name(model): DynamicCache()}  # that keeps what windows do not see
        whole = _run(model, input_ids=ids_1T, **beginning, **({"position_ids": positions_1T} if before > head else {}))
        offs = [_relative(traced.read(ids_1T[:, :head], 0), whole.logits[0, head - 1])]
        for i, layer in enumerate(cache_of(whole).layers):
            for found_HKD, wanted_1KTD in zip(lanes.floats(traced.lane, head, i), (layer.keys, layer.values)):
                offs.append(_relative(found_HKD, wanted_1KTD[0, :, :head].transpose(0, 1)))
        for keys_LKD, values_LKD in lanes.lane(traced.lane):
            _fill(keys_LKD, head, before, 0)
            _fill(values_LKD, head, before, 3)
        if before > head:
            cache = _cache(lanes, traced.lane, before)
            whole = _run(model, input_ids=ids_1T[:, head:], **{cache_name(model): cache})
        if tail > 1:
            traced.read(ids_1T[:, head:-1], before)
        offs.append(_relative(traced.step(ids_1T[:, -1:], length - 1), whole.logits[0, -1]))
    lanes.forget()
    return max(offs)


def _fill(rows_LKD: torch.Tensor, head: int, before: int, ramp: float) -> None:
    """Rows between: as large as the first ones, random, and drifting, so that means of some and of all differ."""
    random = torch.Generator().manual_seed(0)
    shape = rows_LKD[head:before].shape
    drift_LKD = torch.linspace(-ramp, ramp, shape[0])[:, None, None] * torch.randn(shape[1:], generator=random)
    rows_LKD[head:before] = (torch.randn(shape, generator=random) + drift_LKD) * rows_LKD[:head].std(0)


def _run(model: Any, **inputs: Any) -> Any:
    """Outputs of ``model``, whose buffers are as before: traced methods have the same ones."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() <= _SMALL]
    try:
        return model(use_cache=True, **inputs)
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def _cache(lanes: Lanes, lane: int, tokens: int) -> Any:
    """The model's own cache, with the first tokens of a lane."""
    from transformers import DynamicCache

    config: Any = lanes.model.config
    cache = DynamicCache(config=config.get_text_config(decoder=True))
    for i, layer in enumerate(cache.layers):
        layer.update = _Lent(layer, partial(lanes.floats, lane, tokens, i))
    return cache


class _Lent:
    """``update`` of a cache's layer that has its keys and values in float32 only while the model reads them.

    Of all layers at once they are several times what a bundle's cache takes. In between the layer has tensors of the
    same shapes without memory, for it is asked how long it is.
    """

    def __init__(self, layer: Any, rows: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layer, self._rows, self._update = layer, rows, layer.update
        self._update(*self._lend())
        self._take_back()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        kept = layer.keys.shape[2]  # a window is shorter than the sequence
        layer.keys, layer.values = (rows_1KTD[:, :, rows_1KTD.shape[2] - kept :] for rows_1KTD in self._lend())
        keys_and_values = self._update(*args, **kwargs)
        self._take_back()
        return keys_and_values

    def _lend(self) -> list[torch.Tensor]:
        return [rows_TKD.transpose(0, 1)[None] for rows_TKD in self._rows()]

    def _take_back(self) -> None:
        layer = self._layer
        layer.keys, layer.values = (rows.new_zeros(1).expand(rows.shape) for rows in (layer.keys, layer.values))
        trim()


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    off = float((found - wanted).float().norm() / wanted.float().norm().clamp_min(1e-30))
    return off if off == off else float("inf")
