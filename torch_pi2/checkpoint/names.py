"""Names of parameters in checkpoints, and what is joined or divided at loading, by transformers' own mapping."""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import Field
from torch_pi2.base.progress import log
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.store.source import Checkpoint

#: Operations that put whole tensors one after the other, by class and axis.
_IN_ORDER = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)], [("Concatenate", 0)])


def follow(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Let ``checkpoint`` know its tensors by the names of ``model``, as ``from_pretrained`` would assign them."""
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    if not isinstance(model, PreTrainedModel):
        return
    mapping = get_model_conversion_mapping(model)
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    wanted, prefix = model.state_dict(), model.base_model_prefix
    gathered: dict[str, tuple[Any, dict[str, list[str]]]] = {}
    ignored, unused = "|".join([r"rotary_emb\.inv_freq", *(model._keys_to_ignore_on_load_unexpected or ())]), []
    for own in sorted(checkpoint.matrices(), key=dot_natural_key):
        name, pattern = rename_source_key(own, renamings, converters, prefix, wanted)
        if name not in wanted and own in wanted:
            name, pattern = rename_source_key(own, [], [], prefix, wanted)
        if name not in wanted:
            unused += [] if re.search(ignored, name) else [own]
        elif pattern is None:
            checkpoint.renamed.setdefault(name, own)
        else:
            gathered.setdefault(name, (by_pattern[pattern], {}))[1].setdefault(pattern, []).append(own)
    if unused:
        more = f" and {len(unused) - 1} more tensors" if len(unused) > 1 else ""
        log.warning("%s: %s%s left out, which %s has not", checkpoint.folder, unused[0], more, type(model).__name__)
    last: dict[str, torch.Tensor] = {}
    for first, (converter, parts) in gathered.items():
        if not any(checkpoint.is_packed(own) for names in parts.values() for own in names):
            made = _Converted(model, checkpoint, first, converter, parts, last)
            checkpoint.converted |= dict.fromkeys(made.specs, made)


class _Converted:
    """Parameters that transformers makes of other tensors, by its own operations. Tensors that only follow one another
    are read in place; others are made as a whole, one group at a time. ``first``: the first parameter of the group.
    ``parts``: pattern -> names of tensors, in order. ``last``: the values of the group that was made last, shared by
    all groups.
    """

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        first: str,
        converter: Any,
        parts: Mapping[str, list[str]],
        last: dict[str, torch.Tensor],
    ) -> None:
        self._model, self._first, self._converter, self._last = model, first, converter, last
        self._parts = {pattern: [(checkpoint.reader(own), own) for own in names] for pattern, names in parts.items()}
        self.specs = {name: Spec.of(value) for name, value in self._convert(empty=True).items()}
        kinds = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
        lists = [self._parts.get(pattern, []) for pattern in converter.source_patterns]
        merged = len(kinds) > 1  # then the tensors of each expert are together
        self._in_order = [part for each in (zip(*lists, strict=False) if merged else lists) for part in each]
        self._ends = list(accumulate(reader.spec(own).nbytes for reader, own in self._in_order))
        if kinds not in _IN_ORDER or len(self.specs) > 1 or self._ends[-1] != self.specs[first].nbytes:
            self._in_order = []

    def _convert(self, empty: bool = False) -> dict[str, torch.Tensor]:
        converter = copy.deepcopy(self._converter)
        for pattern, parts in self._parts.items():
            for reader, own in parts:
                spec = reader.spec(own)
                value = torch.empty(spec.shape, dtype=spec.dtype, device="meta") if empty else reader.read(own)
                converter.add_tensor(self._first, own, pattern, lambda value=value: value)
        try:
            made = converter.convert(self._first, model=self._model, config=self._model.config)
        except Exception as error:  # operations raise anything
            for parts in self._parts.values():
                shapes = [list(reader.spec(own).shape) for reader, own in parts]
                usual = max(shapes, key=shapes.count)
                for (_, own), shape in zip(parts, shapes):
                    if shape != usual:
                        fix = "Get the checkpoint again."
                        Field(shape, own, fix).wrong(f"{usual}, as others of {self._first}", str(shape))
            raise UnsupportedModelError(
                f"{self._first}, which transformers makes of other tensors",
                expected="an operation that needs no more than their shapes to say its result's",
                found=f"{self._converter.operations}: {' '.join(str(error).split())[:200]}",
                fix="Load the model with transformers, then torch_pi2.optimize(model, weights=...) and torch_pi2.save.",
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def spec(self, name: str) -> Spec:
        return self.specs[name]

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        spec = self.specs[name]
        start, stop = rows or (0, spec.shape[0])
        per_row = spec.nbytes // max(1, spec.shape[0])
        return self.read_bytes(name, start * per_row, stop * per_row).view(spec.dtype).view(-1, *spec.shape[1:])

    def read_into(self, name: str, tensor: torch.Tensor, *, row: int = 0) -> None:
        tensor.copy_(self.read(name, (row, row + len(tensor))))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        if not self._in_order:
            if name not in self._last:
                self._last.clear()
                self._last.update(self._convert())
            return self._last[name].contiguous().view(torch.uint8).flatten()[start:stop]
        found = []
        for at in range(bisect_right(self._ends, start), len(self._ends)):
            (reader, own), first = self._in_order[at], self._ends[at - 1] if at else 0
            found.append(reader.read_bytes(own, max(0, start - first), min(self._ends[at], stop) - first))
            if self._ends[at] >= stop:
                break
        return found[0] if len(found) == 1 else torch.cat(found)
