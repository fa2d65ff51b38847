"""Zeros: how many neurons of each layer add nothing, or hardly anything, for a token, and what skipping them saves."""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import argument, checked
from torch_pi2.base.memory import is_mapped
from torch_pi2.base.modules import fresh_settings
from torch_pi2.decode.budget import kv_bytes
from torch_pi2.fitting.search import initial_rank
from torch_pi2.formats import FLOAT, row_bytes
from torch_pi2.graph.find import search
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.machine.hardware import Hardware
from torch_pi2.ops.activations import of_all
from torch_pi2.planner.cost import step_ms
from torch_pi2.planner.hot_neurons import gate_method
from torch_pi2.planner.model_shape import LayerShape, ModelShape
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.profiling.recorder import Firing, record
from torch_pi2.rewrite.gpu import on_the_cpu
from torch_pi2.rewrite.skeleton import on_meta
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.site import FFNSite

#: Tokens of a call whose near zeros are counted, at most: their neurons are sorted.
_SAMPLED = 64


@dataclass(frozen=True)
class LayerZeros:
    """One feed-forward layer, or the experts of a block together.

    Attributes:
        key: of the site, or the module of the experts. experts: their number (1: none). method: ``exact`` where zeros
            are exact, else ``threshold``. calls: tokens; for experts pairs of a token and an expert of its own.
        zeros: share of neurons whose score (``|act(gate)|``; ``|h|`` without a gate, or with an activated up) is 0.
        near_zeros: share of the neurons with the smallest ``|h|`` (TEAL, arXiv 2408.14690) that have together at most
            ``near`` of the norm of ``h``, the input of down. Zeros are among them.
        below_gate: the same of the smallest scores: what a threshold on them skips (CATS, arXiv 2404.08763).
    """

    key: str
    form: str
    hidden: int
    neurons: int
    experts: int
    method: str
    calls: int
    zeros: float
    near_zeros: float
    below_gate: float
    site: FFNSite = field(repr=False)


@dataclass(frozen=True)
class Zeros:
    """Result of :func:`torch_pi2.zeros`. ``left``: name -> reason of layers that were not measured."""

    layers: list[LayerZeros]
    tokens: int
    left: dict[str, str]

    def mean(self, share: str) -> float:
        """Of ``zeros``, ``near_zeros`` or ``below_gate``; a layer, or block of experts, counts by its neurons."""
        return sum(getattr(y, share) * y.neurons for y in self.layers) / sum(y.neurons for y in self.layers)


class _Count:
    """Sink for the firing of a layer, or of the experts of a block."""

    def __init__(self, near: float) -> None:
        self.near, self.sites, self.sums = near, list[FFNSite](), Counter[str]()

    def add(self, firing: Firing) -> None:
        if firing.borrowed:
            return
        score_NI, h_NI = firing.score_TI[firing.real_T], firing.h().detach()[firing.real_T].float()
        self.sums += Counter(calls=len(h_NI), zeros=int((score_NI == 0).sum()))
        step = -(-len(h_NI) // _SAMPLED) | 1  # odd: windows have even lengths
        score_NI, h_NI = score_NI[::step], h_NI[::step]
        nonzero = int(score_NI.count_nonzero())
        self.sums["nonzero"] += nonzero
        for name, order_NI in (("near_zeros", h_NI.abs()), ("below_gate", score_NI)):
            sums_NI = h_NI.double().square().gather(1, order_NI.argsort(1)).cumsum(1)
            self.sums[name] += nonzero - int((sums_NI > self.near**2 * sums_NI[:, -1:]).sum())

    def result(self) -> LayerZeros:
        site, found = self.sites[-1], self.sums  # the last: experts are counted by its number
        zeros = found["zeros"] / max(1, found["calls"] * site.intermediate)
        near, below = (zeros + (1 - zeros) * found[n] / max(1, found["nonzero"]) for n in ("near_zeros", "below_gate"))
        about = (site.experts or site.key, site.form, site.hidden, site.intermediate, len(self.sites))
        return LayerZeros(*about, gate_method(site), found["calls"], zeros, near, below, site)


@checked
@fresh_settings()
def zeros(
    model: nn.Module,
    data: Any,
    *,
    tokenizer: Any = None,
    tokens: int = 4096,
    near: float = 0.01,
    progress: bool = False,
) -> Zeros:
    """Count zeros and near zeros of the neurons of each feed-forward layer of ``model``, which is not modified.

    Args:
        model: dense, of transformers; :func:`torch_pi2.load_mapped` gives those larger than memory.
        data, tokenizer: as of :func:`torch_pi2.profile`. tokens: of ``data``, about.
        near: share of the norm of a token's neurons that its near zeros have together, at most.

    Raises:
        CalibrationError: fewer than 64 tokens. UnsupportedModelError: no layer, or one that does not run.
            NonFiniteError, ConfigError.
    """
    argument(near, "zeros(near=...)").number(0, 1, below=True)
    with on_the_cpu(model):
        kept = calibration_batches(model, data, tokenizer, Config(calibration_tokens=tokens))
        found = search(on_meta(model), on_meta=True) if is_mapped(model) else search(model)
        counts: dict[str, _Count] = defaultdict(lambda: _Count(near))
        for site in found.sites:
            counts[site.experts or site.key].sites.append(site)

        def sink(firing: Firing) -> None:
            counts[firing.site.experts or firing.site.key].add(firing)

        tokens = record(model, kept, found.sites, sink, progress=progress, label="zeros")["tokens"]
    return Zeros([count.result() for count in counts.values()], tokens, dict(found.left))


def gains(
    model: nn.Module, layers: Sequence[LayerZeros], hardware: Hardware | None, weights: str, context: int = 1024
) -> list[dict[str, Any]]:
    """What a token reads and takes, everything in memory: dense, and with each method that skips some of ``layers``.

    Args:
        weights: format of all matrices: int4 or int8 (with int8 activations), or float, as they are.

    Returns:
        ``method``: ``dense``; ``exact`` where zeros are exact, other layers dense; ``lowrank`` instead, with a
        predictor that selects as many neurons as fire; ``threshold`` in the other layers, at ``below_gate``.
        ``ffn_bytes`` of layers and predictors, ``bytes`` of all matrices but experts outside ``layers``.
        ``tokens_per_s`` by the cost model of plans; None without ``hardware``.
    """
    kind = next(p.dtype for p in model.parameters() if p.is_floating_point())
    kernel = f"{dtype_name(kind)}/float" if weights == FLOAT else f"{weights}/int8"
    head: Any = getattr(model, "get_output_embeddings", lambda: None)() or nn.Module()
    apart = [head, *(module for module in model.modules() if isinstance(module, nn.Embedding))]
    skipped = {id(parameter) for module in apart for parameter in module.parameters()}
    rest = sum(p.numel() for p in model.parameters() if p.dim() == 2 and id(p) not in skipped)
    rest -= sum(y.site.rows_per_neuron * y.neurons * y.hidden for y in layers if y.site.experts is None)
    numbers = (max(0, rest), sum(p.numel() for p in head.parameters() if p.dim() == 2))
    rest_bytes, head_bytes = (n * row_bytes(kernel.partition("/")[0], 32) // 32 for n in numbers)
    config: Any = getattr(model, "config", None)
    chosen = chosen_shares(config, [layer.site for layer in layers])
    before: dict[str, Any] = {"attention_bytes": rest_bytes // len(layers)}
    if hasattr(config, "num_hidden_layers"):
        before["kv_bytes"] = kv_bytes(config, 1, torch.bfloat16) // len(layers)
    made = []
    for method in (Method.DENSE, Method.EXACT, Method.LOWRANK, Method.THRESHOLD):
        own = [_method_of(layer, method) for layer in layers]
        if method not in own and method != Method.DENSE:
            continue
        shapes, ffn_bytes, speed = list[LayerShape](), 0.0, None
        for layer, one in zip(layers, own):
            shape, nbytes = _shape(layer, one, kernel, chosen.get(layer.site.experts, 1.0))
            shapes += [replace(shape, **before), *[shape] * (layer.experts - 1)]
            ffn_bytes += nbytes
        if hardware is not None:
            whole = ModelShape(tuple(shapes), head_bytes, kernel, 0, shapes[0].hidden)
            hot = [shape.base_hot for shape in shapes]
            speed = 1e3 / math.fsum(step_ms(whole, hardware, batch=1, context=context, hot=hot).values())
        read = {"ffn_bytes": round(ffn_bytes), "bytes": round(ffn_bytes) + rest_bytes + head_bytes}
        lossless = {*own} <= {Method.DENSE, Method.EXACT}
        made.append({"method": method, "lossless": lossless, **read, "tokens_per_s": speed})
    return made


def _method_of(layer: LayerZeros, method: str) -> str:
    """What ``layer`` has in a model with ``method``."""
    if method == Method.DENSE or layer.method == Method.THRESHOLD:
        return Method.THRESHOLD if method == Method.THRESHOLD else Method.DENSE
    return Method.EXACT if method == Method.THRESHOLD or of_all(layer.site.activation) else method


def _shape(layer: LayerZeros, method: str, kernel: str, chosen: float) -> tuple[LayerShape, float]:
    """The layer with ``method``, and the bytes of it that a token reads."""
    size, rows, rank, predictor_bytes = layer.neurons, layer.site.rows_per_neuron, 0, 0
    row = row_bytes(kernel.partition("/")[0], layer.hidden)
    active = 1 - (layer.below_gate if method == Method.THRESHOLD else layer.zeros)
    shares = [1.0] + [1.0 if method == Method.DENSE else active] * (rows - 1)  # of the rows of a neuron
    if method == Method.LOWRANK:
        rank, shares = initial_rank(layer.site, active, 0.5), [active] * rows
        predictor_bytes = rank * row_bytes("int4", layer.hidden) + size * row_bytes("int4", rank)
    sizes = {"hidden": layer.hidden, "intermediate": size, "rows": rows, "neuron_bytes": rows * row}
    predictor = {"predictor": "int4/int8" if rank else None, "rank": rank, "predictor_bytes": predictor_bytes}
    others = {"recall": Config().target_recall, "predicted_active": active, "cluster": 1, "slot_bytes": rows * row}
    alone = {"attention_bytes": 0, "attention_kernel": kernel, "kv_bytes": 0}
    about: dict[str, Any] = {**sizes, **predictor, **others, **alone, "chosen": chosen, "experts": layer.experts}
    about |= {"base_hot": size if method == Method.DENSE else 0, "frequencies": ((1, np.full(size, active)),)}
    shape = LayerShape(layer.key, kernel=kernel, method=method, exact_zeros=layer.method == Method.EXACT, **about)
    return shape, layer.experts * chosen * (sum(shares) * size * row + predictor_bytes)
