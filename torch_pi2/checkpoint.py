"""``save`` and ``load``: an optimised model on disk is an ordinary dense checkpoint plus a ``pi2/`` folder.

``pi2/`` holds plan.json, plan.safetensors, predictors.safetensors and stats.safetensors. The rest is what
``save_pretrained`` writes (or ``model.safetensors`` for other modules), so every other tool still reads it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.api import Optimized, _apply, parts_of
from torch_pi2.errors import ArtifactError, StaleArtifactError
from torch_pi2.graph.rewrite import sparse_layers
from torch_pi2.plan.plan import Plan, weights_hash
from torch_pi2.predict.size import PREDICTORS_FILE, FittedPredictors, load_predictors, save_predictors
from torch_pi2.profile.stats import STATS_FILE, ActivationStats

PI2_FOLDER = "pi2"
_WEIGHTS = "model.safetensors"


def save(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write an optimised ``model`` to ``folder``; an earlier result there is replaced only when all is written.

    Raises:
        ConfigError: the model is dense. ArtifactError: the folder cannot be written, or holds
            other files.
    """
    parts, folder = _parts_of_these_weights(model), Path(folder).resolve()
    check_replaceable(folder)
    staging = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        if hasattr(model, "save_pretrained"):
            model.save_pretrained(staging)  # type: ignore[operator]
        else:
            from safetensors.torch import save_model

            save_model(model, str(staging / _WEIGHTS))
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        parts.plan.save(staging / PI2_FOLDER)
        save_predictors(staging / PI2_FOLDER, parts.predictors, parts.plan.model_hash)
        if parts.stats is not None:
            parts.stats.save(staging / PI2_FOLDER)
        _swap(staging, folder)
    except OSError as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise ArtifactError(
            f"writing {folder}",
            expected="a folder that can be written",
            found=f"{error.strerror or error}",
            fix="Choose another output folder or free some space; nothing was left half-written.",
        ) from error
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return folder


class _Values:
    """The dense parameters of an optimised model, in the one respect in which a site asks a model for them."""

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[str, torch.Tensor] = {}
        for layer in sparse_layers(model):
            self._values |= layer.dense_values()

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._values[name]


def _parts_of_these_weights(model: nn.Module) -> Optimized:
    """The parts of ``model``, whose weights may have been converted or loaded anew since they were made.

    A plan without predictors or thresholds is right for any weights and is bound to the new ones; statistics are left
    out then.

    Raises:
        StaleArtifactError: predictors or thresholds were fitted to other weights.
    """
    parts = parts_of(model)
    found = weights_hash(_Values(model), [layer.site for layer in parts.plan.layers])
    if found == parts.plan.model_hash:
        return parts
    fitted = sorted({layer.method for layer in parts.plan.layers} & {"lowrank", "threshold"})
    if fitted:
        raise StaleArtifactError(
            f"plan with {' and '.join(fitted)} layers",
            expected=f"the FFN weights it was fitted to ({parts.plan.model_hash[:12]})",
            found=f"others ({found[:12]}): the model was converted or loaded anew since",
            fix="Call torch_pi2.restore(model) and optimize it again.",
        )
    return Optimized(replace(parts.plan, model_hash=found), FittedPredictors(), None)


def check_replaceable(folder: Path) -> None:
    """``save`` replaces the whole folder: refuse one with anything but an earlier result of it.

    Raises:
        ArtifactError: the folder holds other files.
    """
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / PI2_FOLDER).is_dir()):
        raise ArtifactError(
            f"writing {folder}",
            expected="a new folder, or one written by torch_pi2.save (which is replaced)",
            found="a file" if folder.is_file() else "a folder with other files in it",
            fix="Choose another folder.",
        )


def _swap(staging: Path, folder: Path) -> None:
    """Put ``staging`` in the place of ``folder``; the old content goes last."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    try:
        staging.rename(folder)
    except OSError:
        if old.exists():
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def load(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    progress: bool = False,
) -> nn.Module:
    """Read what :func:`save` wrote and return the optimised model, in evaluation mode.

    Args:
        folder: a Hugging Face checkpoint with a ``pi2/`` folder in it. Nothing is downloaded.
        model: an instance to load into, for models that transformers cannot build.
        trust_remote_code: passed to transformers, for checkpoints with modelling code of their own.
        dtype: of the weights (default: as stored). Another dtype than the plan's is a StaleArtifactError.

    Raises:
        ArtifactError: something is missing or damaged. StaleArtifactError: plan and weights do not belong together.
    """
    folder = Path(folder)
    pi2 = folder / PI2_FOLDER
    plan = Plan.load(pi2)
    predictors = FittedPredictors()
    if (pi2 / PREDICTORS_FILE).exists():
        predictors = load_predictors(pi2, model_hash=plan.model_hash)
    stats = ActivationStats.load(pi2, model_hash=plan.model_hash) if (pi2 / STATS_FILE).exists() else None
    if model is None:
        model = _from_pretrained(folder, trust_remote_code, dtype)
    else:
        _load_weights(model, folder / _WEIGHTS)
        if dtype is not None:
            model = model.to(dtype)
    return _apply(model.eval(), Optimized(plan, predictors, stats), progress)


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if not path.is_file():
        raise ArtifactError(str(path), expected="the model's weights", found="nothing", fix="Check the folder's name.")
    try:
        load_model(model, str(path))
    except (SafetensorError, RuntimeError) as error:
        raise ArtifactError(
            str(path),
            expected=f"the weights of this {type(model).__name__}",
            found=str(error).splitlines()[0],
            fix="Pass the model that was saved, built with the same sizes.",
        ) from error


def _from_pretrained(folder: Path, trust_remote_code: bool, dtype: torch.dtype | None) -> nn.Module:
    from safetensors import SafetensorError

    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ArtifactError(
            f"loading {folder}",
            expected="the package transformers, or a model to load into",
            found="neither",
            fix="pip install 'torch-pi2[hf]', or pass model=...",
        ) from error
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=trust_remote_code, dtype=dtype or "auto", local_files_only=True
        )
    except (OSError, ValueError, SafetensorError) as error:
        raise ArtifactError(
            f"loading {folder}",
            expected="a causal language model that transformers can build",
            found=str(error).splitlines()[0],
            fix="Pass trust_remote_code=True if the checkpoint brings its own code, or model=... to load into.",
        ) from error
    return model
