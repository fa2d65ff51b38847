"""``torch_pi2.import_gguf``: writes a GGUF file as one of our folders, with its rows bit for bit where possible."""

import hashlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch_pi2.base.fields import checked
from torch_pi2.base.files import cache_folder, locked, not_written, replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.package import __version__, quiet_imports
from torch_pi2.base.progress import log
from torch_pi2.checkpoint.gguf.families import configuration
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint
from torch_pi2.checkpoint.gguf.tokenizer import write_tokenizer
from torch_pi2.checkpoint.importing import ImportReport, write_imported
from torch_pi2.checkpoint.pack import pack
from torch_pi2.errors import Pi2Error, UnsupportedModelError, check_choice
from torch_pi2.formats import IMPORT_NEURONS
from torch_pi2.ops import load as load_library
from torch_pi2.rewrite.skeleton import own_classes
from torch_pi2.rewrite.state import SparseState
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, read_config
from torch_pi2.store.gguf import GgufModel, gguf_in
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import open_weights

#: Bytes at the start of a file, metadata and vocabulary, that are hashed to identify it.
_HEAD_BYTES = 1 << 20
#: Bytes of the file's name in its folder's name: file systems allow 255, and lock files add some.
_NAME_BYTES = 100
#: Increased when imports change, so that cached ones are made again.
_REVISION = 6


@checked
@fresh_settings()
@quiet_imports()
def import_gguf(
    file: str | Path,
    folder: str | Path,
    *,
    neurons: str = "auto",
    parts: SparseState | None = None,
    progress: bool = False,
) -> ImportReport:
    """Write the model of a GGUF file to ``folder``, in the form that :func:`torch_pi2.load`, ``pack`` and others read.

    Linear layers and the embedding keep the file's rows bit for bit if the type is Q4_0, Q8_0, Q4_1, Q5_0, Q5_1, Q4_K,
    Q5_K, Q6_K or TQ2_0, and the same numbers if it is IQ4_NL or TQ1_0. Other types are rounded, to int4 below four bits
    per weight, otherwise to int8; the report lists them. Feed-forward layers are treated as linear layers, unless they
    become neurons, each with its row of gate and up and its column of down together. Gate and up are then kept if they
    are Q4_0 to TQ2_0 (``int4+int8``, ``q4_k+int8``) or Q8_0 (``int8``). Down is rounded to int8, except in PowerInfer's
    files, which store it by neuron. Gate and up of different types are rounded too: to int8 if other layers keep theirs
    or the file has six or more bits per weight there, otherwise to int4. Rows are read some at a time.

    Loaded by default in float32 with ``activations="int8"``, as the file's own engine computes (docs/GGUF.md).

    Args:
        file: a GGUF file, any part of a split model (``model-00001-of-00003.gguf``) with the others beside it, or a
            folder with one model.
        neurons: ``auto``: only experts, and layers whose activation gives zeros (ReLU). ``all``: all layers, as a
            neuron store and thresholds need. ``int4`` or ``int8``: all, in this format throughout (GPUs read no other;
            ``int4`` of a Q4_0 file is smaller, and rounds down by some 8 %).
        parts: plan, predictors and statistics of the model in floats, which the folder gets
            (:func:`torch_pi2.optimize_quantized` makes them). None: the exact gate where there are zeros.

    Raises:
        ArtifactError: damage, or ``folder`` cannot be written. UnsupportedModelError: an unknown architecture or
            feature (docs/GGUF.md). ConfigError: an invalid ``neurons``. LibraryMissingError: no transformers, or gguf.
    """
    check_choice("import_gguf(neurons=...)", neurons, IMPORT_NEURONS, "Choose one of these.")
    load_library()
    file, folder = gguf_in(file) or Path(file), Path(folder).resolve()
    check_replaceable(folder)
    start = time.perf_counter()
    with GgufCheckpoint(file) as checkpoint, replacing_folder(folder) as staging:
        _write_config(checkpoint, staging)
        tokenizer = write_tokenizer(checkpoint.file, staging)
        report = write_imported(checkpoint, staging, neurons, progress, activations="int8", parts=parts)
        report.tokenizer = tokenizer
        report.predictors = len(checkpoint.predictors())
    report.seconds = time.perf_counter() - start
    return report


def _write_config(checkpoint: GgufCheckpoint, folder: Path) -> None:
    from transformers import GenerationConfig
    from transformers.models.auto import configuration_auto, modeling_auto

    values = configuration(checkpoint.file)
    own_classes(values)
    try:
        config = configuration_auto.CONFIG_MAPPING[values.pop("model_type")](**values)
    except Exception as error:  # its checks raise many types
        what, expected = str(checkpoint.folder), f"a configuration of {checkpoint.family.model_type}"
        found = " ".join(str(error).split())[:200]
        fix = "The file is damaged, or transformers too old for it: pip install -U transformers."
        raise UnsupportedModelError(what, expected=expected, found=found, fix=fix) from error
    both = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING, modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    config.architectures = [both[config.is_encoder_decoder][type(config)].__name__]
    largest = max(checkpoint.file.tensors.values(), key=lambda tensor: tensor.nbytes)
    config.dtype = "bfloat16" if largest.type.name in ("F16", "BF16") else "float32"  # as llama.cpp's activations
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def cached_import(
    file: Path, *, packed: bool, progress: bool = False, before: Callable[[], None] | None = None
) -> Path:
    """The folder with the import of ``file``, made now or earlier (a damaged one again); ``packed``: with a neuron
    store of all layers. Waits for another process that is importing it. ``before``: called before an import.
    """
    seen = _seen(file, packed) if file.is_file() else ""
    for mark in imports_folder().glob(f"*/{seen}") if seen else ():
        if _is_whole(mark.parent):
            return mark.parent
    with GgufModel(file) as model:
        name = re.sub(r"[^\w.-]", "_", model.path.stem).encode()[:_NAME_BYTES].decode(errors="ignore")
        same, alone = f"{name}-{_key(model)}", len(model.paths) == 1
    current = [f"{same}.{_made_by(form)}" for form in (packed, not packed)]
    folder = imports_folder() / current[0]

    waits = partial(log.warning, "another process imports %s; this one waits for it", file)
    try:
        if not _is_whole(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with locked(folder.with_name(f"{folder.name}-import"), math.inf, waits):
                if not _is_whole(folder):
                    if before is not None:
                        before()
                    _import(file, folder, packed, progress)
                    for old in folder.parent.glob(f"{same}.*"):  # imports by other versions of torch_pi2
                        if old.is_dir() and not old.name.startswith(tuple(current)):
                            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise not_written(folder, error) from error
    with suppress(OSError):
        if alone:
            (folder / seen).touch()
    return folder


def imports_folder() -> Path:
    return cache_folder() / "gguf"


def _seen(file: Path, packed: bool) -> str:
    """Name of the mark, in the folder of its import, of a file that has not changed since: not even its times."""
    about, path = os.stat(file), os.path.realpath(file)
    parts = (path, about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns, packed)
    return f".{hashlib.sha256(repr((__version__, _REVISION, parts)).encode()).hexdigest()[:16]}.seen"


def _import(file: Path, folder: Path, packed: bool, progress: bool) -> None:
    between = folder.with_name(f"{folder.name}-unpacked")
    for old in (folder, between):  # damaged, or of a killed process
        shutil.rmtree(old, ignore_errors=True)
    log.info("%s is imported to %s, once", file, folder)
    try:
        into = between if packed else folder
        report = import_gguf(file, into, neurons="all" if packed else "auto", progress=progress)
        if report.tokenizer:
            log.warning("no tokenizer of %s: %s", file, report.tokenizer)
        if packed:
            pack(between, folder, progress=progress)
    finally:
        shutil.rmtree(between, ignore_errors=True)


def _made_by(packed: bool) -> str:
    return hashlib.sha256(f"{__version__} {_REVISION} {packed}".encode()).hexdigest()[:8]


def _key(model: GgufModel) -> str:
    """Identifies a file without reading all of it: by size, time, start, and the ends of every tensor."""
    found = hashlib.sha256()
    for path in model.paths:
        with open(path, "rb") as opened:
            about = path.stat()
            found.update(f" {about.st_size} {about.st_mtime_ns} ".encode() + opened.read(_HEAD_BYTES))
    for name in model.tensors:
        found.update(model.ends_of(name))
    return found.hexdigest()[:16]


def _is_whole(folder: Path) -> bool:
    """Whether ``folder`` has an import with all its files, judging by their headers."""
    if not folder.is_dir():
        return False
    try:
        read_config(folder)
        with Parts(folder / PI2_FOLDER) as parts, open_weights(folder / PI2_FOLDER):
            parts.plan()
    except Pi2Error as error:
        log.warning("%s is imported again: %s", folder, error)
        return False
    return True
