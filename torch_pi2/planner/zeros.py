"""Zeros: how many neurons of each layer add nothing, or hardly anything, for a token."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from torch import nn

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.memory import is_mapped
from torch_pi2.base.modules import fresh_settings
from torch_pi2.graph.find import search
from torch_pi2.planner.hot_neurons import gate_method
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.profiling.recorder import Firing, record
from torch_pi2.rewrite.gpu import on_the_cpu
from torch_pi2.rewrite.skeleton import on_meta
from torch_pi2.types.config import Config
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
        return LayerZeros(*about, gate_method(site), found["calls"], zeros, near, below)


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
