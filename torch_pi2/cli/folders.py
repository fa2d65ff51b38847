"""Kinds of folders, and which verbs take them."""

import argparse
import os
import re
from pathlib import Path
from typing import Any

from torch_pi2.cli import common
from torch_pi2.errors import ArtifactError
from torch_pi2.export.manifest import MANIFEST_FILE
from torch_pi2.store.folder import quantised_by, read_config
from torch_pi2.store.gguf import SUFFIX, gguf_in
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.store.weights import WEIGHTS_FILE

#: Kind -> description, and a command that takes it; {folder}: its name.
_KINDS = {
    "bundle": ("a bundle", "torch-pi2 run {folder} --prompt '...'"),
    "store": ("a store of pack", "torch-pi2 generate {folder} --prompt '...'"),
    "shards": ("shards of pack", "torchrun --nproc-per-node N -m torch_pi2 generate {folder} --prompt '...'"),
    "quantised": ("a quantised model", "torch-pi2 generate {folder} --prompt '...'"),
    "optimised": ("an optimised model", "torch-pi2 generate {folder} --prompt '...'"),
    "checkpoint": ("a checkpoint", "torch-pi2 optimize {folder} --out DIR"),
    "statistics": ("statistics of profile", "torch-pi2 optimize MODEL --stats {folder} --out DIR"),
    "predictors": ("predictors of fit", "torch-pi2 optimize MODEL --stats STATS --predictors {folder} --out DIR"),
    "plan": ("a plan", "torch-pi2 inspect {folder}"),
}
#: Verbs that also take a GGUF file.
_TAKE_GGUF = ("generate", "chat", "serve", "eval", "zeros")
_FLOAT = ("checkpoint", "optimised")
_OPTIMISED = ("optimised", "quantised", "store")
_MADE_OF = "Name the float checkpoint that it was made of; in Python, torch_pi2.load_dense(folder) has its numbers."
_TALKING = ("checkpoint", *_OPTIMISED, "shards")
#: Verb -> the kinds of folders that it takes.
_TAKES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("sparsify", "profile", "fit", "optimize", "quantize"), _FLOAT),
    **dict.fromkeys(("generate", "chat", "serve", "eval"), _TALKING),
    **dict.fromkeys(("plan", "export", "pack", "zeros"), ("checkpoint", *_OPTIMISED)),
    "run": ("bundle",),
    "inspect": tuple(_KINDS),
}
_HUB = re.compile(r"\w[\w.-]*(/[\w.-]+)?")  # what may be a name there
#: Names of arguments that are folders.
_ARGUMENTS = ("model", "models", "source", "bundle", "folder")


def kind_of(folder: Path) -> str | None:
    """A key of ``_KINDS``; None: not a folder, or an unknown kind."""
    inner = folder / "pi2"
    marks = {"bundle": folder / MANIFEST_FILE, "store": inner / STORE_FILE, "quantised": inner / WEIGHTS_FILE}
    marks |= {"optimised": inner, "checkpoint": folder / "config.json"}
    parts = {"predictors": "predictors.safetensors", "plan": "plan.json", "statistics": "stats.safetensors"}
    marks |= {kind: folder / name for kind, name in parts.items()}
    found = next((kind for kind, mark in marks.items() if os.path.lexists(mark)), None)
    return "shards" if found is None and any(folder.glob("rank-*-of-*")) else found


def is_quantised(path: str | Path) -> bool:
    """Whether ``path`` is a GGUF file, or a checkpoint that another tool has quantised."""
    if (file := gguf_in(path)) is not None:
        return file.is_file()
    return kind_of(Path(path)) == "checkpoint" and bool(quantised_by(read_config(Path(path))))


def check(args: argparse.Namespace, alone: bool = False) -> None:
    """Raise ArtifactError for a folder that another verb takes, or a path of nothing, which is no name on the Hub."""
    verb = getattr(args, "verb", None)
    if verb not in _TAKES:
        return
    kinds, argument = _TAKES[verb], next(name for name in _ARGUMENTS if hasattr(args, name))
    given, draft = getattr(args, argument), getattr(args, "draft_model", None)
    paths = [_imported(path, args, alone) for path in (given if isinstance(given, list) else [given])]
    args.given = given
    setattr(args, argument, paths if isinstance(given, list) else paths[0])
    if getattr(args, "draft_tokens", None) is not None and draft is None:
        raise common.needs("--draft-tokens", "--draft-model")
    if draft is not None:
        if args.prompt_lookup:
            raise common.excludes("--draft-model", "--prompt-lookup", "a token is drafted in one way")
        args.draft_model = _imported(draft, args, alone, packed=False)
        paths.append(args.draft_model)
    for path in paths:
        kind = kind_of(Path(path))
        if verb == "optimize" and is_quantised(path):
            continue
        if not os.path.lexists(path) and (not _HUB.fullmatch(str(path)) or str(path).lower().endswith(SUFFIX)):
            expected = " or ".join(["a GGUF file"] * (verb in (*_TAKE_GGUF, "optimize")) + ["a folder"])
            raise ArtifactError(str(path), expected=expected, found="nothing of that name", fix="Check the name.")
        if (file := gguf_in(path)) is not None and file.is_file():
            found, command = "a GGUF file", f"torch-pi2 import {file} --out DIR"
            if verb == "run" or kinds == _FLOAT:
                found, command = f"{found}, which runs as it is", "torch-pi2 generate {folder} PROMPT"
        elif kind is None or kind in kinds:
            continue
        else:
            found, command = _KINDS[kind]
        of_floats = kinds == _FLOAT and kind in _OPTIMISED
        fix = _MADE_OF if of_floats else f"Use: {command.replace('{folder}', str(path))}"
        expected = " or ".join(_KINDS[kind][0] for kind in kinds)
        raise ArtifactError(f"torch-pi2 {verb} {path}", expected=expected, found=found, fix=fix)


def _imported(given: Any, args: argparse.Namespace, alone: bool, packed: bool = True) -> Any:
    """``given``, or the folder of its import if it is a GGUF file and the verb takes those; ``alone``: in a process of
    ours, which imports less of transformers."""
    file = gguf_in(given) if args.verb in _TAKE_GGUF else None
    if file is None or not file.is_file():
        return given
    from torch_pi2.checkpoint.gguf.importing import cached_import
    from torch_pi2.cli.imports import import_transformers

    packed, before = packed and getattr(args, "budget", None) is not None, import_transformers if alone else None
    return str(cached_import(file, packed=packed, progress=not args.quiet, before=before))
