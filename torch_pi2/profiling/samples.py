"""Training samples for predictors: FFN inputs and which neurons fired, a bounded uniform sample of tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.profiling.data import batches
from torch_pi2.profiling.firing import Firing
from torch_pi2.profiling.recorder import record, threshold_map
from torch_pi2.spec.site import FFNSite
from torch_pi2.spec.stats import Reservoir, pack_bits, unpack_bits


@dataclass
class Samples:
    """Tokens seen by one FFN.

    Attributes:
        x_NH: ``[N, H]`` its inputs, model dtype.
        fired_bits: ``[N, ceil(I/8)]`` uint8, see :func:`torch_pi2.spec.stats.pack_bits`.
        intermediate: I.
    """

    x_NH: torch.Tensor
    fired_bits: torch.Tensor
    intermediate: int

    def __len__(self) -> int:
        return len(self.x_NH)

    def fired(self, rows: slice | torch.Tensor | None = None) -> torch.Tensor:
        """``[n, I]`` bool."""
        return unpack_bits(self.fired_bits if rows is None else self.fired_bits[rows], self.intermediate)

    def split(self, held_back: float) -> tuple[Samples, Samples]:
        """``(fitting part, held-back part)``; the last ``held_back`` share of the tokens is held back."""
        cut = max(1, min(len(self) - 1, round(len(self) * (1 - held_back))))
        return (
            Samples(self.x_NH[:cut], self.fired_bits[:cut], self.intermediate),
            Samples(self.x_NH[cut:], self.fired_bits[cut:], self.intermediate),
        )


def sample_bytes(site: FFNSite, n_tokens: int, element_bytes: int) -> int:
    """Memory that ``n_tokens`` samples of a site take."""
    return n_tokens * (site.hidden * element_bytes + -(-site.intermediate // 8))


def routed_tokens(n_tokens: int, share: float) -> int:
    """How many tokens are kept of a layer that has ``share`` of all on average, where of others ``n_tokens`` are.

    Twice the average of an expert, as some are chosen more often, and enough to tell something.
    """
    return n_tokens if share == 1 else min(n_tokens, max(256, math.ceil(2 * share * n_tokens)))


class _Collector:
    """Sink that keeps a uniform sample of one layer's tokens."""

    def __init__(self, site: FFNSite, n_tokens: int, threshold: float | torch.Tensor, seed: int) -> None:
        self.site, self.threshold = site, threshold
        self.reservoir = Reservoir(n_tokens, seed)
        self.x: torch.Tensor | None = None
        self.bits = torch.zeros(n_tokens, -(-site.intermediate // 8), dtype=torch.uint8)

    def add(self, firing: Firing) -> None:
        x_NH = firing.x_TH[firing.real_T]
        if self.x is None:
            self.x = torch.zeros(len(self.bits), x_NH.shape[1], dtype=x_NH.dtype)
        rows, slots = self.reservoir.place(len(x_NH))
        if len(rows):
            self.x[slots] = x_NH[rows]
            self.bits[slots] = pack_bits(firing.score_TI[firing.real_T][rows] > self.threshold)

    def result(self) -> Samples:
        assert self.x is not None
        n = min(self.reservoir.seen, self.reservoir.size)
        return Samples(self.x[:n].clone(), self.bits[:n].clone(), self.site.intermediate)


def collect_samples(
    model: nn.Module,
    data: Any,
    sites: Sequence[FFNSite],
    n_tokens: int,
    *,
    thresholds: float | Mapping[str, float | torch.Tensor] | None = None,
    tokenizer: Callable[..., Any] | None = None,
    batch_size: int = 8,
    seq_len: int = 128,
    seed: int = 0,
    max_bytes: int = 2 << 30,
    progress: bool = True,
) -> dict[str, Samples]:
    """A uniform sample of at most ``n_tokens`` real tokens per site, the same tokens for all sites.

    Args:
        model, data, tokenizer, batch_size, seq_len: see :func:`torch_pi2.profiling.run.profile`.
        n_tokens: of an expert, which has few of all tokens, accordingly fewer (:func:`routed_tokens`).
        thresholds: a neuron fires iff its score exceeds this (0: exact; one for all neurons of a site, or ``[I]``).
        max_bytes: bound on the memory of the result.

    Returns:
        site key -> :class:`Samples`, in random order (a reservoir's).

    Raises:
        ConfigError: the samples of all sites together exceed ``max_bytes`` (see :func:`sample_groups`).
        CalibrationError and others: as ``profile``.
    """
    groups = list(_groups(model, sites, n_tokens, max_bytes))
    if len(groups) > 1:
        need = samples_bytes(model, sites, n_tokens)
        raise ConfigError(
            "memory for predictor samples",
            expected=f"at most max_bytes={max_bytes}",
            found=f"{need} bytes for {n_tokens} tokens of {len(sites)} FFNs",
            fix="Take fewer tokens, raise max_bytes, or use sample_groups, which runs the model once per group.",
        )
    stream = batches(data, tokenizer=tokenizer, batch_size=batch_size, seq_len=seq_len)
    cuts = threshold_map(sites, thresholds)
    kept = _tokens(model, sites, n_tokens)
    collectors = {s.key: _Collector(s, kept[s.key], cuts[s.key], seed) for s in sites}
    record(model, stream, sites, lambda f: collectors[f.site.key].add(f), progress=progress, label="samples")
    return {k: c.result() for k, c in collectors.items()}


def sample_groups(
    model: nn.Module, data: Any, sites: Sequence[FFNSite], n_tokens: int, *, max_bytes: int = 2 << 30, **options: Any
) -> Iterator[dict[str, Samples]]:
    """As :func:`collect_samples`, a few layers at a time so that each dict stays within ``max_bytes``.

    ``data`` is run through once per group, so it must not be an iterator that can be used only once.
    """
    for group in _groups(model, sites, n_tokens, max_bytes):
        bound = max(max_bytes, samples_bytes(model, group, n_tokens))
        yield collect_samples(model, data, group, n_tokens, max_bytes=bound, **options)


def _tokens(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int) -> dict[str, int]:
    """Site key -> tokens to keep."""
    shares = chosen_shares(getattr(model, "config", None), sites)
    return {s.key: routed_tokens(n_tokens, shares.get(s.experts, 1.0)) for s in sites}


def _bytes(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int) -> dict[str, int]:
    """Site key -> memory of its samples."""
    tokens = _tokens(model, sites, n_tokens)
    return {s.key: sample_bytes(s, tokens[s.key], model.get_parameter(s.up.weight).element_size()) for s in sites}


def bytes_per_token(model: nn.Module, sites: Sequence[FFNSite]) -> int:
    """Memory of the samples of all ``sites`` over that of their tokens."""
    many = 1 << 16
    return -(-samples_bytes(model, sites, many) // many)


def samples_bytes(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int) -> int:
    """Memory that :func:`collect_samples` takes: for experts over ``n_tokens`` times :func:`bytes_per_token`."""
    return sum(_bytes(model, sites, n_tokens).values())


def _groups(model: nn.Module, sites: Sequence[FFNSite], n_tokens: int, max_bytes: int) -> Iterator[list[FFNSite]]:
    """Consecutive sites that fit into ``max_bytes`` together; one that does not fit alone still gets a group."""
    if n_tokens < 1:
        raise ConfigError("n_tokens", expected="at least 1", found=str(n_tokens), fix="20000 is a good start.")
    group: list[FFNSite] = []
    used = 0
    sizes = _bytes(model, sites, n_tokens)
    for site in sites:
        need = sizes[site.key]
        if group and used + need > max_bytes:
            yield group
            group, used = [], 0
        group.append(site)
        used += need
    if group:
        yield group
