"""Profiling: calibration data through the recorder into :class:`ActivationStats`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_pi2.distributed.ranks import Ranks
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.profiling.data import batches, digest
from torch_pi2.profiling.recorder import Firing, record, threshold_map
from torch_pi2.profiling.samples import routed_tokens
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import HIST_BINS, ActivationStats, LayerStats, Reservoir, pack_bits, score_bins


class _Counter:
    """Sink that counts one layer's firing."""

    def __init__(
        self,
        site: FFNSite,
        threshold: float,
        batch_size: int,
        cofire_tokens: int,
        seed: int,
        scale_I: torch.Tensor | None = None,
    ) -> None:
        self.scale_I = scale_I
        n = site.intermediate
        sizes = tuple(1 << k for k in range(batch_size.bit_length()))
        self.reservoir = Reservoir(cofire_tokens, seed)
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
            cofire_bits=torch.zeros(cofire_tokens, -(-n // 8), dtype=torch.uint8),
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
        rows, slots = self.reservoir.place(len(fired_NI), firing.part)
        if len(rows):
            s.cofire_bits[slots] = pack_bits(fired_NI[rows])

    def _count_batches(self, fired_TI: torch.Tensor, firing: Firing) -> None:
        """Unions over aligned groups of 1, 2, 4, ... rows at one position; a group counts if all of it is real."""
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

    def result(self, ranks: Ranks) -> LayerStats:
        """Sums of all processes' counts; of their sampled tokens, those with the smallest keys."""
        order, keys_S = self.reservoir.order(), self.reservoir.keys_S
        bits = self.stats.cofire_bits[order]
        counts = replace(self.stats, cofire_bits=bits[:0])
        parts = ranks.each((counts, bits, keys_S[order]))
        bits = torch.cat([found for _, found, _ in parts])
        first = np.argsort(np.concatenate([keys for _, _, keys in parts]))[: self.reservoir.size]
        counts = reduce(LayerStats.plus, [found for found, _, _ in parts])
        return replace(counts, cofire_bits=bits[torch.from_numpy(first)])


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
    cofire_tokens: int = 2048,
    seed: int = 0,
    progress: bool = True,
    ranks: Ranks | None = None,
) -> ActivationStats:
    """Measure which neurons of ``sites`` fire on ``data``. The model runs unchanged, in evaluation mode.

    Args:
        model: any module; its training flags are restored.
        data, tokenizer, batch_size, seq_len: see :func:`torch_pi2.profiling.data.batches`.
        thresholds: a neuron fires iff its score exceeds this (0: exact; a number, or one per site key).
        scales: site key -> ``[I]`` float32 above 0, the score is ``|act(gate)|`` times that. Default: 1.
        cofire_tokens: S, tokens sampled as firing bits per layer (``S * I / 8`` bytes); an expert samples its share.
        seed: of that sample; same seed and data, same statistics.
        progress: show a bar on a terminal.
        ranks: processes that make this call with the same arguments and share the batches; None: this one takes all.
            Each gets the result of one process: counts and samples bit for bit, sums of scores up to the last bits of
            float64.

    An expert counts only the tokens that the router gives it. If those are fewer than ``MIN_TOKENS``, some that went to
    other experts of its block count as well (``LayerStats.borrowed``).

    Raises:
        CalibrationError, NonFiniteError, DeviceError, DtypeError, UnsupportedModelError; ConfigError: also if
            processes have different models, data or settings.
    """
    ranks = ranks or Ranks()
    cuts = threshold_map(sites, thresholds)
    shares = chosen_shares(getattr(model, "config", None), sites)
    settings = [site.key for site in sites], cuts, scales, batch_size, seq_len, cofire_tokens, seed
    ranks.check_same("settings", lambda: digest(settings))
    counters = {
        s.key: _Counter(
            s,
            cuts[s.key],
            batch_size if s.experts is None else 1,  # the positions of its tokens are unknown
            routed_tokens(cofire_tokens, shares.get(s.experts, 1.0)),
            seed,
            (scales or {}).get(s.key),
        )
        for s in sites
    }
    stream = batches(data, tokenizer=tokenizer, batch_size=batch_size, seq_len=seq_len)
    counts = record(model, stream, sites, lambda f: counters[f.site.key].add(f), progress=progress, ranks=ranks)
    model_hash = ranks.check_same("weights", lambda: weights_hash(model, list(sites)))
    made_by = {"verb": "profile", "seed": seed, "seq_len": seq_len, **counts}
    return ActivationStats({k: c.result(ranks) for k, c in counters.items()}, model_hash, made_by)
