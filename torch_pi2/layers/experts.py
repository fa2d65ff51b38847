"""``SparseExperts``: all experts of a block in one operator call."""

import copy
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch

from torch_pi2.base.memory import new_tensor
from torch_pi2.errors import ArtifactError, ConfigError, ShapeError
from torch_pi2.graph.routed import LinearRouter, Routed
from torch_pi2.layers import gpu
from torch_pi2.layers.checks import check_ffn_input, result_dtype
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.gpu import TransferBuffer, on_gpu
from torch_pi2.layers.offloaded import Gates, InStore, OffloadedFFN, Store, check_store_layer
from torch_pi2.layers.rows import SparseModule, convert
from torch_pi2.ops import load
from torch_pi2.ops.linear import IN_BLOCKS
from torch_pi2.predict import LAYER_TENSORS, tensors_among
from torch_pi2.types.site import FFNSite

#: Buffers whose dtype does not follow the model's, and buffers of an expert's layer that are stacked.
_EXACT = ("predictor_a_scale", "predictor_b_scale", "predictor_bias", "cuts_E", "thresholds_E")
_BIASES = ("bias_gate", "bias_up", "bias_down")
_STACKED = (*("neuron_rows", "order", "inverse", *_BIASES), *(f"predictor_{name}" for name in LAYER_TENSORS))


class SparseExperts(SparseModule):
    """All experts of a module, each computed as its plan says.

    Args:
        parts: one :class:`~torch_pi2.layers.ffn.SparseFFN` per expert. The iterable is consumed one layer at a time,
            and the tensors are copied.
        experts: E, the number of parts.

    Raises:
        ConfigError: a part has hot neurons, or the plans differ in form: one operator computes all experts.

    Buffers (none in ``state_dict``) are those of the parts, stacked: ``neuron_rows [E, I, R, H]`` (quantised:
    ``[E, I, R, row_bytes(H)]`` uint8; two formats: ``[E, I, bytes]``; on ``meta`` if the parts are), ``order`` and
    ``inverse [E, I]``, biases if the experts have them, and the predictor's tensors. ``cuts_E`` and ``thresholds_E``
    are ``cuts`` and ``thresholds`` for GPU kernels, which read them from memory.

    Attributes:
        sites: one per expert. site: the fields that all share, under the module's name.
        method, weights, int8_activations: as in the parts.
        thresholds: cuts on the gates (empty: 0 for all). cuts: of the predictors (empty: no predictors).
        errors: quantisation error of each expert.
        split: the experts on a GPU, if some are there: inputs and results are then on that GPU.
    """

    split: gpu.HybridExperts | None = None
    cuts_E: torch.Tensor
    thresholds_E: torch.Tensor
    sites: tuple[FFNSite, ...]
    thresholds: list[float]
    cuts: list[float]
    errors: list[float]
    #: A ``SparseMethod`` for each expert; empty: none.
    customs: tuple[Any, ...]

    def __init__(self, parts: Iterable[SparseFFN], experts: int) -> None:
        super().__init__()
        load()
        first: SparseFFN | None = None
        self.sites, self.customs, self.thresholds, self.cuts, self.errors = (), (), [], [], []
        for expert, part in enumerate(parts):
            if part.has_predictor:
                part.leave_blocks()
            if first is None:
                first = part
                for name in _STACKED:
                    tensor = part._buffers[name]
                    stack = None if tensor is None else _room(tensor, experts)
                    self.register_buffer(name, stack, persistent=False)
            self._add(expert, part, first)
        assert first is not None
        assert len(self.sites) == experts
        self.site = replace(first.site, key=first.site.experts or "", owner=first.site.experts or "")
        self.method = first.method
        self.weights, self.int8_activations, self._dtype = first.weights, first.int8_activations, first.dtype
        self.predictor_weights = first.predictor_weights
        self.has_predictor, self.predictor_kind = first.has_predictor, first.predictor_kind
        if not self.has_predictor or self.customs:
            self.cuts = []
        if not any(self.thresholds):
            self.thresholds = []
        for name, numbers in (("cuts_E", self.cuts), ("thresholds_E", self.thresholds)):
            values_E = torch.tensor(numbers or [0.0] * experts, dtype=torch.float64, device="cpu")
            self.register_buffer(name, values_E, persistent=False)
        form = copy.copy(first)  # no tensors: :meth:`expert` fills it
        form._buffers = dict.fromkeys(first._buffers)
        self._form = (form,)  # a tuple: not a module

    def _add(self, expert: int, part: SparseFFN, first: SparseFFN) -> None:
        _check_alike(part, first)
        self.sites += (part.site,)
        self.customs += () if part.custom is None else (part.custom,)
        self.thresholds.append(part.threshold)
        self.cuts.append(part.predictor_threshold)
        self.errors.append(part.error)
        for name in _STACKED:
            stack, tensor = self._buffers[name], part._buffers[name]
            if stack is not None and tensor is not None and not tensor.is_meta:
                stack[expert].copy_(tensor)

    def stacked(self, rows: Iterable[torch.Tensor]) -> torch.Tensor:
        """``neuron_rows`` of rows ``[I, R, ...]`` of each expert as in files, given one by one."""
        stack: torch.Tensor | None = None
        for expert, rows_of_one in enumerate(rows):
            arranged = self._form[0].arranged(rows_of_one)
            stack = _room(arranged, len(self.sites)) if stack is None else stack
            stack[expert] = arranged
        assert stack is not None
        return stack

    def expert(self, expert: int) -> SparseFFN:
        """The layer of one expert; its tensors are views of these buffers."""
        part = copy.copy(self._form[0])
        stacks = {name: self._buffers[name] for name in _STACKED}
        views = {name: None if stack is None else stack[expert] for name, stack in stacks.items()}
        part._buffers = part._buffers | views
        part.site, part._dtype = self.sites[expert], self._dtype
        part.error = self.errors[expert]
        part.threshold = self.thresholds[expert] if self.thresholds else 0.0
        part.predictor_threshold = self.cuts[expert] if self.cuts else 0.0
        part.custom = self.customs[expert] if self.customs else None
        return part

    def experts(self) -> list[SparseFFN]:
        return [self.expert(expert) for expert in range(len(self.sites))]

    def predictor(self) -> list[torch.Tensor]:
        """The predictors' stacked tensors in the operators' order."""
        return [*tensors_among(self._buffers).values()]

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """``hidden_states [T, H]``, ``top_k_index [T, k]`` and ``top_k_weights [T, k]`` -> ``[T, H]``.

        Arguments are given by position, or by the names in the original's forward. Expert index E adds nothing. The
        result has the dtype of ``hidden_states`` (autocast's under ``torch.autocast``); a token's result does not
        depend on the other tokens. Raises ShapeError: the last dimension is not H. GradientError: a gradient would be
        needed.
        """
        hidden_states, top_k_index, top_k_weights = Routed.of(args, kwargs, len(self.sites))
        check_ffn_input(self.site, self.training, hidden_states, self.dtype, self.lookups)
        top_k_index, y = top_k_index.long(), hidden_states  # sort and kernels of other libraries give int32
        if self.split is not None:
            y = self.split(self, hidden_states, top_k_index, top_k_weights)
        else:
            if self.in_memory:
                gpu.check_together(self.site.key, hidden_states, self.neuron_rows)
            try:
                y = self.compute(hidden_states, top_k_index, top_k_weights)
            except RuntimeError as error:
                _, wrong, found = str(error).partition(" for no expert, found ")
                if not wrong:
                    raise
                what = f"experts chosen for {self.site.key}"
                expected = f"0 to {len(self.sites) - 1}, or {len(self.sites)} for none"
                fix = "Correct the router: it is of another model, or marks unused slots in another way."
                raise ShapeError(what, expected=expected, found=found.partition(".")[0], fix=fix) from error
        return y.to(result_dtype(hidden_states))

    def compute(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        """:meth:`forward` without checks, for the experts whose tensors are on the device of ``x``."""
        weights = self.weights + IN_BLOCKS * self._form[0].up_in_blocks
        routed, stored = (x, index, routing, self.neuron_rows), (weights, self.int8_activations)
        if on_gpu(x):
            y = torch.ops.pi2.gathered_experts(*routed, *self.asked(self.cuts_E, self.thresholds_E), *stored)
        else:
            asked = self.asked(self.cuts, self.thresholds, x, index)
            y = torch.ops.pi2.experts_ffn(*routed, *asked, *stored, *self.biases())
        return y

    def biases(self) -> list[torch.Tensor | None]:
        return [self._buffers[name] for name in _BIASES]

    def check_gpu_has_kernels(self) -> None:
        """Raises DeviceError or UnsupportedModelError if no GPU kernel computes such experts."""
        gpu.check_gpu_has_kernels(self.site, self.weights, self.predictor_kind)
        if any(bias is not None for bias in self.biases()):
            raise gpu.stays(f"{self.site.key}, whose experts have biases")

    def asked(self, cuts: Any, thresholds: Any, *routed: torch.Tensor) -> tuple[Any, ...]:
        """The operators' arguments from the predictor to the thresholds; ``routed``: input and indices of experts."""
        predicted = ([self._chosen(*routed)], "mask", [], "", False) if self.customs else self._predicted(cuts)
        return *predicted, self.site.activation, self.site.activation_on_up, thresholds

    def _predicted(self, cuts: Any) -> tuple[Any, ...]:
        rows = self.predictor_weights
        return self.predictor(), self.predictor_kind, cuts, rows, self.int8_activations and bool(rows)

    def _chosen(self, x_TH: torch.Tensor, index_Tk: torch.Tensor) -> torch.Tensor:
        """What the methods choose: bool ``[T, k, I]``, each token's neurons of each of its experts."""
        mask_TkI = torch.zeros((*index_Tk.shape, self.site.intermediate), dtype=torch.bool)
        for expert in index_Tk.unique().tolist():
            if expert < len(self.customs):
                t, k = torch.nonzero(index_Tk == expert, as_tuple=True)
                mask_TkI[t, k] = self.customs[expert].selected(x_TH[t], self.site.intermediate)[:, self.order[expert]]
        return mask_TkI

    def split_off(self, there: Sequence[int], link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        """Compute the experts ``there`` on the GPU of ``link``, where inputs and results are from then on."""
        self.check_gpu_has_kernels()
        self.leave_blocks()
        self.split = gpu.HybridExperts(self, there, link, neuron_rows)

    def leave_blocks(self) -> None:
        """Store the neurons as in files from now on; the predictors of experts are never stored in blocks."""
        if self.neuron_rows.is_cpu and not self.neuron_rows.is_contiguous():
            rows = new_tensor(self.neuron_rows.shape, self.neuron_rows.dtype)
            for expert, part in enumerate(self.experts()):
                rows[expert] = part.in_row_order()
            self.neuron_rows, self._form[0].up_in_blocks = rows, False

    def part(
        self, experts: Sequence[int], device: torch.device, neuron_rows: torch.Tensor | None = None
    ) -> "SparseExperts":
        """A module of these experts, over copies on ``device``; ``neuron_rows``: theirs, if they are not in memory."""
        part = copy.copy(self)
        part.__class__ = SparseExperts
        part.split, part.sites = None, tuple(self.sites[expert] for expert in experts)
        part._buffers = dict(self._buffers)
        for name, stack in self._buffers.items():
            if stack is not None:
                rows = [stack[expert] for expert in experts]
                if name == "neuron_rows" and neuron_rows is not None:
                    rows = list(neuron_rows)
                there = torch.empty((len(experts), *stack.shape[1:]), dtype=stack.dtype, device=device)
                for place, row in enumerate(rows):  # one by one: no second copy of all of them
                    there[place].copy_(row)
                part._buffers[name] = there
        for name in ("thresholds", "cuts", "errors"):
            numbers = getattr(self, name)
            setattr(part, name, [numbers[expert] for expert in experts] if numbers else [])
        return part

    def dense_value(self, name: str) -> torch.Tensor:
        """A copy of the module's parameter ``name``; see :meth:`SparseFFN.dense_value`."""
        value = torch.empty_like(self.shape_of(name), device=self.order.device, memory_format=torch.contiguous_format)
        for expert, part in enumerate(self.experts()):  # one by one: no second copy of all of them
            value[expert] = part.dense_value(name)
        return value

    def assign(self, name: str, value: torch.Tensor) -> bool:
        """See :meth:`~torch_pi2.layers.rows.DenseForm.assign`."""
        changed = False
        for expert, part in enumerate(self.experts()):
            changed |= part.assign(name, value[expert])
        return changed

    def shape_of(self, name: str) -> torch.Tensor:
        """A ``meta`` tensor with the shape and dtype of parameter ``name``."""
        one = self.expert(0).shape_of(name)
        return one.expand(len(self.sites), *one.shape)

    def check_float(self, what: str) -> None:
        """Raises ConfigError if the experts are quantised; ``what``: the request, for the message."""
        self.expert(0).check_float(what)

    def _apply(self, fn: Any, recurse: bool = True) -> "SparseExperts":
        """``model.to(dtype)`` converts the neurons; scales and biases of the predictors stay float32."""
        if gpu.stays_as_it_is(self, fn):
            return self
        if self.weights != "float":
            self._dtype = fn(torch.empty(0, dtype=self._dtype, device=self.neuron_rows.device)).dtype
        names = (*_EXACT, *(_BIASES if self.weights != "float" or not self.in_memory else ()))
        convert(self, fn, recurse, names)
        return self

    def extra_repr(self) -> str:
        return f"{len(self.sites)} experts of {self._form[0].extra_repr()}"


class OffloadedExperts(InStore, SparseExperts):
    """Experts whose neurons are in a :class:`~torch_pi2.layers.offloaded.Store` (its layers from ``first_layer`` on),
    with the same results bit for bit. ``neuron_rows`` is on ``meta``, and whatever needs all numbers raises
    ConfigError, as in :class:`~torch_pi2.layers.offloaded.OffloadedFFN`. Raises ArtifactError: those layers have other
    sizes.
    """

    in_memory = False
    #: Arguments of :meth:`announce`, if it has been called.
    _announced: tuple[Any, ...] = ()

    def __init__(self, parts: Iterable[SparseFFN], experts: int, store: Store, first_layer: int) -> None:
        super().__init__(parts, experts)
        self._store, self.first_layer, self._gates = (store,), first_layer, Gates()
        for expert, site in enumerate(self.sites):
            check_store_layer(store, first_layer + expert, site)

    def expert(self, expert: int) -> SparseFFN:
        part = super().expert(expert)
        part.__class__ = OffloadedFFN
        assert isinstance(part, OffloadedFFN)
        part._store, part.store_layer, part._gates = self._store, self.first_layer + expert, Gates()
        return part

    def split_off(self, there: Sequence[int], link: TransferBuffer, neuron_rows: torch.Tensor | None = None) -> None:
        """See the base class. The cache then serves the other neurons; :meth:`Store.preload` fills it."""
        super().split_off(there, link, neuron_rows)
        every = self.site.intermediate
        self.store.leave_out(self.first_layer, [every * (expert in there) for expert in range(len(self.sites))])

    def end_split(self) -> None:
        super().end_split()
        with suppress(ArtifactError):  # the store may be closed
            self.store.leave_out(self.first_layer, [0] * len(self.sites))

    def announce(self, router: LinearRouter, before: "OffloadedExperts") -> None:
        """Route early for this mixture from the one ``before`` it in the store (``OffloadConfig.lookahead``)."""

        def floats(vector: torch.Tensor | None) -> torch.Tensor | None:
            return None if vector is None else vector.float().contiguous()

        if self.customs:
            return
        self._announced = router, before
        stored = self.store.number, before.first_layer, self.first_layer, len(self.sites)
        routed = router.weight.contiguous(), floats(router.bias), floats(router.correction), router.chosen
        torch.ops.pi2.store_early_routing(*stored, *routed, *self._predicted(self.cuts))

    def keep_gates(self, layers: Sequence[int], store: Any) -> None:
        of_E = torch.full((len(self.sites),), -1)
        of_E[[layer - self.first_layer for layer in layers]] = torch.arange(len(layers))
        if self._gates.tensors and torch.equal(self._gates.tensors[1], of_E):
            return
        self._set_gates()  # before others take their memory
        if layers:
            first = store.first_rows(layers[0])
            rows = new_tensor((len(layers), *first.shape), first.dtype)
            for place, layer in enumerate(layers):
                rows[place] = store.first_rows(layer)
            self._set_gates(rows, of_E)

    def _set_gates(self, *tensors: torch.Tensor) -> None:
        self._gates.tensors = tensors
        if self._announced:
            self.announce(*self._announced)

    def _predicted(self, cuts: Any) -> tuple[Any, ...]:
        gates = self._gates.tensors
        return ([*gates], "gate", [], "", False) if gates else super()._predicted(cuts)

    def compute(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        routed, stored = (x, index, routing), (self.store.number, self.first_layer, len(self.sites))
        asked = self.asked(self.cuts, self.thresholds, x, index)
        return self.read(torch.ops.pi2.stored_experts, *routed, *stored, *asked, self.int8_activations, *self.biases())


def _room(like: torch.Tensor, experts: int) -> torch.Tensor:
    """An empty ``[experts, ...]`` for tensors in the layout of ``like``."""
    if like.is_meta:
        return torch.empty((experts, *like.shape), dtype=like.dtype, device="meta")
    if like.is_contiguous():
        return new_tensor((experts, *like.shape), like.dtype)
    return new_tensor((experts, *like.transpose(0, 1).shape), like.dtype).transpose(1, 2)


def _check_alike(part: SparseFFN, first: SparseFFN) -> None:
    if part.n_hot:
        expected = "an expert without hot neurons, whose method is not 'dense'"
        fix = "Make the plan again (torch_pi2.plan, or torch_pi2.optimize)."
        raise ConfigError(f"plan of {part.site.key}", expected=expected, found=f"{part.n_hot} hot neurons", fix=fix)

    def form(layer: SparseFFN) -> tuple[Any, ...]:
        shapes = tuple(None if (t := layer._buffers[n]) is None else tuple(t.shape) for n in _STACKED)
        stored = (layer.weights, layer.int8_activations, layer.predictor_weights)
        site = (layer.site.activation, layer.site.activation_on_up, layer.site.hidden, layer.site.intermediate)
        return (layer.method, *stored, *site, *shapes)

    if form(part) != form(first):
        expected = f"the method and sizes of {first.site.key}, an expert of the same module"
        found = ", ".join(str(a) for a, b in zip(form(part), form(first)) if a != b)
        raise ConfigError(f"plan of {part.site.key}", expected=expected, found=found, fix="Make the plan again.")


def expert_groups(layers: Sequence[Any]) -> list[list[Any]]:
    """A plan's layers, experts of a module together. Raises ArtifactError: some of them are missing or out of order."""
    alone = groupby(layers, lambda layer: id(layer) if layer.site.experts is None else layer.site.experts)
    groups = [list(group) for _, group in alone]
    seen: set[str] = set()
    for group in groups:
        module, numbers = group[0].site.experts, [layer.site.up.expert for layer in group]
        if module is not None and (module in seen or numbers != list(range(len(numbers)))):
            found = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
            fix = "Make the plan again."
            raise ArtifactError(f"plan of {module}", expected="all of its experts, in order", found=found, fix=fix)
        seen |= {module} - {None}
    return groups
