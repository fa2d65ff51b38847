"""Check that a traced decoder computes what its model does, for sequences of every length up to ``max_tokens``.

Tracing fixes what depends on the length of a sequence (windows, rotary embeddings, tables of positions), and no
configuration describes all of it. So the traced methods read a few tokens at the first and at the last positions; in
between the cache is filled with random numbers, which is cheap for any length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from torch_pi2.base.memory import trim
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.decoder import Lanes
from torch_pi2.export.program import named_failures
from torch_pi2.layers.prompt import sparse_only

#: Tokens that are read at the first and at the last positions, and the smallest max_tokens.
_HEAD, _TAIL, _LEAST = 40, 8, 3
#: Largest size of a buffer that a model may change while it runs, such as frequencies.
_SMALL = 1 << 16
#: Relative differences that are rounding, in smooth models and in others.
_TOLERANCE, _ROUGH_TOLERANCE = 1e-3, 2e-2


def check_traced(
    lanes: Lanes, programs: Mapping[str, torch.export.ExportedProgram], *, max_prompt: int, smooth: bool, decode: bool
) -> None:
    """Compare ``programs`` with the model of ``lanes``, whose layers have to be as in ``forward``.

    Args:
        max_prompt: tokens of one call of ``forward``. smooth: whether small differences stay small (nothing rounds
            activations, and neurons are neither predicted nor cut).
        decode: whether decoding can run here (it cannot if it was compiled for an accelerator).

    Raises:
        ConfigError: they agree up to a length, the largest ``max_tokens`` that can be exported; the message has it.
        UnsupportedModelError: they do not agree.
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
        raise UnsupportedModelError(
            f"export of {name}",
            expected="the same logits with keys and values of fixed size as without",
            found=f"others ({100 * least:.2g} % off within {_LEAST} tokens): its attention is of another kind",
            fix="Run it with PyTorch; this attention is not in the exporter yet.",
        )
    most = _largest(lambda n: difference(n) <= tolerance, _LEAST, length)
    raise ConfigError(
        "export(max_tokens=...)",
        expected=f"at most {most}: {name} computes its attention otherwise in longer sequences (rotary embeddings that "
        "depend on the length, a window, or a scale)",
        found=str(length),
        fix=f"Export with max_tokens={most}.",
    )


def _largest(fits: Callable[[int], bool], good: int, bad: int) -> int:
    """The largest number that fits; ``good`` does, ``bad`` and those above it do not."""
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


class _Traced:
    """Traced methods, which use the last lane."""

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

    The model reads the first and last tokens at once, each at its position, so that it sees how long the sequence is;
    then the last ones again, after a cache of all others.
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
    """Fill the rows in between with random numbers of the same size that drift, so that means over parts differ."""
    random = torch.Generator().manual_seed(0)
    shape = rows_LKD[head:before].shape
    drift_LKD = torch.linspace(-ramp, ramp, shape[0])[:, None, None] * torch.randn(shape[1:], generator=random)
    rows_LKD[head:before] = (torch.randn(shape, generator=random) + drift_LKD) * rows_LKD[:head].std(0)


def _run(model: Any, **inputs: Any) -> Any:
    """Outputs of ``model``. Its buffers are restored: traced methods share them."""
    saved = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() <= _SMALL]
    try:
        return model(use_cache=True, **inputs)
    finally:
        for buffer, before in saved:
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
    """``update`` of a cache's layer whose keys and values exist in float32 only while the model reads them.

    Those of all layers together take several times the memory of a bundle's cache. Otherwise the layer has tensors of
    the same shapes without memory, as the model reads its length from them.
    """

    def __init__(self, layer: Any, rows: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._layer, self._rows, self._update = layer, rows, layer.update
        self._update(*self._lend())
        self._take_back()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        length = layer.keys.shape[2]  # a window is shorter than the sequence
        layer.keys, layer.values = (rows_1KTD[:, :, rows_1KTD.shape[2] - length :] for rows_1KTD in self._lend())
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
