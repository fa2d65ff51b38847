"""The kind of folder that a verb was given, and the verbs for it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from torch_pi2.errors import ArtifactError
from torch_pi2.export.manifest import MANIFEST_FILE
from torch_pi2.store.gguf import gguf_in
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.store.weights import WEIGHTS_FILE

#: kind -> what it is, and what is done with it; {folder}: its name.
_KINDS = {
    "bundle": ("a bundle", "torch-pi2 generate {folder} --prompt '...'"),
    "store": ("a store of pack", "torch-pi2 generate {folder} --prompt '...'"),
    "shards": ("shards of pack", "torchrun --nproc-per-node N -m torch_pi2 generate {folder} --prompt '...'"),
    "quantised": ("a quantised model", "torch-pi2 generate {folder} --prompt '...'"),
    "optimised": ("an optimised model", "torch-pi2 generate {folder} --prompt '...'"),
    "checkpoint": ("a checkpoint", "torch-pi2 optimize {folder} --out DIR"),
    "statistics": ("statistics of profile", "torch-pi2 optimize MODEL --stats {folder} --out DIR"),
    "predictors": ("predictors of fit", "torch-pi2 optimize MODEL --stats STATS --predictors {folder} --out DIR"),
    "plan": ("a plan", "torch-pi2 inspect {folder}"),
}
#: (verb, kind) -> the nearest command to what the verb would have done.
_NEAREST = {
    ("chat", "bundle"): "torch-pi2 run {folder} --chat --prompt '...'",
    ("pack", "shards"): "torch-pi2 pack FOLDER OUT",
}
#: Verbs that take a GGUF file as well.
_TAKE_GGUF = ("generate", "chat", "serve")
_FLOAT = ("checkpoint", "optimised")
_OPTIMISED = ("optimised", "quantised", "store")
_TALKING = ("checkpoint", *_OPTIMISED, "shards")
#: verb -> the kinds of folders that it takes.
_TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sparsify", "profile", "fit", "optimize", "quantize"), _FLOAT),
    **dict.fromkeys(("chat", "serve", "eval"), _TALKING),
    **dict.fromkeys(("plan", "export", "pack"), ("checkpoint", *_OPTIMISED)),
    "run": ("bundle",),
    "generate": (*_TALKING, "bundle"),
    "inspect": tuple(_KINDS),
    "report": _OPTIMISED,
}
#: Arguments of verbs that are folders.
_ARGUMENTS = ("model", "models", "source", "bundle", "folder")


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
    kinds, argument = _TAKES[verb], next(name for name in _ARGUMENTS if hasattr(args, name))
    given = getattr(args, argument)
    paths = [_imported(path, args) for path in given] if isinstance(given, list) else [_imported(given, args)]
    setattr(args, argument, paths if isinstance(given, list) else paths[0])
    for path in paths:
        folder, kind, part = Path(path), kind_of(Path(path)), ""
        if kind is None and verb != "inspect":  # which takes a store's file
            folder, kind, part = *_holder(folder), "a part of "
        found, command = _KINDS.get(kind or "", ("", ""))
        if (file := gguf_in(path)) is not None and file.is_file():
            found, command, part = "a GGUF file", f"torch-pi2 import {file} --out DIR", ""
        elif kind is None or (kind in kinds and not part):
            continue
        elif kind in kinds:
            command = f"torch-pi2 {verb} {{folder}} ..."
        else:
            command = _NEAREST.get((verb, kind), command)
        raise ArtifactError(
            f"torch-pi2 {verb} {path}",
            expected=" or ".join(_KINDS[kind][0] for kind in kinds),
            found=part + found,
            fix=f"Use: {command.replace('{folder}', str(folder))}",
        )


def _imported(given: Any, args: argparse.Namespace) -> Any:
    """``given``; in place of a GGUF file the folder of its import, made now or earlier, if the verb takes them."""
    file = gguf_in(given) if args.verb in _TAKE_GGUF else None
    if file is None or not file.is_file():
        return given
    from torch_pi2.checkpoint.gguf.importing import cached_import

    return str(cached_import(file, packed=getattr(args, "budget", None) is not None, progress=not args.quiet))


def _holder(path: Path) -> tuple[Path, str | None]:
    """The folder that ``path``, a file or the folder ``pi2``, is in, and its kind; None: there is none."""
    if path.is_file() or path.name == "pi2":
        for folder in list(path.absolute().parents)[:2]:
            kind = kind_of(folder)
            if kind is not None:
                return folder, kind
    return path, None
