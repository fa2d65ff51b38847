"""The kind of folder that a verb was given, and the verbs for it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch_pi2.errors import ArtifactError
from torch_pi2.export.manifest import MANIFEST_FILE
from torch_pi2.store.gguf import gguf_in
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.store.weights import WEIGHTS_FILE

#: kind -> what it is, and what is done with it; {folder}: its name.
_KINDS = {
    "bundle": ("a bundle, written by export", "torch-pi2 generate {folder} --prompt '...'"),
    "store": ("a neuron store, written by pack", "torch-pi2 generate {folder} --prompt '...'"),
    "shards": (
        "shards of a model, written by pack --ranks",
        "torchrun --nproc-per-node N -m torch_pi2 generate {folder} --prompt '...'",
    ),
    "quantised": (
        "a quantised model, written by quantize, import or synthetic",
        "torch-pi2 generate {folder} --prompt '...'",
    ),
    "optimised": ("an optimised model", "torch-pi2 generate {folder} --prompt '...'"),
    "checkpoint": ("a checkpoint that is not optimised", "torch-pi2 optimize {folder} --out DIR"),
    "statistics": ("statistics, written by profile", "torch-pi2 optimize MODEL --stats {folder} --out DIR"),
    "predictors": (
        "predictors, written by fit",
        "torch-pi2 optimize MODEL --stats STATS --predictors {folder} --out DIR",
    ),
    "plan": ("a plan", "torch-pi2 inspect {folder}"),
}
#: (verb, kind) -> the nearest command to what the verb would have done.
_NEAREST = {("chat", "bundle"): "torch-pi2 run {folder} --chat --prompt '...'"}
#: Verbs that take a GGUF file as well.
_TAKE_GGUF = ("generate", "chat", "serve")
_FLOAT = ("checkpoint", "optimised")
_PACKED = ("quantised", "store", "shards")
_OPTIMISED = ("optimised", "quantised", "store")
_TALKING = ("checkpoint", *_OPTIMISED, "shards")
#: verb -> its argument that is a folder, what it takes in words, and those kinds.
_TAKES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "sparsify": ("model", "a checkpoint with float weights", _FLOAT),
    "profile": ("model", "a checkpoint with float weights", _FLOAT),
    "fit": ("model", "a checkpoint with float weights", _FLOAT),
    "optimize": ("model", "a checkpoint with float weights", _FLOAT),
    "quantize": ("source", "a checkpoint with float weights", _FLOAT),
    "pack": ("source", "a checkpoint, or a model of optimize, quantize or pack", (*_FLOAT, *_PACKED)),
    "plan": ("model", "a checkpoint, or a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "export": ("model", "a checkpoint, or a model of optimize, quantize or pack", ("checkpoint", *_OPTIMISED)),
    "run": ("bundle", "a bundle: a folder with manifest.json", ("bundle",)),
    "generate": ("model", "a checkpoint, a model of optimize, quantize or pack, or a bundle", (*_TALKING, "bundle")),
    "chat": ("model", "a checkpoint, or a model of optimize, quantize or pack", _TALKING),
    "serve": ("models", "checkpoints, or models of optimize, quantize or pack", _TALKING),
    "eval": ("model", "a model of optimize, quantize or pack", _TALKING),
    "inspect": ("folder", "a folder that torch-pi2 wrote, or a checkpoint", tuple(_KINDS)),
    "report": ("folder", "a model of optimize, quantize or pack", _OPTIMISED),
}


def kind_of(folder: Path) -> str | None:
    """A key of ``_KINDS``; None: no folder, or an unknown one."""
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
    found = next((kind for kind, mark in marks.items() if os.path.lexists(mark)), None)
    return "shards" if found is None and any(folder.glob("rank-*-of-*")) else found


def check(args: argparse.Namespace) -> None:
    """Raises ArtifactError: the verb was given a folder that another verb is for, or a file of one.

    What is neither is the verb's: it may be a name on the Hub.
    """
    verb = getattr(args, "verb", None)
    if verb not in _TAKES:
        return
    if verb in _TAKE_GGUF:
        _import(args, _TAKES[verb][0])
    name, taken, kinds = _TAKES[verb]
    given = getattr(args, name)
    for path in given if isinstance(given, list) else [given]:
        if (file := gguf_in(path)) is not None and file.is_file():
            raise ArtifactError(
                f"torch-pi2 {verb} {path}",
                expected=taken,
                found="a GGUF file",
                fix=f"Use: torch-pi2 import {file} --out DIR",
            )
        folder, kind, of = Path(path), kind_of(Path(path)), ""
        if kind is None and verb != "inspect":  # which takes a store's file
            folder, kind, of = *_holder(folder), "a part of "
        if kind is None or (kind in kinds and not of):
            continue
        found, command = _KINDS[kind]
        command = _NEAREST.get((verb, kind), command) if kind not in kinds else f"torch-pi2 {verb} {{folder}} ..."
        raise ArtifactError(
            f"torch-pi2 {verb} {path}",
            expected=taken,
            found=of + found,
            fix=f"Use: {command.format(folder=folder)}",
        )


def _import(args: argparse.Namespace, name: str) -> None:
    """Replace a GGUF file by the folder of its import, made now or earlier."""

    def folder_of(given: str) -> str:
        file = gguf_in(given)
        if file is None or not file.is_file():
            return given
        from torch_pi2.checkpoint.gguf.importing import cached_import

        packed = getattr(args, "budget", None) is not None
        return str(cached_import(file, packed=packed, progress=not args.quiet))

    given = getattr(args, name)
    setattr(args, name, [folder_of(one) for one in given] if isinstance(given, list) else folder_of(given))


def _holder(path: Path) -> tuple[Path, str | None]:
    """The folder that ``path``, a file or the folder ``pi2``, is in, and its kind; None: there is none."""
    if path.is_file() or path.name == "pi2":
        for folder in list(path.absolute().parents)[:2]:
            kind = kind_of(folder)
            if kind is not None:
                return folder, kind
    return path, None
