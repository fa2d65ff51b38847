"""How the layers of a checkpoint can be replaced in its model: tried with the weights of one layer of every form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.layers.experts import expert_groups
from torch_pi2.rewrite.place import TRIED_EXPERTS, find_experts_way, find_way
from torch_pi2.rewrite.skeleton import places, put
from torch_pi2.rewrite.ways import left_of
from torch_pi2.store.source import ExpertMatrix, Source, stored_name
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef, check_weights


def refs_of(site: FFNSite) -> list[tuple[str, LinearRef]]:
    """The site's matrices, in the order of a neuron's rows."""
    gate = [] if site.gate is None else [("gate", site.gate)]
    return [*gate, ("up", site.up), ("down", site.down)]


def placed(plan: Plan, ways: Mapping[str, str], left: Mapping[str, str], model_hash: str) -> Plan:
    """``plan`` of the layers in ``ways``, bound to ``model_hash``, that says why others are ``left`` dense.

    The hash is of them as well: statistics and predictors have it, too.
    """
    if not left:
        return replace(plan, model_hash=model_hash)
    made_by = plan.made_by | {"left": {**plan.made_by.get("left", {}), **left}}
    layers = [layer for layer in plan.layers if layer.site.key in ways]
    return Plan(layers, model_hash, made_by)  # without hardware, which is by layer


class Stored:
    """The parameters of a model as a checkpoint has them.

    Attributes:
        model: its skeleton. checkpoint: that has them.
        groups: all names of each parameter and buffer. alias: name -> all names of the same.
    """

    def __init__(self, model: nn.Module, checkpoint: Source) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.groups = places(model)
        self.alias = {name: names for names in self.groups for name in names}

    def name(self, parameter: str) -> str:
        """The checkpoint's name of a parameter, which may be tied to another."""
        known = (n for n in (parameter, *self.alias.get(parameter, ())) if n in self.checkpoint)
        return next(known, stored_name(self.checkpoint, parameter))

    def place_layers(self, plan: Plan, needed: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Site key -> one of ``WAYS``, and why others cannot be replaced and stay dense, which is said.

        Raises:
            UnsupportedModelError: none can be, and one is ``needed``, or some are experts.
            ArtifactError, DtypeError, NonFiniteError: the checkpoint's tensors cannot be those of a layer.
        """
        for layer in plan.layers:
            self._check_site(layer.site)
        by_form: dict[Any, str | UnsupportedModelError] = {}
        ways: dict[str, str] = {}
        refused: dict[str, UnsupportedModelError] = {}
        for group in expert_groups(plan.layers):
            form, keys = _form(group), [layer.site.key for layer in group]
            if form not in by_form:
                by_form[form] = self._try(group)
            found = by_form[form]
            if isinstance(found, str):
                ways |= dict.fromkeys(keys, found)
            elif group[0].site.experts is None:
                refused |= dict.fromkeys(keys, found)
            else:  # checkpoints have them in another form than a dense model
                raise found
        return ways, left_of(refused, bool(ways) or not needed)

    def _check_site(self, site: FFNSite) -> None:
        """Raises ArtifactError or DtypeError if the checkpoint's tensors cannot be those of ``site``."""
        if site.experts is not None:
            self._check_expert(site)
            return
        for role, ref in refs_of(site):
            rows, columns = (site.hidden, site.intermediate) if role == "down" else (site.intermediate, site.hidden)
            for name in (ref.weight, ref.bias):
                if name is None:
                    continue
                stored = self.name(name)
                self.checkpoint.check_float(stored)
                shape = self.checkpoint.spec(stored).shape
                own = shape[::-1] if ref.transposed else shape
                fits = ref.rows is None and own[:1] == (rows,)
                fits |= ref.rows is not None and ref.rows[1] - ref.rows[0] == rows and own[:1] >= (ref.rows[1],)
                if not fits or own[1:] != ((columns,) if name == ref.weight else ()):
                    raise ArtifactError(
                        f"{stored} in {self.checkpoint.folder}",
                        expected=f"{rows} {'columns' if ref.transposed and name == ref.weight else 'rows'}"
                        + (f" of {columns}" if name == ref.weight else ""),
                        found=str(list(shape)),
                        fix="The plan, or config.json, is of another model.",
                    )

    def _check_expert(self, site: FFNSite) -> None:
        """As :meth:`_check_site`."""
        for role, ref in refs_of(site):
            found = ExpertMatrix(self.checkpoint, site, ref, role)
            if not found.fits:
                raise ArtifactError(
                    f"{found.name} in {self.checkpoint.folder}",
                    expected=f"{role} {list(found.shape)} of {site.key}",
                    found=str(list(self.checkpoint.spec(found.name).shape)),
                    fix="The plan, or config.json, is of another model.",
                )
            self.checkpoint.check_float(found.name)

    def _try(self, group: list[LayerPlan]) -> str | UnsupportedModelError:
        """The way of a layer, or of all experts of one module; or why there is none. Weights are there meanwhile."""
        first = group[0].site
        names = {name for _, ref in refs_of(first) for name in (ref.weight, ref.bias) if name}
        empty = {name: self.model.get_parameter(name) for name in names}
        try:
            if first.experts is not None:
                self._read_experts(group, empty)
                return find_experts_way(self.model, group)
            for name in names:
                put(self.model, [name], self.checkpoint.read(self.name(name)))
            check_weights(first, first.weights(self.model))
            return find_way(self.model, first)
        except UnsupportedModelError as error:
            return error.with_traceback(None)  # which would keep the weights
        finally:
            for name, parameter in empty.items():
                put(self.model, [name], parameter)

    def read_expert(self, site: FFNSite, role: str, ref: LinearRef) -> None:
        """A matrix of one expert, which checkpoints may have alone, into the parameter that has those of all."""
        found = ExpertMatrix(self.checkpoint, site, ref, role)
        found.read_into(matrix := torch.empty(found.shape, dtype=self.checkpoint.spec(found.name).dtype))
        ref.take(self.model.get_parameter(ref.weight).detach()).copy_(matrix)

    def _read_experts(self, group: list[LayerPlan], empty: dict[str, nn.Parameter]) -> None:
        """The weights of some of the experts: all of a layer may be more than there is memory for."""
        first, model = group[0].site, self.model
        dtype = self.checkpoint.spec(ExpertMatrix(self.checkpoint, first, first.up, "up").name).dtype
        for name, parameter in empty.items():
            put(model, [name], torch.empty(parameter.shape, dtype=dtype))  # the system gives what is written to
        for layer in group[:TRIED_EXPERTS]:
            for role, ref in refs_of(layer.site):
                self.read_expert(layer.site, role, ref)
                if ref.bias is not None:
                    model.get_parameter(ref.bias).detach().copy_(self.checkpoint.read(self.name(ref.bias)))
            check_weights(layer.site, layer.site.weights(model))


def _form(group: list[LayerPlan]) -> Any:
    """What layers have in common that can be replaced in the same way."""
    site = group[0].site
    if site.experts is not None:
        return (site.owner_class, site.activation, site.intermediate, len(group))
    inner = tuple(name.rpartition(".")[2] for name in site.inner)
    return (site.owner_class, site.activation, site.activation_on_up, site.intermediate, site.owner_runs, inner)
