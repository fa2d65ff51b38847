"""``profile`` measures :class:`ActivationStats` on calibration data; ``gather_inputs`` measures inputs of layers."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from torch_pi2.profiling.data import Batch, batches, first_ids
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
    first = set[int]()

    def stream() -> Iterator[Batch]:
        for batch in batches(data, tokenizer=tokenizer, batch_size=batch_size, seq_len=seq_len):
            first.update(first_ids(batch))
            yield batch

    counts = record(model, stream(), sites, lambda f: counters[f.site.key].add(f), progress=progress)
    made_by = {"verb": "profile", "seq_len": seq_len, "opening": first.pop() if len(first) == 1 else None, **counts}
    layers = {key: counter.stats for key, counter in counters.items()}
    return ActivationStats(layers, weights_hash(model, list(sites)), made_by)


#: Tokens sampled to measure output errors, per layer (7B: 2 MB) and per expert.
SAMPLE_TOKENS, EXPERT_TOKENS = 256, 32


class InputStats:
    """Inputs of one layer. ``tokens``: their number. ``sample_TK``: the first ``keep``, in the model's dtype."""

    def __init__(self, keep: int = SAMPLE_TOKENS) -> None:
        self.tokens, self._keep = 0, keep
        self._squares_K: torch.Tensor | None = None
        self._kept: list[torch.Tensor] = []

    def add(self, x_TK: torch.Tensor) -> None:
        squares_K = x_TK.float().square().sum(0, dtype=torch.float64)
        self._squares_K = squares_K if self._squares_K is None else self._squares_K + squares_K
        wanted = self._keep - min(self.tokens, self._keep)
        if wanted and len(x_TK):
            self._kept.append(x_TK[:wanted].detach().clone())
        self.tokens += len(x_TK)

    @property
    def importance(self) -> torch.Tensor | None:
        """``[K]`` float32: mean square by column, which weighs its errors; small where always 0; None: no inputs."""
        if self._squares_K is None or not self.tokens:
            return None
        mean_K = self._squares_K / self.tokens
        return (mean_K + 1e-3 * mean_K.mean()).float()

    @property
    def sample_TK(self) -> torch.Tensor | None:
        return torch.cat(self._kept) if self._kept else None


def gather_inputs(
    model: nn.Module,
    data: Sequence[Batch],
    sites: Sequence[FFNSite],
    linears: Mapping[str, nn.Linear],
    *,
    progress: bool = False,
) -> dict[str, InputStats]:
    """Run the dense ``model`` over ``data``; returns site keys and names of linear layers that run -> their inputs,
    without padding. Raises as :func:`torch_pi2.profiling.recorder.record`.
    """
    found: dict[str, InputStats] = {}
    current: list[Batch] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            x = (args[0] if args else kwargs["input"]).detach()
            mask_BT = current[-1].mask_BT
            rows_TK = x.reshape(-1, x.shape[-1])
            if mask_BT is not None and mask_BT.numel() == len(rows_TK):
                rows_TK = rows_TK[mask_BT.flatten()]
            found.setdefault(name, InputStats()).add(rows_TK)

        return hook

    def firing(f: Firing) -> None:
        keep = SAMPLE_TOKENS if f.site.experts is None else EXPERT_TOKENS
        found.setdefault(f.site.key, InputStats(keep)).add(f.x_TH[f.real_T])

    def stream() -> Iterator[Batch]:
        for batch in data:
            current[:] = [batch]
            yield batch

    with ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.enter_context(linear.register_forward_pre_hook(watch(name), with_kwargs=True))
        record(model, stream(), sites, firing, progress=progress, label="inputs", logits=bool(linears))
    return found
