"""A model's skeleton with the checkpoint of its weights: which layers can be replaced; weights mapped from files."""

import copy
import os
import re
import tempfile
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field, checked
from torch_pi2.base.files import not_written
from torch_pi2.base.memory import MappedFile, set_mapped
from torch_pi2.base.progress import bar, log
from torch_pi2.base.tensorfile import Spec
from torch_pi2.errors import DtypeError, UnsupportedModelError
from torch_pi2.layers.experts import expert_groups
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.place import TRIED_EXPERTS, tried_strategy
from torch_pi2.rewrite.skeleton import check_filled, fill, now, places, put, skeleton
from torch_pi2.rewrite.strategies import log_skipped
from torch_pi2.store.folder import check_float, read_config
from torch_pi2.store.source import Checkpoint, ExpertMatrix, Source, stored_name, wrong_shape
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite

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
    ``parts``: pattern -> names of tensors, in order. ``last``: values of the group made last, shared by all.
    """

    def __init__(
        self, model: Any, checkpoint: Checkpoint, first: str, converter: Any, parts: Mapping[str, list[str]], last: Any
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
            what = f"{self._first}, which transformers makes of other tensors"
            expected = "an operation that needs no more than their shapes to say its result's"
            found = f"{self._converter.operations}: {' '.join(str(error).split())[:200]}"
            fix = "Load the model with transformers, then torch_pi2.optimize(model, weights=...) and torch_pi2.save."
            raise UnsupportedModelError(what, expected=expected, found=found, fix=fix) from error
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


#: Smaller tensors are read into memory, and converted to the model's dtype.
_SMALL_BYTES = 1 << 20


def bound_plan(plan: Plan, strategies: Mapping[str, str], dense: Mapping[str, str], model_hash: str) -> Plan:
    """``plan`` of the layers in ``strategies``, bound to the hash of all, with the reasons why others stay dense."""
    if not dense:
        return replace(plan, model_hash=model_hash)
    made_by = plan.made_by | {"left": {**plan.made_by.get("left", {}), **dense}}
    layers = [layer for layer in plan.layers if layer.site.key in strategies]
    return Plan(layers, model_hash, made_by)  # without hardware, which lists all layers


class Packed(NamedTuple):
    """A matrix in few bits. ``kind``: the checkpoint's type. ``bits``: per weight. ``format``: ours for it. ``kept``:
    the format holds its integers, else it is rounded. ``exact``: also its scales.
    """

    kind: str
    bits: float
    format: str
    kept: bool
    exact: bool


class PackedSource(Source, Protocol):
    """A checkpoint with matrices in few bits. ``about``: the model, in messages. ``by_neuron``: down is transposed.
    ``zeros``: layers may have experts, or activations that give zeros.
    """

    about: str
    by_neuron: bool
    zeros: bool

    def packed(self, name: str) -> Packed | None:
        """Type and format of matrix ``name``; None: floats."""

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)`` of a ``kept`` matrix in its ``format``, uint8."""

    def unused(self) -> list[str]:
        """Tensors that were not read."""


class Stored:
    """A model's skeleton without weights, and the checkpoint that has them. ``groups``: all names of each parameter and
    buffer. ``alias``: name -> all names of the same tensor.
    """

    def __init__(self, model: nn.Module, checkpoint: Source) -> None:
        self.model, self.checkpoint = model, checkpoint
        if isinstance(checkpoint, Checkpoint):
            follow(model, checkpoint)
        self.groups = places(model)
        self.alias = {name: names for names in self.groups for name in names}

    def name(self, parameter: str) -> str:
        """The checkpoint's name of a parameter, which may be tied to another one."""
        known = (n for n in (parameter, *self.alias.get(parameter, ())) if n in self.checkpoint)
        return next(known, stored_name(self.checkpoint, parameter))

    def checked(self, parameter: str, *, floats: bool = False) -> Spec:
        """Spec of the tensor. Raises ArtifactError: not the model's shape. DtypeError: not float, with ``floats``."""
        name, wanted = self.name(parameter), tuple(now(self.model, parameter).shape)
        if floats:
            self.checkpoint.check_float(name)
        spec = self.checkpoint.spec(name)
        if spec.shape != wanted:
            raise wrong_shape(name, self.checkpoint.folder, list(wanted), list(spec.shape))
        return spec

    def place_layers(self, plan: Plan, needed: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Site key -> one of ``STRATEGIES``, and the reasons why other layers stay dense, which are logged. Raises
        UnsupportedModelError: no layer can be replaced, and one is ``needed``, or some are experts. ArtifactError,
        DtypeError, NonFiniteError: the checkpoint's tensors do not fit a layer.
        """
        for layer in plan.layers:
            self._check_site(layer.site)
        by_form: dict[Any, str | UnsupportedModelError] = {}
        strategies: dict[str, str] = {}
        refused: dict[str, UnsupportedModelError] = {}
        for group in expert_groups(plan.layers):
            form, keys = _form(group), [layer.site.key for layer in group]
            if form not in by_form:
                by_form[form] = self._try(group, needed or exact_zeros(group[0].site.activation))
            found = by_form[form]
            if isinstance(found, str):
                strategies |= dict.fromkeys(keys, found)
            elif group[0].site.experts is None:
                refused |= dict.fromkeys(keys, found)
            else:  # checkpoints store experts in another layout than dense models
                raise found
        return strategies, log_skipped(refused, bool(strategies) or not needed)

    def _check_site(self, site: FFNSite) -> None:
        """Raises ArtifactError or DtypeError: the checkpoint's tensors do not fit ``site``."""
        for role, ref in site.refs.items():
            if ref.expert is not None:
                found = ExpertMatrix(self.checkpoint, site, ref, role)
                if not found.fits:
                    expected = f"{role} {list(found.shape)} of {site.key}"
                    shape = self.checkpoint.spec(found.name).shape
                    raise wrong_shape(found.name, self.checkpoint.folder, expected, list(shape))
                self.checkpoint.check_float(found.name)
                continue
            for name in (ref.weight, ref.bias):
                if name is not None:
                    self.checked(name, floats=True)

    def _try(self, group: list[LayerPlan], lazy: bool) -> str | UnsupportedModelError:
        """How a layer, or all experts of a module, can be replaced, or why not; tried with random weights."""
        site = group[0].site
        empty = {name: self.model.get_parameter(name) for name in sorted({*site.parameter_names})}
        generator = torch.Generator().manual_seed(0)
        try:
            for name, parameter in empty.items():
                made = torch.empty(parameter.shape, dtype=parameter.dtype)  # pages are allocated when written to
                some = made if site.experts is None else made[:TRIED_EXPERTS]
                some.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
                put(self.model, [name], made)
            return tried_strategy(self.model, group, lazy)
        except UnsupportedModelError as error:
            return error.with_traceback(None)  # a traceback would hold the weights
        finally:
            for name, parameter in empty.items():
                put(self.model, [name], parameter)


def _form(group: list[LayerPlan]) -> Any:
    """The properties that layers share if the same replacement fits all of them."""
    site = group[0].site
    if site.experts is not None:
        return (site.owner_class, site.activation, site.intermediate, len(group))
    inner = tuple(name.rpartition(".")[2] for name in site.inner)
    return (site.owner_class, site.activation, site.activation_on_up, site.intermediate, site.owner_runs, inner)


@checked
def load_mapped(
    folder: str | Path, *, scratch: str | Path | None = None, trust_remote_code: bool = False, progress: bool = False
) -> nn.Module:
    """The dense model of a float checkpoint, in evaluation mode, with its weights in mapped files.

    In :func:`torch_pi2.profile` and :func:`torch_pi2.fit` a module's weights take memory only while it is called. The
    dtype is that of the configuration.

    Args:
        scratch: folder for temporary files of as many bytes as in the checkpoint, in which a layer's experts are
            stacked if the checkpoint stores them one by one (default: ``folder``).

    Raises:
        ArtifactError: something is missing or damaged, no float weights, or too little space in ``scratch``.
            DtypeError: weights of another dtype than the configuration's.
    """
    folder = Path(folder)
    check_float(folder, read_config(folder))
    with Checkpoint(folder) as checkpoint:
        model = skeleton(folder, stored=largest_dtype(checkpoint), trust_remote_code=trust_remote_code)
        stored = Stored(model, checkpoint)
        files = checkpoint.memory()
        made = _convert(stored, checkpoint, Path(scratch or folder), files, progress)

        def read(name: str, now: torch.Tensor) -> torch.Tensor | None:
            if name in made:
                return now
            source = stored.name(name)
            return _read(checkpoint, source, now) if source in checkpoint else None

        fill(model, stored.groups, read, folder)
    check_filled(model, folder)
    set_mapped(model, files)
    return model


def largest_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype of the largest tensor, for configurations without one."""
    return max(map(checkpoint.spec, checkpoint.names()), key=lambda spec: spec.nbytes).dtype


def _read(checkpoint: Checkpoint, name: str, now: torch.Tensor) -> torch.Tensor:
    spec = checkpoint.spec(name)
    if spec.shape != tuple(now.shape):
        raise wrong_shape(name, checkpoint.folder, list(now.shape), list(spec.shape))
    if spec.nbytes < _SMALL_BYTES:
        return checkpoint.read(name).to(now.dtype)
    if spec.dtype != now.dtype:
        what, expected = f"{name} in {checkpoint.folder}, mapped", f"{dtype_name(now.dtype)}, as config.json says"
        fix = "Load the model as a whole, or save the checkpoint in one dtype."
        raise DtypeError(what, expected=expected, found=dtype_name(spec.dtype), fix=fix)
    return checkpoint.mapped(name)


def _convert(
    stored: Stored, checkpoint: Checkpoint, scratch: Path, files: list[MappedFile], progress: bool
) -> set[str]:
    """Write parameters made of other tensors to new mapped ``files``; returns their names. Raises ArtifactError."""
    converted = {names[0]: names for names in stored.groups if stored.name(names[0]) in checkpoint.converted}
    for name in bar(list(converted), "converted weights", progress and bool(converted)):
        spec = replace(stored.checked(name), dtype=now(stored.model, name).dtype)
        try:
            with tempfile.TemporaryFile(dir=scratch) as file:
                os.posix_fallocate(file.fileno(), 0, spec.nbytes)
                files.append(MappedFile(file.fileno(), shared=True))
        except OSError as error:
            raise not_written(scratch, error) from error
        whole, step = files[-1].tensor(spec.shape, spec.dtype, 0), max(1, _SMALL_BYTES * spec.shape[0] // spec.nbytes)
        put(stored.model, converted[name], whole)
        for start in range(0, len(whole), step):
            part = whole[start : start + step]
            part.copy_(checkpoint.read(stored.name(name), (start, start + len(part))))
            files[-1].let_go(part)
    return set(converted)
