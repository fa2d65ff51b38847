"""Folders that torch_pi2 writes: their contents, and what may be replaced."""

import fnmatch
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import Field, shown
from torch_pi2.base.files import atomic_write, check_not_current, entries
from torch_pi2.base.reading import parse, read_bytes
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError
from torch_pi2.predict.file import PREDICTORS_FILE
from torch_pi2.store.gguf import is_gguf
from torch_pi2.store.storefile import STORE_FILE, open_weights, weights_path
from torch_pi2.store.weights import WEIGHTS_FILE
from torch_pi2.types.stats import STATS_FILE
from torch_pi2.types.verdict import VERDICT_FILE

PI2_FOLDER = "pi2"
#: PEFT's settings, beside the weights or alone.
_ADAPTER = "adapter_config.json"
#: Folder name of one machine's shard: rank and number of ranks.
SHARD_NAME = re.compile(r"rank-(\d+)-of-(\d+)")
#: ``quant_method`` in config.json of folders whose weights are in ``pi2/``, by which transformers selects the loader.
HF_METHOD = "torch_pi2"
#: A weights file without tensors in such a folder, since transformers has to read one.
HF_FILE = "torch_pi2.safetensors"
_HEADER = b'{"__metadata__":{"format":"pt","pi2_format":"torch_pi2.transformers"}}'
#: Its bytes, fixed because safetensors orders metadata differently each time.
_CONTENT = len(_HEADER).to_bytes(8, "little") + _HEADER
#: Files in ``pi2/``.
_PARTS = ("plan.json", "plan.safetensors", PREDICTORS_FILE, STATS_FILE, WEIGHTS_FILE, STORE_FILE, VERDICT_FILE)
#: Files beside the weights that a checkpoint needs: configuration, tokenizer, modelling code.
SMALL_FILES = ("*.json", "*.txt", "*.model", "*.py", "*.jinja", "*.tiktoken")
#: transformers' folder for several chat templates of a tokenizer.
_TEMPLATES = "additional_chat_templates"
_FOLDERS = {PI2_FOLDER: _PARTS, _TEMPLATES: ("*.jinja",)}


def check_replaceable(folder: Path) -> None:
    """Raises ArtifactError: ``folder``, which is to be replaced, is the current one or has files of other origin."""
    check_not_current(folder)
    if folder.is_file():
        found = "a file"
    elif not folder.is_dir() or (stranger := _stranger(folder)) is None:
        return
    else:
        found = f"a folder with other files in it: {stranger}"
    expected = "a new folder, or one written by torch_pi2 with nothing else in it (which is replaced)"
    raise ArtifactError(f"writing {folder}", expected=expected, found=found, fix="Choose another folder.")


def _stranger(folder: Path) -> str | None:
    """The first entry in ``folder`` that an earlier result would not have, or None."""
    paths, pi2 = entries(folder), folder / PI2_FOLDER
    if not paths:
        return None
    if all(SHARD_NAME.fullmatch(path.name) and path.is_dir() and not path.is_symlink() for path in paths):
        strangers = ((path, _stranger(path)) for path in paths)
        return next((f"{path.name}/{stranger}" for path, stranger in strangers if stranger), None)
    if pi2.is_symlink() or not pi2.is_dir():
        return f"{paths[0].name}, and no folder {PI2_FOLDER}/"
    for path in paths:
        kinds = _FOLDERS.get(path.name)
        if kinds and (path.is_symlink() or not path.is_dir()):
            return path.name
        files = entries(path) if kinds else [path]
        kinds = kinds or (*SMALL_FILES, "*.safetensors")
        for file in files:
            if not file.is_file() or not any(fnmatch.fnmatchcase(file.name, kind) for kind in kinds):
                return str(file.relative_to(folder))
    return None if any(pi2.iterdir()) else f"an empty {PI2_FOLDER}/"


def check_separate(verb: str, source: str | Path, folder: Path) -> None:
    """Raises ConfigError: ``folder`` and the ``source`` of a model are the same folder, or one contains the other."""
    if not str(source) or not Path(source).is_dir():
        return  # the name of a checkpoint
    source, folder = Path(source).resolve(), folder.resolve()
    if source == folder or source in folder.parents or folder in source.parents:
        expected, fix = "two separate ones", "The result replaces its folder; write it elsewhere."
        raise ConfigError(f"{verb}'s folders", expected=expected, found=f"{source} and {folder}", fix=fix)


def declare(folder: Path) -> None:
    """Note in config.json that weights are in ``pi2/``, and how (docs/FORMATS.md): :mod:`torch_pi2.hf` opens it."""
    config = read_config(folder)
    with open_weights(folder / PI2_FOLDER) as weights:
        method = {"quant_method": HF_METHOD, "weights": weights.kind}
        if weights.float_dtype is not None:
            method["dtype"] = dtype_name(weights.float_dtype)
    atomic_write(folder / "config.json", json.dumps(config | {"quantization_config": method}, indent=2) + "\n")
    atomic_write(folder / HF_FILE, _CONTENT)


def quantised_by(config: Mapping[str, Any]) -> str:
    """The foreign quantisation method named in ``config``, or an empty string."""
    settings = config.get("quantization_config")
    method = settings.get("quant_method", "another method") if isinstance(settings, dict) and settings else settings
    return str(method) if method and method != HF_METHOD else ""


def check_float(folder: Path, config: Mapping[str, Any]) -> None:
    """Raises UnsupportedModelError: the checkpoint in ``folder`` is quantised, by us or by another method."""
    if weights_path(folder / PI2_FOLDER) is not None:
        found = f"weights in torch_pi2's own form ({PI2_FOLDER}/)"
        fix = "Take the float checkpoint that it was made of, or torch_pi2.load_dense(folder), which has its numbers."
    elif method := quantised_by(config):
        found = f"what {shown(method)} has quantised"
        fix = "Take the float checkpoint, or torch_pi2.import_quantized (gptq, awq, compressed-tensors, torchao)."
    else:
        return
    raise UnsupportedModelError(f"weights of {folder}", expected="floats", found=found, fix=fix)


def check_folder(folder: Path) -> None:
    """Raises ArtifactError: ``folder`` is a file."""
    if folder.is_file():
        of_gguf = is_gguf(folder)
        found = "a GGUF file" if of_gguf else "a file, and no GGUF file"
        fix = "Import it: torch_pi2.import_gguf(file, folder)." if of_gguf else "Name the folder that it is in."
        raise ArtifactError(str(folder), expected="the folder of a model", found=found, fix=fix)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises ArtifactError: it or a generation_config.json is missing or damaged, or an
    adapter is in the folder, which ``from_pretrained`` would add to the weights.
    """
    check_folder(folder)
    if (folder / _ADAPTER).is_file():
        fix = "Load it with peft, merge_and_unload() and save_pretrained; or remove the adapter to do without."
        expected = "a model whose weights are all in it"
        raise ArtifactError(str(folder), expected=expected, found=f"an adapter ({_ADAPTER})", fix=fix)
    if os.path.lexists(path := folder / "generation_config.json"):  # transformers goes on without a damaged one
        fix = "Copy it again from the checkpoint, or delete it."
        for name, value in _read_object(path, "settings of generation", fix).items():
            if name.endswith("_token_id") and value is not None:
                for token in value if isinstance(value, list) else [value]:
                    Field(token, f"{path}: {name}", fix).whole(-1)  # -1: none
    return _read_object(folder / "config.json", "a model's configuration", "Check the folder's name.")


def _read_object(path: Path, expected: str, fix: str) -> dict[str, Any]:
    found = parse(read_bytes(path, expected, fix), path, expected=expected, fix=fix, unique=False)
    if not isinstance(found, dict):
        Field(found, str(path), fix).wrong(expected)
    return dict(found)
