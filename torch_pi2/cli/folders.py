"""Which kind of folder a verb was given, and which verb it is for."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch_pi2.errors import ArtifactError
from torch_pi2.export.manifest import MANIFEST_FILE
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.store.weights import WEIGHTS_FILE

#: kind -> what it is, and what is done with it; {folder}: its name.
_KINDS = {
    "bundle": ("a bundle, written by export", "torch-pi2 run {folder} --prompt '...'"),
    "store": ("a neuron store, written by pack", "torch-pi2 generate {folder} --prompt '...'"),
    "quantised": ("a model with quantised weights", "torch-pi2 generate {folder} --prompt '...'"),
    "optimised": ("an optimised model", "torch-pi2 generate {folder} --prompt '...'"),
    "checkpoint": ("a checkpoint that is not optimised", "torch-pi2 optimize {folder} --out DIR"),
    "statistics": ("statistics, written by profile", "torch-pi2 optimize MODEL --stats {folder} --out DIR"),
    "predictors": (
        "predictors, written by fit",
        "torch-pi2 optimize MODEL --stats STATS --predictors {folder} --out DIR",
    ),
    "plan": ("a plan", "torch-pi2 inspect {folder}"),
}
_FLOAT = ("checkpoint", "optimised")
_OPTIMISED = ("optimised", "quantised", "store")
#: verb -> its argument that is a folder, what it takes, in words, and the kinds of that.
_TAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "profile": ("model", "a checkpoint with float weights", _FLOAT),
    "fit": ("model", "a checkpoint with float weights", _FLOAT),
    "optimize": ("model", "a checkpoint with float weights", _FLOAT),
    "quantize": ("source", "a checkpoint with float weights", _FLOAT),
    "pack": ("source", "a checkpoint, or a model of optimize or quantize", (*_FLOAT, "quantised")),
    "plan": ("model", "a checkpoint, or a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "export": ("model", "a checkpoint, or a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "run": ("bundle", "a bundle: a folder with manifest.json", ("bundle",)),
    "generate": ("model", "a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "chat": ("model", "a checkpoint, or a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "serve": ("models", "checkpoints, or models of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "eval": ("model", "a model of optimize", ("checkpoint", *_OPTIMISED)),
    "inspect": ("folder", "a folder that torch-pi2 wrote", tuple(kind for kind in _KINDS if kind != "checkpoint")),
    "report": ("folder", "a model of optimize, quantize or pack", _OPTIMISED),
}


def kind_of(folder: Path) -> str | None:
    """A key of ``_KINDS``; None: no folder, or nothing that we know."""
    inner = folder / "pi2"
    marks = {
        "bundle": folder / MANIFEST_FILE,
        "store": inner / STORE_FILE,
        "quantised": inner / WEIGHTS_FILE,
        "optimised": inner,
        "checkpoint": folder / "config.json",
        "predictors": folder / "predictors.safetensors",
        "plan": folder / "plan.json",
        "statistics": folder / "stats.safetensors",
    }
    return next((kind for kind, mark in marks.items() if os.path.lexists(mark)), None)


def check(args: argparse.Namespace) -> None:
    """Raises ArtifactError: the verb was given a folder that another verb is for. What is no folder is the verb's."""
    verb = getattr(args, "verb", None)
    if verb not in _TAKES:
        return
    name, taken, kinds = _TAKES[verb]
    given = getattr(args, name)
    for folder in given if isinstance(given, list) else [given]:
        kind = None if folder is None else kind_of(Path(folder))
        if kind is not None and kind not in kinds:
            found, command = _KINDS[kind]
            raise ArtifactError(
                f"torch-pi2 {verb} {folder}", expected=taken, found=found, fix=f"Use: {command.format(folder=folder)}"
            )
