"""A model's skeleton with the checkpoint of its weights: which layers can be replaced; weights mapped from files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import checked
from torch_pi2.base.files import not_written
from torch_pi2.base.memory import MappedFile, set_mapped
from torch_pi2.base.progress import bar
from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.names import follow
from torch_pi2.errors import DtypeError, UnsupportedModelError
from torch_pi2.layers.experts import expert_groups
from torch_pi2.rewrite.place import TRIED_EXPERTS, tried_strategy
from torch_pi2.rewrite.skeleton import check_filled, fill, now, places, put, skeleton
from torch_pi2.rewrite.strategies import log_skipped
from torch_pi2.store.folder import check_float, read_config
from torch_pi2.store.source import Checkpoint, ExpertMatrix, Source, stored_name, wrong_shape
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite

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
                by_form[form] = self._try(group, needed)
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
        raise DtypeError(
            f"{name} in {checkpoint.folder}, mapped",
            expected=f"{dtype_name(now.dtype)}, as config.json says",
            found=dtype_name(spec.dtype),
            fix="Load the model as a whole, or save the checkpoint in one dtype.",
        )
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
