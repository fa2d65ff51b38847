"""FFNs as calls of the ``Pi2Backend`` delegate: operators, modules that call them, and the copy of a model with them.

The operators represent FFNs in a program before ExecuTorch lowers it, without weights in the graph:

* ``pi2::delegate_ffn(x, model, layer, queue) -> y``: a whole layer.
* ``pi2::delegate_submit(x, model, layer, first, queue) -> x'`` and ``pi2::delegate_collect(h, model, layer, first,
  queue) -> y``: the cold part of a layer, the neurons from ``first`` on; an accelerator computes the hot part ``h``
  of ``x'`` meanwhile, and y = h + cold part. ``x'`` is a copy of ``x``, so that ``h`` depends on submit.
* ``pi2::delegate_experts(x, model, layer, index, routing) -> y``: a mixture of experts without its router.

Within :func:`registered`, which names ``model``, they compute: the reference of csrc/bindings/executorch.
"""

import copy
import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import argument
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.package import needed
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.export.hot import rows_of
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.lazy import LazyDown
from torch_pi2.layers.linear import QuantEmbedding, QuantLinear
from torch_pi2.layers.of_model import SparseLayer, homes, replacements
from torch_pi2.layers.prompt import skips_predictor, takes_prompt_path
from torch_pi2.ops import load
from torch_pi2.rewrite.install import replace_modules
from torch_pi2.rewrite.state import ModelState

#: Operator -> its role in the delegate's blob.
ROLES = {"pi2.delegate_ffn": 0, "pi2.delegate_submit": 1, "pi2.delegate_collect": 2, "pi2.delegate_experts": 0}

_models: dict[str, Sequence[Any]] = {}
_submitted: dict[tuple[str, int, int], torch.Tensor] = {}
_numbers = itertools.count()


@contextmanager
def registered(layers: Sequence[SparseLayer]) -> Iterator[str]:
    """Name ``layers`` for the operators within the block."""
    define()
    name = f"model{next(_numbers)}"
    _models[name] = layers
    try:
        yield name
    finally:
        del _models[name]


@cache
def define() -> torch.library.Library:
    """Register the operators with torch, once."""
    load()
    library = torch.library.Library("pi2", "FRAGMENT")
    ops = {
        "delegate_ffn": ("Tensor x, str model, int layer, int queue", _whole),
        "delegate_submit": ("Tensor x, str model, int layer, int first, int queue", _submit),
        "delegate_collect": ("Tensor h, str model, int layer, int first, int queue", _collect),
        "delegate_experts": ("Tensor x, str model, int layer, Tensor index, Tensor routing", _mixture),
    }
    for name, (arguments, kernel) in ops.items():
        library.define(f"{name}({arguments}) -> Tensor")
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"pi2::{name}", lambda x, *_: x.new_empty(x.shape), lib=library)
    return library


def _whole(x: torch.Tensor, model: str, layer: int, queue: int) -> torch.Tensor:
    y: torch.Tensor = _models[model][layer].whole(x)
    return y.contiguous()


def _mixture(x: torch.Tensor, model: str, layer: int, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = _models[model][layer](x, index, routing)
    return y.contiguous()


def _submit(x: torch.Tensor, model: str, layer: int, first: int, queue: int) -> torch.Tensor:
    _submitted[(model, layer, queue)] = cold_part(_models[model][layer], x, first)
    return x.clone(memory_format=torch.contiguous_format)


def _collect(h: torch.Tensor, model: str, layer: int, first: int, queue: int) -> torch.Tensor:
    return h + _submitted.pop((model, layer, queue))


def cold_part(ffn: SparseFFN, x: torch.Tensor, first: int) -> torch.Tensor:
    """Output of the neurons from ``first`` on in plan order, with down's bias."""
    site = ffn.site
    if first == site.intermediate:
        return torch.zeros_like(x) if ffn.bias_down is None else ffn.bias_down.expand_as(x).to(x.dtype)
    active_TC = None
    if ffn.has_predictor and not (takes_prompt_path(ffn, x) or skips_predictor(ffn, x)):
        active_TC = ffn.predict(x)[..., max(0, first - ffn.n_hot) :].contiguous()
    gate, up, thresholds = (None if b is None else b[first:] for b in (ffn.bias_gate, ffn.bias_up, ffn.thresholds))
    rows = rows_of(ffn, first, site.intermediate).contiguous()
    settings = ffn.settings(max(0, ffn.n_hot - first), ffn.threshold)
    return torch.ops.pi2.sparse_ffn(x, rows, gate, up, ffn.bias_down, active_TC, *settings[:-1], thresholds)


class DelegatedFFN(nn.Module):
    """A whole FFN in the delegate."""

    def __init__(self, model: str, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pi2.delegate_ffn(x, self.model, self.layer, 0)


class DelegatedExperts(nn.Module):
    """A mixture of experts in the delegate, called as :class:`~torch_pi2.layers.experts.SparseExperts` is."""

    def __init__(self, model: str, layer: int) -> None:
        super().__init__()
        self.model, self.layer = model, layer

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        routed = (top_k_index, top_k_weights)
        return torch.ops.pi2.delegate_experts(hidden_states, self.model, self.layer, *routed)


class SplitFFN(nn.Module):
    """An FFN with neurons below ``first`` on an accelerator (``hot``), isolated by submit and collect as a whole."""

    def __init__(self, whole: DelegatedFFN, hot: nn.Module, first: int) -> None:
        super().__init__()
        self.model, self.layer, self.hot, self.first = whole.model, whole.layer, hot, first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        settings = (self.model, self.layer, self.first, self.layer + 1)
        h = self.hot(torch.ops.pi2.delegate_submit(x, *settings))
        return torch.ops.pi2.delegate_collect(h, *settings)


def exported_layers(model: nn.Module) -> list[SparseLayer]:
    """Sparse layers of ``model`` in plan order. Raises ConfigError: dense, a shard; UnsupportedModelError: inline."""
    handle, what = ModelState.of(model), f"export of {type(model).__name__}"
    if handle is None:
        fix = "Call torch_pi2.optimize(model, ...) first; method='dense' keeps every neuron."
        argument(model, what, fix).wrong("a model that torch_pi2.optimize or load gave", "a dense model")
    if handle.group is not None:
        fix = "Export the folder that the shards were packed from."
        argument(model, what, fix).wrong("a model with all of its neurons", "a shard of one, of several processes")
    lazy = [part.ffn.site.key for _, part in replacements(model) if isinstance(part, LazyDown)]
    if lazy:
        found = f"{len(lazy)} whose activation is code of a bigger block ({', '.join(lazy[:3])})"
        fix = "Move each FFN with its activation into a module of its own, and optimise the model again."
        raise UnsupportedModelError(what, expected="FFNs that are modules, or chains of modules", found=found, fix=fix)
    return sorted(homes(model), key=lambda layer: layer.site.layer)


def delegated_copy(model: nn.Module, layers: Sequence[SparseLayer], name: str) -> nn.Module:
    """A copy of ``model`` in evaluation mode, without FFN weights: ``layers`` become operators of ``name``."""
    new: dict[nn.Module, nn.Module] = {}
    for module, part in replacements(model):
        if isinstance(part, SparseLayer):
            delegated = DelegatedExperts if isinstance(part, SparseExperts) else DelegatedFFN
            new[module] = delegated(name, layers.index(part))
        else:  # other modules of a replaced chain
            new[module] = nn.Identity()
    handle, undo = ModelState.detach(model), replace_modules(model, new)
    try:
        return copy.deepcopy(model).eval().requires_grad_(False)
    finally:
        undo()
        if handle is not None:
            handle.attach(model)


def split_hot_cold(model: nn.Module, hot: Sequence[tuple[nn.Module, int]]) -> None:
    """Replace each :class:`DelegatedFFN` by a :class:`SplitFFN`; ``hot``: by layer, the module and its neurons."""
    whole = sorted({m for m in model.modules() if isinstance(m, DelegatedFFN)}, key=lambda m: m.layer)
    replace_modules(model, {m: SplitFFN(m, *part) for m, part in zip(whole, hot, strict=True)})


#: Columns that share a scale.
_GROUP = 32


class FloatEmbedding(nn.Module):
    """An embedding with its 16-bit table and float32 outputs."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = nn.Parameter(embedding.weight.detach().clone(), requires_grad=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(input, self.weight).float()


def linears_of(model: nn.Module, asked: str) -> str:
    """The format of exported linear layers. Raises ConfigError: they are already quantised in another."""
    kinds = dict.fromkeys(module.weights for module in model.modules() if isinstance(module, QuantLinear))
    if not kinds:
        return asked
    kind = ", ".join(kinds)
    if asked not in ("float32", kind):
        fix = "Leave it out, or export the float model."
        argument(asked, "export(linears=...)", fix).wrong(f"nothing, as those of the model are in {kind}")
    return kind


def prepare_rest(model: nn.Module, linears: str) -> None:
    """Convert ``model`` to float32 in place but 16-bit tables, and quantise its linears. Raises LibraryMissingError."""
    for module in model.modules():
        if isinstance(module, QuantLinear):
            module.leave_blocks()  # this CPU's layout is not a phone's
        if isinstance(module, QuantEmbedding):
            module.dtype = torch.float32
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if type(child) is nn.Embedding and child.weight.dtype in (torch.bfloat16, torch.float16):
                parent._modules[name] = FloatEmbedding(child)
    tables = {id(m.weight) for m in model.modules() if isinstance(m, FloatEmbedding)}
    for parameter in model.parameters():
        offloaded = isinstance(parameter, OffloadedParameter)
        if id(parameter) not in tables and parameter.is_floating_point() and not offloaded:
            parameter.data = parameter.data.float()  # in place, so that tied ones stay tied
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.float()
    if linears != "float32" and not any(isinstance(m, QuantLinear) for m in model.modules()):
        _quantize(model, linears)


def _quantize(model: nn.Module, linears: str) -> None:
    with needed("torchao", "export", "it, to quantise linear layers"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8DynamicActivationIntxWeightConfig, quantize_
        from torchao.quantization.granularity import PerAxis, PerGroup
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) in tables:  # tied: the table stays as it is
            module.weight = nn.Parameter(module.weight.detach().clone(), requires_grad=False)
    dtypes: Any = {"int4": torch.int4, "int8": torch.int8}  # type: ignore[attr-defined]
    config = Int8DynamicActivationIntxWeightConfig(
        weight_dtype=dtypes[linears], weight_granularity=PerGroup(_GROUP) if linears == "int4" else PerAxis(0)
    )
    quantize_(model, config, lambda module, _: type(module) is nn.Linear and module.in_features % _GROUP == 0)
