"""What predictors are fitted to, calibrated on and judged by: calibration data by sequences, dealt out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from torch_pi2.errors import CalibrationError, check_made_from
from torch_pi2.profiling.data import Batch
from torch_pi2.types.plan import weights_hash
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats

#: Of calibration data, to fit predictors to.
MIN_SEQUENCES = 10


def profiled_hash(model: nn.Module, sites: Sequence[FFNSite], stats: ActivationStats) -> str:
    """Hash of the weights at ``sites``. Raises StaleArtifactError: ``stats`` are of other weights."""
    model_hash = weights_hash(model, list(sites))
    check_made_from(
        "activation statistics", stats.model_hash, model_hash, "a profile of FFN weights", "Profile this model again."
    )
    return model_hash


def rows_of(data: list[Batch]) -> list[Batch]:
    """Calibration data by sequences; a batch that cannot be taken apart counts as one."""
    rows: list[Batch] = []
    for batch in data:
        ids, mask = batch.input_ids, batch.mask_BT
        if ids is None or mask is None or batch.kwargs:
            rows.append(batch)
        else:
            rows.extend(Batch(ids[b : b + 1], mask[b : b + 1]) for b in range(len(ids)))
    return rows


def split(data: list[Batch], batch_size: int) -> dict[str, list[Batch]]:
    """Sequences dealt out 6 : 2 : 2 to fit, calibrate and evaluate."""
    rows = rows_of(data)
    if len(rows) < MIN_SEQUENCES:
        raise CalibrationError(
            "sequences to fit and to measure on",
            expected=f"at least {MIN_SEQUENCES} (6 to fit, 2 to calibrate, 2 to evaluate)",
            found=str(len(rows)),
            fix="Pass more text or a smaller seq_len.",
        )
    names = ("fit",) * 6 + ("calibrate",) * 2 + ("evaluate",) * 2
    parts: dict[str, list[Batch]] = {"fit": [], "calibrate": [], "evaluate": []}
    for i, row in enumerate(rows):
        parts[names[i % 10]].append(row)
    return {name: _regroup(part, batch_size) for name, part in parts.items()}


def _regroup(rows: list[Batch], batch_size: int) -> list[Batch]:
    """Single rows of equal length back into batches."""
    out: list[Batch] = []
    by_length: dict[int, list[Batch]] = {}
    for row in rows:
        if row.input_ids is None or row.kwargs:
            out.append(row)
        else:
            by_length.setdefault(row.input_ids.shape[1], []).append(row)
    for group in by_length.values():
        for i in range(0, len(group), batch_size):
            part = group[i : i + batch_size]
            ids = torch.cat([b.input_ids for b in part if b.input_ids is not None])
            out.append(Batch(ids, torch.cat([b.mask_BT for b in part if b.mask_BT is not None])))
    return out


def evenly(data: list[Batch], n_tokens: int) -> list[Batch]:
    """Batches from all of ``data``, of about so many tokens together: neighbours are often of one text."""
    return data[:: max(1, round(sum(batch.n_tokens for batch in data) / n_tokens))]


def at_most(data: list[Batch], n_tokens: int) -> list[Batch]:
    """The first batches, of so many tokens together; the first in any case."""
    kept: list[Batch] = []
    for batch in data:
        if kept and sum(b.n_tokens for b in kept) + batch.n_tokens > n_tokens:
            break
        kept.append(batch)
    return kept
