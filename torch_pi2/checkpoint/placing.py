"""How the layers of a checkpoint can be replaced in its model: tried with the weights of one layer of each form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import UnsupportedModelError
from torch_pi2.layers.experts import expert_groups
from torch_pi2.rewrite.place import TRIED_EXPERTS, tried_experts_strategy, tried_strategy
from torch_pi2.rewrite.skeleton import places, put
from torch_pi2.rewrite.strategies import log_skipped
from torch_pi2.store.source import ExpertMatrix, Source, stored_name, wrong_shape
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef, check_weights


def refs_of(site: FFNSite) -> list[tuple[str, LinearRef]]:
    """Role and reference of the site's matrices, in the order of a neuron's rows."""
    gate = [] if site.gate is None else [("gate", site.gate)]
    return [*gate, ("up", site.up), ("down", site.down)]


def bound_plan(plan: Plan, strategies: Mapping[str, str], dense: Mapping[str, str], model_hash: str) -> Plan:
    """``plan`` with the layers in ``strategies`` alone, bound to ``model_hash``, with the reason why others stay dense.

    The hash covers all layers: statistics and predictors have the same one.
    """
    if not dense:
        return replace(plan, model_hash=model_hash)
    made_by = plan.made_by | {"left": {**plan.made_by.get("left", {}), **dense}}
    layers = [layer for layer in plan.layers if layer.site.key in strategies]
    return Plan(layers, model_hash, made_by)  # without hardware, which is by layer


class Stored:
    """A model without weights, and the checkpoint that has them.

    Attributes:
        model: its skeleton. checkpoint: its weights.
        groups: all names of each parameter and buffer. alias: name -> all names of the same tensor.
    """

    def __init__(self, model: nn.Module, checkpoint: Source) -> None:
        self.model, self.checkpoint = model, checkpoint
        self.groups = places(model)
        self.alias = {name: names for names in self.groups for name in names}

    def name(self, parameter: str) -> str:
        """The checkpoint's name of a parameter, which may be tied to another one."""
        known = (n for n in (parameter, *self.alias.get(parameter, ())) if n in self.checkpoint)
        return next(known, stored_name(self.checkpoint, parameter))

    def place_layers(self, plan: Plan, needed: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Site key -> one of ``STRATEGIES``; and why other layers cannot be replaced, which is logged: they stay dense.

        Raises:
            UnsupportedModelError: none can be, and one is ``needed``, or some are experts.
            ArtifactError, DtypeError, NonFiniteError: the checkpoint's tensors cannot be those of a layer.
        """
        for layer in plan.layers:
            self._check_site(layer.site)
        by_form: dict[Any, str | UnsupportedModelError] = {}
        strategies: dict[str, str] = {}
        refused: dict[str, UnsupportedModelError] = {}
        for group in expert_groups(plan.layers):
            form, keys = _form(group), [layer.site.key for layer in group]
            if form not in by_form:
                by_form[form] = self._try(group)
            found = by_form[form]
            if isinstance(found, str):
                strategies |= dict.fromkeys(keys, found)
            elif group[0].site.experts is None:
                refused |= dict.fromkeys(keys, found)
            else:  # checkpoints store experts in another form than a dense model
                raise found
        return strategies, log_skipped(refused, bool(strategies) or not needed)

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
                    what = "columns" if ref.transposed and name == ref.weight else "rows"
                    expected = f"{rows} {what}" + (f" of {columns}" if name == ref.weight else "")
                    raise wrong_shape(stored, self.checkpoint.folder, expected, list(shape))

    def _check_expert(self, site: FFNSite) -> None:
        """As :meth:`_check_site`."""
        for role, ref in refs_of(site):
            found = ExpertMatrix(self.checkpoint, site, ref, role)
            if not found.fits:
                expected, shape = f"{role} {list(found.shape)} of {site.key}", self.checkpoint.spec(found.name).shape
                raise wrong_shape(found.name, self.checkpoint.folder, expected, list(shape))
            self.checkpoint.check_float(found.name)

    def _try(self, group: list[LayerPlan]) -> str | UnsupportedModelError:
        """How a layer, or all experts of one module, can be replaced, or why not; tried with weights in memory."""
        first = group[0].site
        names = {name for _, ref in refs_of(first) for name in (ref.weight, ref.bias) if name}
        empty = {name: self.model.get_parameter(name) for name in names}
        try:
            if first.experts is not None:
                self._read_experts(group, empty)
                return tried_experts_strategy(self.model, group)
            for name in names:
                put(self.model, [name], self.checkpoint.read(self.name(name)))
            check_weights(first, first.weights(self.model))
            return tried_strategy(self.model, first)
        except UnsupportedModelError as error:
            return error.with_traceback(None)  # a traceback would keep the weights in memory
        finally:
            for name, parameter in empty.items():
                put(self.model, [name], parameter)

    def read_expert(self, site: FFNSite, role: str, ref: LinearRef) -> None:
        """Read a matrix of one expert into the parameter that stacks those of all experts."""
        matrix = ExpertMatrix(self.checkpoint, site, ref, role).read()
        ref.take(self.model.get_parameter(ref.weight).detach()).copy_(matrix)

    def _read_experts(self, group: list[LayerPlan], empty: dict[str, nn.Parameter]) -> None:
        """Read the weights of some experts: all experts of a layer may be more than there is memory for."""
        first, model = group[0].site, self.model
        dtype = ExpertMatrix(self.checkpoint, first, first.up, "up").dtype
        for name, parameter in empty.items():
            put(model, [name], torch.empty(parameter.shape, dtype=dtype))  # pages are allocated when written to
        for layer in group[:TRIED_EXPERTS]:
            for role, ref in refs_of(layer.site):
                self.read_expert(layer.site, role, ref)
                if ref.bias is not None:
                    model.get_parameter(ref.bias).detach().copy_(self.checkpoint.read(self.name(ref.bias)))
            check_weights(layer.site, layer.site.weights(model))


def _form(group: list[LayerPlan]) -> Any:
    """What layers have in common if the same replacement fits all of them."""
    site = group[0].site
    if site.experts is not None:
        return (site.owner_class, site.activation, site.intermediate, len(group))
    inner = tuple(name.rpartition(".")[2] for name in site.inner)
    return (site.owner_class, site.activation, site.activation_on_up, site.intermediate, site.owner_runs, inner)
