"""``torch_pi2.import_quantized``: a folder of GPTQ, AWQ, compressed-tensors or torchao becomes one of ours."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch
from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.foreign import of_model, open_folder
from torch_pi2.checkpoint.importing import ImportReport, write_imported
from torch_pi2.checkpoint.quantize import copy_small_files
from torch_pi2.checkpoint.save_load import save_without_weights
from torch_pi2.errors import UnsupportedModelError, check_choice
from torch_pi2.formats import IMPORT_NEURONS
from torch_pi2.ops import load as load_library
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.store.folder import check_replaceable, check_separate, read_config
from torch_pi2.store.trust import has_tokenizer


@checked
@fresh_settings()
def import_quantized(
    folder_in: str | Path | nn.Module, folder_out: str | Path, *, neurons: str = "auto", progress: bool = False
) -> ImportReport:
    """Write the quantised checkpoint in ``folder_in`` to ``folder_out``, for :func:`torch_pi2.load` and the rest.

    ``folder_in`` may also be a Hugging Face model in memory whose linear layers torchao's ``quantize_`` has quantised
    (``Int8WeightOnlyConfig``, ``IntxWeightOnlyConfig``, ``Int4WeightOnlyConfig`` where its packing is plain or for a
    CPU, and those with dynamic inputs); it is not changed.

    These formats are read: GPTQ (2, 4, 8 bits, groups of neighbouring columns), AWQ (4 bits, ``gemm``),
    compressed-tensors (``pack-quantized`` and ``int-quantized``, 4 or 8 bits) and torchao (the same as in memory, as
    transformers saves them, but for the packing for a CPU). A matrix whose integers, less their zero points, are from
    -8 to 7 becomes ``int4``, from -128 to 127 ``int8``, one of 4 bits with zero points between integers ``q4_1``, if a
    group is a multiple of 32 columns: nothing is rounded if float16 has the scales exactly, else the scales are, and
    the report says so. Any other matrix is rounded to ``int8``. What the configuration says of inputs is ignored; other
    settings that change numbers (docs/GGUF.md) are refused.

    Args:
        neurons: as for :func:`torch_pi2.import_gguf`.

    Raises:
        UnsupportedModelError: another method, setting or tensor; modules in memory that its configuration does not
            give. ArtifactError: damage, or ``folder_out`` cannot be written. NonFiniteError: a scale is no number.
            ConfigError: another ``neurons``, or folders in one another.
    """
    check_choice("import_quantized(neurons=...)", neurons, IMPORT_NEURONS, "Choose one of these.")
    load_library()
    folder, live = Path(folder_out).resolve(), isinstance(folder_in, nn.Module)
    source = folder_in if isinstance(folder_in, nn.Module) else Path(folder_in).resolve()
    if isinstance(source, Path):
        check_separate("import_quantized", source, folder)
    check_replaceable(folder)
    start = time.perf_counter()
    opened = of_model(source) if isinstance(source, nn.Module) else open_folder(source)
    with opened as checkpoint, replacing_folder(folder) as staging:
        keep_card(folder, staging)
        if isinstance(source, Path):
            copy_small_files(source, staging)
        else:
            save_without_weights(source, staging)
        config = read_config(staging)
        config.pop("quantization_config", None)
        atomic_write(staging / "config.json", json.dumps(config, indent=2))
        if isinstance(source, nn.Module):
            _check_built_so(source, staging)
        report = write_imported(checkpoint, staging, neurons, progress)
        report.tokenizer = "" if has_tokenizer(staging) else f"the {'model' if live else 'folder'} has none"
    report.seconds = time.perf_counter() - start
    return report


def _check_built_so(model: nn.Module, folder: Path) -> None:
    """Raises UnsupportedModelError: ``model`` has other modules than the configuration in ``folder`` gives."""
    with torch.device("meta"):
        built = _classes(skeleton(folder))
    own = _classes(model)
    for name in (*own, *built):
        if own.get(name) != built.get(name):
            raise UnsupportedModelError(
                f"{name} of a model in memory",
                expected=f"{built.get(name, 'nothing')}, as its configuration says",
                found=own.get(name, "nothing"),
                fix="What is written is built of the configuration: undo the change, or take the float model, and "
                "optimise that.",
            )


def _classes(model: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in model.named_modules(remove_duplicate=False)}
