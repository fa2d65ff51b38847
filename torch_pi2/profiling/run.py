"""``profile`` measures :class:`ActivationStats` on calibration data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.profiling.data import batches
from torch_pi2.profiling.recorder import Firing, record, threshold_map
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats, score_bins


class _Counter:
    """Sink that counts the firing of one layer."""

    def __init__(self, site: FFNSite, threshold: float, batch_size: int, scale_I: torch.Tensor | None) -> None:
        self.scale_I = scale_I
        n = site.intermediate
        sizes = tuple(1 << k for k in range(batch_size.bit_length()))
        self.stats = LayerStats(
            key=site.key,
            layer=site.layer,
            threshold=threshold,
            tokens=0,
            fired=torch.zeros(n, dtype=torch.int64),
            zeros=torch.zeros(n, dtype=torch.int64),
            abs_sum=torch.zeros(n, dtype=torch.float64),
            batch_sizes=sizes,
            batch_groups=torch.zeros(len(sizes), dtype=torch.int64),
            batch_fired=torch.zeros(len(sizes), n, dtype=torch.int64),
            score_hist=torch.zeros(HIST_BINS, dtype=torch.int64),
            experts=site.experts,
            thresholds=None if scale_I is None or threshold == 0 else threshold / scale_I,
            up_first=site.up_first,
        )

    def add(self, firing: Firing) -> None:
        s = self.stats
        fired_TI = firing.score_TI > s.cut
        self._count_batches(fired_TI, firing)
        score_NI, fired_NI = firing.score_TI[firing.real_T], fired_TI[firing.real_T]
        if self.scale_I is not None:
            score_NI = score_NI * self.scale_I
        s.tokens += len(score_NI)
        s.borrowed += len(score_NI) if firing.borrowed else 0
        s.fired += fired_NI.sum(0)
        s.zeros += (score_NI == 0).sum(0)
        s.abs_sum += score_NI.sum(0, dtype=torch.float64)
        s.score_hist += score_bins(score_NI)

    def _count_batches(self, fired_TI: torch.Tensor, firing: Firing) -> None:
        """Unions over aligned groups of 1, 2, 4, ... rows at one position; groups with padding do not count."""
        b, t = firing.grid or (1, len(fired_TI))
        union = fired_TI.reshape(b, t, fired_TI.shape[-1])
        real_BT = firing.real_T.reshape(b, t)
        for k in range(len(self.stats.batch_sizes)):
            self.stats.batch_groups[k] += int(real_BT.sum())
            self.stats.batch_fired[k] += (union & real_BT[..., None]).sum((0, 1))
            half = len(union) // 2
            if half == 0:
                break
            union = union[0 : 2 * half : 2] | union[1 : 2 * half : 2]
            real_BT = real_BT[0 : 2 * half : 2] & real_BT[1 : 2 * half : 2]


def profile(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    *,
    tokenizer: Callable[..., Any] | None = None,
    thresholds: float | Mapping[str, float] | None = None,
    scales: Mapping[str, torch.Tensor] | None = None,
    batch_size: int = 8,
    seq_len: int = 128,
    progress: bool = True,
) -> ActivationStats:
    """Measure which neurons of ``sites`` fire on ``data``. The model runs unchanged, in evaluation mode.

    An expert counts the tokens that the router gives it. If they are fewer than ``MIN_TOKENS``, some of other experts
    of its block count as well (``LayerStats.borrowed``).

    Args:
        data, tokenizer, batch_size, seq_len: see :func:`torch_pi2.profiling.data.batches`.
        thresholds: a neuron fires iff its score exceeds this (0: exact; a number, or one per site key).
        scales: site key -> ``[I]`` float32 above 0; the score is ``|act(gate)|`` times this. Default: 1.

    Raises:
        CalibrationError, NonFiniteError, DeviceError, DtypeError, UnsupportedModelError, ConfigError.
    """
    cuts = threshold_map(sites, thresholds)
    # an expert's tokens have no positions: they are not counted in groups
    sizes = {site.key: 1 if site.experts else batch_size for site in sites}
    counters = {y.key: _Counter(y, cuts[y.key], sizes[y.key], (scales or {}).get(y.key)) for y in sites}
    stream = batches(data, tokenizer=tokenizer, batch_size=batch_size, seq_len=seq_len)
    counts = record(model, stream, sites, lambda f: counters[f.site.key].add(f), progress=progress)
    made_by = {"verb": "profile", "seq_len": seq_len, **counts}
    layers = {key: counter.stats for key, counter in counters.items()}
    return ActivationStats(layers, weights_hash(model, list(sites)), made_by)
