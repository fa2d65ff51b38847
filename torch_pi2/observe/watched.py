"""Statistics of models that come without: synthetic ones, and packed or quantised ones, which cannot be profiled.

They are watched (:mod:`torch_pi2.observe.watch`) while they decode given tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.progress import bar
from torch_pi2.decode.decoder import Decoder
from torch_pi2.errors import CalibrationError, ConfigError, check_made_from
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.observe.watch import BATCH_SIZES, watch
from torch_pi2.store.firing import TokenStream
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.parts import Parts
from torch_pi2.types.stats import STATS_FILE, ActivationStats

#: Decoding steps by default: a frequency of 1 % is known to 0.2 % at batch 1, and to 0.9 % at 16.
TOKENS = 128


def watched_stats(
    model: nn.Module,
    batches: Sequence[int] = BATCH_SIZES,
    *,
    tokens: int = TOKENS,
    ids: torch.Tensor | None = None,
    seed: int = 0,
    progress: bool = False,
) -> ActivationStats:
    """Decode ``tokens`` steps of the largest batch and count what fires; of smaller ones each step has several.

    Args:
        model: a Hugging Face model that torch_pi2 has loaded or rewritten, in memory or over a store. Keys and values
            of these sequences come on top of its budget.
        batches: 1 to 64, see :class:`~torch_pi2.observe.watch.Watch`.
        ids: int64 ``[sequences, tokens + 1 or more]``, at least as many sequences as the largest batch: of real text.
            None: of synthetic models, random ids in topics, other ones for each sequence
            (:class:`~torch_pi2.store.firing.TokenStream`).
        seed: of random ids. progress: show a bar on a terminal.

    Raises:
        CalibrationError: a real model and no ``ids``, or too few of them.
        ConfigError, UnsupportedModelError: what :class:`~torch_pi2.observe.watch.Watch` and
            :class:`~torch_pi2.decode.decoder.Decoder` raise.
    """
    counting = watch(model, batch_sizes=batches)
    sequences = counting.batch_sizes[-1]
    ids_BT = _ids(model, sequences, tokens, seed) if ids is None else _given(ids, sequences, tokens)
    decoder = Decoder(model, max_tokens=max(2, tokens + 1), batch=sequences, compiled=False)
    with sparse_only():  # what is computed as a matrix product is not counted
        decoder.prompt(ids_BT[:, :1])
        with counting:
            for t in bar(range(1, tokens + 1), "watch", progress, unit="step", leave=False):
                decoder.step(ids_BT[:, t : t + 1])
    stats = counting.stats()
    stats.made_by |= {"ids": "given"} if ids is not None else {"ids": "synthetic", "seed": seed}
    return stats


def _ids(model: Any, sequences: int, tokens: int, seed: int) -> torch.Tensor:
    """``[sequences, tokens + 1]`` random ids of a synthetic model."""
    if getattr(model.config, "torch_pi2_synthetic", None) is None:
        raise CalibrationError(
            f"tokens for watching {type(model).__name__}",
            expected="ids of real text",
            found="none, and no synthetic model",
            fix=f"Pass ids=, int64 [{sequences}, {tokens + 1}] "
            "(torch_pi2.profiling.text.stdlib_text needs no download).",
        )
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    generators = [torch.Generator().manual_seed(1000 * seed + i) for i in range(sequences)]
    streams = [TokenStream(vocabulary, topics=True, generator=generator) for generator in generators]
    return torch.stack([stream.draw(tokens + 1) for stream in streams])


def _given(ids: torch.Tensor, sequences: int, tokens: int) -> torch.Tensor:
    if ids.dim() != 2 or len(ids) < sequences or ids.shape[1] <= tokens or ids.dtype != torch.int64:
        raise CalibrationError(
            "ids to watch a model with",
            expected=f"int64 [{sequences} or more, {tokens + 1} or more]",
            found=f"{dtype_name(ids.dtype)} {list(ids.shape)}",
            fix="Pass more text, or smaller batches or fewer tokens.",
        )
    return ids[:sequences]


def save_stats(folder: str | Path, stats: ActivationStats) -> Path:
    """Write ``stats`` where :func:`torch_pi2.load` finds those of the model in ``folder``; returns the file.

    Beside a store that has no statistics inside; in a folder of files in the place of those that are there.

    Raises:
        StaleArtifactError: they are of other weights. ConfigError: the store has statistics inside.
        ArtifactError: no folder of an optimised model, or it cannot be written.
    """
    pi2 = Path(folder) / PI2_FOLDER
    with Parts(pi2) as parts:
        found, inside = parts.plan().model_hash, parts.stats_inside
    check_made_from(
        f"statistics for {folder}", stats.model_hash, found, "FFN weights", "Watch the model of this folder."
    )
    if inside:
        raise ConfigError(
            f"statistics for {folder}",
            expected="a store without statistics",
            found="one that has them inside",
            fix=f"Save them elsewhere (stats.save(FILE)) and plan with `torch-pi2 plan {folder} --stats FILE`.",
        )
    return stats.save(pi2 / STATS_FILE)
