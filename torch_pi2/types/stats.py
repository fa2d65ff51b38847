"""``ActivationStats``: profiling results per neuron and layer (``stats.safetensors``); ``LossCurve``.

Counts are exact int64. No activations are stored: only counts and sums.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
import torch

from torch_pi2.base.fields import Field, Limits, argument, from_json, limited, optional
from torch_pi2.base.files import atomic_write, check_artifact
from torch_pi2.base.reading import parse
from torch_pi2.base.tensorfile import Spec, packed, read_tensors
from torch_pi2.errors import ArtifactError

#: Versions: plain; with a threshold per neuron; with scores of up instead of the gate.
STATS_VERSION, STATS_WITH_THRESHOLDS, STATS_UP_FIRST = 1, 2, 3
STATS_FILE = "stats.safetensors"
STATS_FORMAT = "torch_pi2.stats"

#: Score histogram: bin = top 12 bits below the sign of the float32 (8 of exponent, 4 of mantissa), that is 16
#: bins per octave over all magnitudes, found by one shift; a bin is at most 1/16 of its value wide.
HIST_BINS = 1 << 12
_HIST_SHIFT = 19

#: Axes and dtypes of a layer's tensors in a file, see :class:`LayerStats`.
_TENSORS: dict[str, tuple[tuple[str, ...], torch.dtype]] = {
    "fired": (("I",), torch.int64),
    "zeros": (("I",), torch.int64),
    "abs_sum": (("I",), torch.float64),
    "batch_fired": (("K", "I"), torch.int64),
    "batch_groups": (("K",), torch.int64),
    "score_hist": (("BINS",), torch.int64),
}
#: Additional tensor of layers with a threshold per neuron.
_OWN = "thresholds"
_FIX = "The file is damaged; profile again."


def pack_bits(fired_TI: torch.Tensor) -> torch.Tensor:
    """``[T, I]`` bool -> ``[T, ceil(I/8)]`` uint8, neuron ``8*j + k`` in bit ``k`` of byte ``j``."""
    return torch.from_numpy(np.packbits(fired_TI.cpu().numpy(), axis=1, bitorder="little"))


def unpack_bits(bits: torch.Tensor, n_neurons: int) -> torch.Tensor:
    return torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, count=n_neurons, bitorder="little")).bool()


def score_bins(score: torch.Tensor) -> torch.Tensor:
    """Histogram ``[HIST_BINS]`` int64 of non-negative float32 scores."""
    bins = score.float().contiguous().view(torch.int32).flatten() >> _HIST_SHIFT
    return torch.bincount(bins, minlength=HIST_BINS)


def bin_edge(index: int) -> float:
    """Smallest score of a bin."""
    return float(np.array([index << _HIST_SHIFT], dtype=np.int32).view(np.float32)[0])


class Reservoir:
    """Uniform sample of at most ``size`` rows of a stream, by smallest random keys; ``seen``: rows so far."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seen = size, 0
        self._keys_S, self._random = np.empty(0), np.random.default_rng(seed)

    def place(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """For the next ``n`` rows of the stream: ``(rows to keep, slots they go to)``, int64 each."""
        kept = len(self._keys_S)
        keys = np.concatenate((self._keys_S, self._random.random(n)))
        self.seen += n
        stays = np.ones(len(keys), dtype=bool)
        if len(keys) > self.size:
            stays[np.argpartition(keys, self.size)[self.size :]] = False
        rows = np.flatnonzero(stays[kept:])
        slots = np.concatenate((np.flatnonzero(~stays[:kept]), np.arange(kept, self.size)))[: len(rows)]
        self._keys_S = np.concatenate((self._keys_S, np.empty(min(self.size, kept + n) - kept)))
        self._keys_S[slots] = keys[kept + rows]
        return torch.from_numpy(rows), torch.from_numpy(slots)


@dataclass(kw_only=True)
class LayerHead:
    """The measurements of one FFN that are not tensors.

    Attributes:
        key, layer: of the site. experts: for an expert, the module that holds it.
        threshold: a neuron fired iff score > threshold. The score is ``|act(gate)|``, or with individual thresholds
            ``|act(gate)| * threshold / thresholds``.
        tokens: number of real tokens; for an expert those routed to it, plus ``borrowed`` ones: tokens of other experts
            in its block, used for experts with few tokens.
        batch_sizes: 1, 2, 4, ... tokens of different sequences taken together.
        up_first: read ``|up|`` for ``|act(gate)|`` everywhere here.
    """

    key: str
    layer: int
    threshold: float
    tokens: int
    batch_sizes: tuple[Annotated[int, Limits(1)], ...]
    experts: str | None = optional(None)
    borrowed: int = optional(0)
    up_first: bool = optional(False)


@dataclass(kw_only=True)
class LayerStats(LayerHead):
    """Measurements of one FFN with I neurons.

    Attributes:
        fired: ``[I]`` int64 tokens for which the neuron fired.
        zeros: ``[I]`` int64 tokens for which its score was exactly zero; with a threshold above 0, of ``scored`` ones.
        abs_sum: ``[I]`` float64 sum of scores.
        batch_groups: ``[K]`` int64 groups of each of the ``batch_sizes``; batch_fired: ``[K, I]`` int64 groups in which
            the neuron fired at least once.
        score_hist: ``[HIST_BINS]`` int64 over all neurons and tokens.
        thresholds: ``[I]`` float32, individual thresholds on ``|act(gate)|`` that equal ``threshold`` on the score;
            None: all are ``threshold``.
    """

    fired: torch.Tensor
    zeros: torch.Tensor
    abs_sum: torch.Tensor
    batch_groups: torch.Tensor
    batch_fired: torch.Tensor
    score_hist: torch.Tensor
    thresholds: torch.Tensor | None = None

    @property
    def intermediate(self) -> int:
        return len(self.fired)

    @property
    def cut(self) -> float | torch.Tensor:
        """Threshold on ``|act(gate)|``: one number, or ``[I]``."""
        return self.threshold if self.thresholds is None else self.thresholds

    @property
    def active_share(self) -> float:
        """Mean share of neurons that fire per token."""
        return float(self.fired.sum()) / max(1, self.tokens * self.intermediate)

    @property
    def sparsity(self) -> float:
        """Share of scores that are exactly zero."""
        return float(self.zeros.sum()) / max(1, self.tokens * self.intermediate)

    def frequency(self, batch: int = 1) -> torch.Tensor:
        """``[I]`` float64: how often a neuron fires for at least one of ``batch`` tokens of different sequences.

        Interpolated in log2(batch) between measured sizes; beyond the largest, groups of that many tokens count as
        independent. Raises ConfigError: no tokens were measured, or ``batch`` is below 1.
        """
        sizes = [s for s, n in zip(self.batch_sizes, self.batch_groups.tolist()) if n > 0]
        if not sizes:
            argument(batch, f"firing frequency of {self.key}", "Profile more text.").wrong(
                "statistics of some tokens", "none" if self.experts is None else "none: its router gave it no token"
            )
        if batch < 1:
            argument(batch, f"batch size for the firing frequency of {self.key}").wrong("1 or more")
        if batch > sizes[-1]:
            return 1 - (1 - self.frequency(sizes[-1])).pow(batch / sizes[-1])
        upper = next(s for s in sizes if s >= batch)
        lower = max(s for s in sizes if s <= batch)
        low, high = (
            self.batch_fired[self.batch_sizes.index(s)].double() / self.batch_groups[self.batch_sizes.index(s)].double()
            for s in (lower, upper)
        )
        weight = 0.0 if upper == lower else math.log2(batch / lower) / math.log2(upper / lower)
        return low + (high - low) * weight

    def skew(self) -> float:
        """Gini coefficient of the neurons' frequencies: 0 = all equal, near 1 = few neurons dominate."""
        f = torch.sort(self.fired.double()).values
        total = float(f.sum())
        if total == 0:
            return 0.0
        n = len(f)
        rank = torch.arange(1, n + 1, dtype=torch.float64)
        return float((2 * (rank * f).sum() / (n * total)) - (n + 1) / n)


@dataclass
class ActivationStats:
    """Statistics of all FFNs of a model, in order of execution."""

    layers: dict[str, LayerStats]
    model_hash: str
    made_by: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, key: str) -> LayerStats:
        if key not in self.layers:
            argument(
                key, "layer in the activation statistics", "Profile the model with this FFN among the sites."
            ).wrong(f"one of {', '.join(list(self.layers)[:4])}{', ...' if len(self.layers) > 4 else ''}", repr(key))
        return self.layers[key]

    def __iter__(self) -> Iterator[LayerStats]:
        return iter(self.layers.values())

    @property
    def tokens(self) -> int:
        """Number of real tokens that the model was run on."""
        seen = max((s.tokens for s in self if s.experts is None), default=0)
        return seen or int(self.made_by.get("tokens", max((s.tokens for s in self), default=0)))

    def threshold_for(self, key: str, share: float) -> float:
        """Cut on the score at which ``share`` of a layer's (token, neuron) pairs do not fire (CATS, 2404.08763).

        Interpolated in the histogram: off by 1/16 of the value at most. 0.0 if exact zeros reach the share alone.
        Raises ConfigError unless 0 <= share < 1.
        """
        if not 0.0 <= share < 1.0:
            argument(share, "share of neurons to skip", "0.7 means 70 % skipped.").wrong("0 <= share < 1", str(share))
        stats = self[key]
        want = share * stats.tokens * stats.intermediate
        if float(stats.zeros.sum()) >= want:
            return 0.0
        below = torch.cumsum(stats.score_hist, 0)
        bin_ = int(torch.searchsorted(below, torch.tensor(math.ceil(want))))
        inside = float(stats.score_hist[bin_])
        part = 1.0 - (float(below[bin_]) - want) / inside
        low, high = bin_edge(bin_), bin_edge(bin_ + 1)
        return low + (high - low) * part

    def save(self, path: str | Path) -> Path:
        """Write ``stats.safetensors`` (into ``path`` if that is a folder) by atomic rename; returns its path."""
        path = _file(path)
        tensors: dict[str, torch.Tensor] = {}
        layers = []
        version = STATS_VERSION if all(s.thresholds is None for s in self) else STATS_WITH_THRESHOLDS
        for s in self:
            for name in (*_TENSORS, _OWN):
                if getattr(s, name) is not None:
                    tensors[f"{s.key}.{name}"] = getattr(s, name)
            layers.append({one.name: getattr(s, one.name) for one in fields(LayerHead)})
        version = STATS_UP_FIRST if any(s.up_first for s in self) else version
        meta = {"format": STATS_FORMAT, "version": str(version), "model_hash": self.model_hash}
        meta |= {"made_by": json.dumps(self.made_by), "layers": json.dumps(layers)}
        atomic_write(path, packed(tensors, meta))
        return path

    @staticmethod
    def load(path: str | Path, *, model_hash: str | None = None) -> "ActivationStats":
        """Read what :meth:`save` wrote. Raises ArtifactError: missing, damaged, of another version. StaleArtifactError:
        made from other weights than ``model_hash`` (from :func:`torch_pi2.types.plan.weights_hash`).
        """
        path = _file(path)
        tensors, meta = read_tensors(path)
        return ActivationStats.from_tensors(tensors, meta, path, model_hash=model_hash)

    @staticmethod
    def from_tensors(
        tensors: Mapping[str, torch.Tensor], meta: Mapping[str, str], where: Path | str, *, model_hash: str | None
    ) -> "ActivationStats":
        """Statistics from the tensors and metadata of the file ``where``. Raises as :meth:`load`."""
        check_stats_artifact(where, meta, model_hash)
        found = Field(parse(meta.get("layers", ""), f"{where}, layers", fix=_FIX), f"{where}, layers", _FIX)
        layers = {layer.key: layer for layer in (_layer(row, tensors, where) for row in found.items())}
        if len(layers) < len(found.value):
            found.wrong("layers of different keys", "one twice")
        made_by = Field(parse(meta.get("made_by", ""), f"{where}, made_by"), f"{where}, made_by", _FIX)
        return ActivationStats(layers, meta["model_hash"], made_by.names(allowed=None))


def check_stats_artifact(where: Path | str, meta: Mapping[str, str], model_hash: str | None) -> None:
    """Check the metadata. Raises as :meth:`ActivationStats.load`."""
    newer = (v for v in (STATS_WITH_THRESHOLDS, STATS_UP_FIRST) if meta.get("version") == str(v))
    check_artifact(where, meta, STATS_FORMAT, next(newer, STATS_VERSION), model_hash)


def _layer(row: Field, tensors: Mapping[str, torch.Tensor], where: Path | str) -> LayerStats:
    head: LayerHead = row.take(LayerHead)
    key = head.key
    found: dict[str, Any] = {n: tensors[f"{key}.{n}"] for n in (*_TENSORS, _OWN) if f"{key}.{n}" in tensors}
    if missing := [name for name in _TENSORS if name not in found]:
        _refuse(f"{where}: {key}", "all its tensors", f"no {', '.join(missing)}")
    neurons = found["fired"].shape[0] if found["fired"].dim() else 0
    known = {"I": neurons, "K": len(head.batch_sizes), "BINS": HIST_BINS}
    for name, value in found.items():
        axes, dtype = _TENSORS.get(name, (("I",), torch.float32))
        wanted = Spec(tuple(known[axis] for axis in axes), dtype)
        if Spec.of(value) != wanted:
            _refuse(f"{where}, {key}.{name}", str(wanted), str(Spec.of(value)))
        if value.numel() and not 0 <= float(value.min()) <= float(value.max()) < math.inf:
            _refuse(f"{where}, {key}.{name}", "numbers of 0 or more", "others")
    return LayerStats(**vars(head), **found)


def _refuse(what: str, expected: str, found: str) -> NoReturn:
    raise ArtifactError(what, expected=expected, found=found, fix=_FIX)


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".safetensors" else path / STATS_FILE


@dataclass(frozen=True)
class LossPoint:
    """``skipped``: share of all neurons; ``change``: relative increase of the loss."""

    skipped: float = limited(0, 1)
    change: float = limited(-1.0)


@dataclass(frozen=True, kw_only=True)
class LossCurve:
    """Fields of ``made_by`` in statistics, measured on calibration sequences not used for thresholds: the ``score``
    that these apply to, the budget ``max_loss``, the relative increase of the loss with them, and ``loss_curve``,
    ascending by the share of skipped neurons.
    """

    score: str
    max_loss: float
    loss_change: float = limited(-1.0)
    loss_curve: tuple[LossPoint, ...]

    @staticmethod
    def of(made_by: Mapping[str, Any], where: str) -> "LossCurve | None":
        """The curve in ``made_by`` of ``where``; None: there was no budget. Raises ArtifactError: damaged."""
        if not made_by.get("loss_curve"):
            return None
        return from_json(LossCurve, {f.name: made_by.get(f.name) for f in fields(LossCurve)}, where, _FIX)
