"""The dense equivalent of a quantised folder: the ordinary model, with dequantised weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.memory import new_tensor
from torch_pi2.checkpoint.placing import refs_of
from torch_pi2.ops import load as load_library
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.rewrite.place import check_sizes
from torch_pi2.rewrite.skeleton import check_filled, fill, places, skeleton
from torch_pi2.store.storefile import open_weights
from torch_pi2.store.weights import QuantizedWeights, neuron_specs
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import LinearRef

#: Rows dequantised at a time.
_CHUNK = 4096


def load_dense(
    folder: str | Path, pi2: Path, plan: Plan, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False
) -> nn.Module:
    """Dense model of the quantised weights in ``pi2``; see :func:`torch_pi2.checkpoint.save_load.load_dense`."""
    load_library()
    with open_weights(pi2) as weights:
        weights.check_plan(plan)
        model = skeleton(folder, dtype=dtype, stored=weights.float_dtype, trust_remote_code=trust_remote_code)
        check_sizes(model, plan)
        weights.check_linears(model)
        kind = next(model.parameters()).dtype
        reader = _Reader(weights, plan, kind)
        fill(model, places(model), reader.read, weights.path)
    check_filled(model, weights.path)
    untie(model, set(weights.linears))
    return model


def untie(model: nn.Module, linears: set[str]) -> None:
    """Note in the configuration that an output layer with weights of its own is no longer tied to the embedding."""
    hf: Any = model
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) and any(
        model.get_submodule(name) is hf.get_output_embeddings() for name in linears
    ):
        hf.config.tie_word_embeddings = False


class _Reader:
    """Reads float values by parameter name, from the file's rows and neurons."""

    def __init__(self, weights: QuantizedWeights, plan: Plan, dtype: torch.dtype) -> None:
        self._weights, self._dtype = weights, dtype
        self._parts: dict[str, list[tuple[LayerPlan, LinearRef, str]]] = {}
        for layer in plan.layers:
            for role, ref in refs_of(layer.site):
                for name in (ref.weight, ref.bias):
                    if name is not None:
                        self._parts.setdefault(name, []).append((layer, ref, role))

    def read(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        if name in self._parts:
            parts = self._parts[name]
            if parts[0][1].expert is None:
                return self._joined(name, parts, like)
            stack = new_tensor(like.shape, self._dtype)
            for expert in range(len(stack)):
                stack[expert] = self._joined(name, [part for part in parts if part[1].expert == expert], like)
            return stack
        module, _, local = name.rpartition(".")
        columns = {**self._weights.embeddings, **self._weights.linears}.get(module)
        if local == "weight" and columns is not None:
            rows = self._weights.read(self._weights.rows_name(module))
            value: torch.Tensor = torch.ops.pi2.dequantize(rows, self._weights.format_of(module), columns, self._dtype)
            return value
        return self._weights.read_like(name, like, self._dtype)

    def _joined(self, name: str, parts: Sequence[tuple[LayerPlan, LinearRef, str]], like: torch.Tensor) -> torch.Tensor:
        """The matrix or bias ``name``, whose rows are those of ``parts``; its last dimensions are those of ``like``."""
        whole: torch.Tensor | None = None
        for layer, ref, role in parts:
            value, own = self._projection(layer, role, name == ref.bias), replace(ref, expert=None)
            if ref.rows is None and not ref.transposed:
                return value
            if whole is None:
                whole = torch.empty(like.shape[like.dim() - (1 if name == ref.bias else 2) :], dtype=self._dtype)
            (own.take_bias(whole) if name == ref.bias else own.take(whole)).copy_(value)
        assert whole is not None
        return whole

    def _projection(self, layer: LayerPlan, role: str, bias: bool) -> torch.Tensor:
        """A matrix or bias in the model's own shape and neuron order."""
        site, order = layer.site, layer.order.long()
        specs = neuron_specs(site, self._weights.format_of(site.key))
        if bias:
            value = self._weights.take(f"{site.key}.bias_{role}", specs[f"{site.key}.bias_{role}"]).to(self._dtype)
            return value if role == "down" else value[torch.argsort(order)]
        row = {"gate": 0, "up": site.rows_per_neuron - 2, "down": site.rows_per_neuron - 1}[role]
        shape = (site.intermediate, site.hidden)
        out = new_tensor(tuple(reversed(shape)) if role == "down" else shape, self._dtype)
        for start in range(0, site.intermediate, _CHUNK):
            stop = min(start + _CHUNK, site.intermediate)
            neuron_rows = self._weights.read_neurons(site, (start, stop))
            rows, kind = row_of_neurons(neuron_rows, row, self._weights.operand_of(site.key), site.hidden)
            values_IH = self._values(rows, kind, site.hidden)
            if role == "down":
                out[:, order[start:stop]] = values_IH.T
            else:
                out[order[start:stop]] = values_IH
        return out

    def _values(self, rows: torch.Tensor, kind: str, hidden: int) -> torch.Tensor:
        if kind == "float":
            return self._weights.as_computed(rows.contiguous()).to(self._dtype)
        values: torch.Tensor = torch.ops.pi2.dequantize(rows, kind, hidden, self._dtype)
        return values
