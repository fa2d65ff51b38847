"""``torch_pi2.quantize``: a float checkpoint becomes a folder with quantised weights, or with neurons in floats."""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.fields import argument, checked
from torch_pi2.base.files import not_written, replacing_folder
from torch_pi2.base.memory import letting_go
from torch_pi2.base.modules import fresh_settings
from torch_pi2.checkpoint.stored import Stored, bound_plan, largest_dtype, load_mapped
from torch_pi2.checkpoint.weights_writer import NO_HASH, NO_ROWS, Quantizer, QuantizeReport
from torch_pi2.errors import CalibrationError, check_choice
from torch_pi2.fitting.gptq_model import calibrated_rows, warn_rounded
from torch_pi2.formats import FLOAT, QUANTIZED
from torch_pi2.graph.experts import check_known_experts
from torch_pi2.graph.find import Found, search
from torch_pi2.ops import load as load_library
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.rewrite.linears import check_some, find_linears
from torch_pi2.rewrite.place import check_sizes
from torch_pi2.rewrite.skeleton import model_config, skeleton
from torch_pi2.store import folder as folders
from torch_pi2.store.parts import Parts, check_predictors
from torch_pi2.store.source import Checkpoint
from torch_pi2.store.trust import remember
from torch_pi2.store.weights import WEIGHTS_FILE
from torch_pi2.types.config import QUANTIZATIONS, Config
from torch_pi2.types.plan import Plan, in_own_order
from torch_pi2.types.site import FFNSite


@checked
@fresh_settings()
def quantize(
    folder_in: str | Path,
    folder_out: str | Path,
    weights: str = "int4",
    *,
    quantization: str = "rtn",
    calibration: Any = None,
    tokenizer: Any = None,
    calibration_tokens: int = Config.calibration_tokens,
    plan: str | Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> QuantizeReport:
    """Quantise the Hugging Face checkpoint in ``folder_in`` (float safetensors) to ``folder_out``. Lossy.

    Feed-forward layers become neurons, other linear layers rows; embeddings, norms and small layers stay as they are.
    The result equals that of ``optimize(model, weights=...)`` and ``save``. A feed-forward layer that cannot be made
    sparse, or has no exact zeros and is code of its block, becomes plain linear layers; a warning, the plan and the
    loaded model's ``torch_pi2.left`` give the reason. A folder written by :func:`torch_pi2.save` keeps its plan and
    predictors; in any other, neurons keep the model's order and use the exact gate (with smooth activations all are
    computed). Weights are read matrix by matrix.

    Args:
        weights: ``int4`` or ``int8``, groups of 32 with one scale.
        quantization: see :class:`torch_pi2.Config`: ``rtn``, or ``gptq``, which runs the model over ``calibration``
            with the weights of one module in memory at a time (rows are in files beside ``folder_out`` meanwhile).
        calibration, tokenizer, calibration_tokens: for ``gptq``, as in :func:`torch_pi2.profile`.
        plan: folder with a plan of a dense checkpoint, its predictors and statistics (all three written with one
            ``--out`` of ``torch-pi2 profile``, ``fit`` and ``plan``), used like those of an optimised folder.

    Raises:
        ConfigError, ArtifactError, DtypeError, NonFiniteError, StaleArtifactError, UnsupportedModelError,
            NoFFNFoundError, CalibrationError: nothing half-written is left.
    """
    source, folder = Path(folder_in).resolve(), Path(folder_out).resolve()
    _check(source, folder, weights, quantization, calibration)
    parts = None if plan is None else Path(plan)
    if parts is not None and (source / folders.PI2_FOLDER).exists():
        fix = "Leave it out, or name the dense checkpoint."
        argument(parts, "quantize(plan=...)", fix).wrong("none: the folder has its own", str(parts))
    if parts is not None:
        with Parts(parts) as opened:
            own = opened.plan()
            check_predictors(own, opened.each_predictor(own.model_hash), parts)

    def calibrate(sites: list[FFNSite], linears: Collection[str]) -> Mapping[str, torch.Tensor]:
        model = load_mapped(source, scratch=folder.parent, trust_remote_code=trust_remote_code, progress=progress)
        data = calibration_batches(model, calibration, tokenizer, Config(calibration_tokens=calibration_tokens))
        rows = _RowFiles(folder.parent)
        with letting_go(model):
            rounded = calibrated_rows(model, data, sites, linears, weights, rows.keep, progress=progress)
        warn_rounded(rounded)
        return rows

    rows_of = calibrate if quantization == "gptq" else None
    how: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": progress}
    return convert(source, folder, weights, rows_of=rows_of, parts=parts, **how)


class _RowFiles(dict[str, torch.Tensor]):
    """Rows in mapped temporary files in ``folder``, which the system pages in again when they are used."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def keep(self, key: str, rows: torch.Tensor) -> None:
        """Raises ArtifactError: it cannot be written."""
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder) as file:
                rows.numpy().tofile(file)
                file.flush()
                os.fsync(file.fileno())
                mapped = torch.from_file(file.name, shared=False, size=rows.numel(), dtype=torch.uint8)
        except OSError as error:
            raise not_written(self._folder, error) from error
        self[key] = mapped.view(rows.shape)


def convert(
    source: Path,
    folder: Path,
    weights: str,
    *,
    rows_of: Callable[[list[FFNSite], Collection[str]], Mapping[str, torch.Tensor]] | None = None,
    parts: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> QuantizeReport:
    """Write ``folder`` from the float checkpoint ``source``, neurons in format ``weights``. Raises as :func:`quantize`.

    Args:
        weights: ``int4`` or ``int8``, for neurons and other linear layers; or, for neurons alone, a name in ``FLOATS``,
            or ``float``: the model's dtype when loaded, so that nothing is lost.
        rows_of: sites and names of other linear layers -> their calibrated rows (default: all are rounded).
        parts: folder of plan, predictors and statistics (default: those of ``source``, if any).
    """
    load_library()
    folders.check_replaceable(folder)
    start = time.perf_counter()
    folders.check_float(source, folders.read_config(source))
    in_floats = weights not in QUANTIZED
    with torch.device("meta"):
        empty = skeleton(source, trust_remote_code=trust_remote_code)
    check_known_experts(f"quantize({source})", empty)
    parts = parts or source / folders.PI2_FOLDER
    if (parts / "plan.json").exists():
        plan = Plan.load(parts)
        check_sizes(empty, plan)
    else:
        plan = new_plan(search(empty, on_meta=True, needed=in_floats))
    with replacing_folder(folder) as staging:
        (staging / folders.PI2_FOLDER).mkdir()
        copy_small_files(source, staging)
        model = skeleton(source, trust_remote_code=trust_remote_code)
        with Checkpoint(source) as checkpoint:
            stored = Stored(model, checkpoint)
            strategies, dense = stored.place_layers(plan, needed=in_floats)
            linears = {} if in_floats else other_linears(empty, plan, strategies)
            check_some(f"quantize({source})", strategies, linears)
            if weights == FLOAT:
                config = model_config(source, trust_remote_code=trust_remote_code)
                known = config.dtype in DTYPES.values()
                weights = dtype_name(config.dtype if known else largest_dtype(checkpoint))
            sites = [layer.site for layer in plan.layers if layer.site.key in strategies]
            rows = NO_ROWS if rows_of is None else rows_of(sites, linears)
            columns = {name: linear.in_features for name, linear in linears.items()}
            writer = Quantizer(stored, plan, strategies, columns, weights, rows=rows)
            report, found_hash = writer.write(staging / folders.PI2_FOLDER, progress)
            report.bytes_in = checkpoint.nbytes
        bound_plan(plan, strategies, dense, found_hash).save(staging / folders.PI2_FOLDER)
        for name in ("predictors.safetensors", "stats.safetensors"):
            if (parts / name).exists():
                shutil.copyfile(parts / name, staging / folders.PI2_FOLDER / name)
        report.bytes_out = (staging / folders.PI2_FOLDER / WEIGHTS_FILE).stat().st_size
        folders.declare(staging)
    if trust_remote_code:
        remember(folder)
    report.seconds = time.perf_counter() - start
    return report


def copy_small_files(source: Path, folder: Path) -> None:
    """Copy all files of a checkpoint except weights and ``pi2/``."""
    for path in {path for pattern in folders.SMALL_FILES for path in source.glob(pattern)}:
        if not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _check(source: Path, folder: Path, weights: str, quantization: str, calibration: Any) -> None:
    check_choice("quantize(weights=...)", weights, QUANTIZED, "Choose one of these.")
    check_choice("quantize(quantization=...)", quantization, QUANTIZATIONS, "Choose one of these.")
    if (quantization == "gptq") != (calibration is not None):
        none, rounds = "no calibration data, which rounding to nearest does not look at", quantization == "rtn"
        expected, found = (none, "some") if rounds else ("calibration data", "none")
        what, fix = f"quantize(quantization='{quantization}')", "Pass both calibration=... and 'gptq', or neither."
        raise CalibrationError(what, expected=expected, found=found, fix=fix)
    folders.check_separate("quantize", source, folder)


def new_plan(found: Found) -> Plan:
    """Neurons in the model's order, with the exact gate where that skips any; other layers are dense."""
    return Plan(in_own_order(found.sites), NO_HASH, {"planner": "none", "left": found.left})


def other_linears(model: nn.Module, plan: Plan, strategies: Mapping[str, str]) -> dict[str, nn.Linear]:
    """Linear layers of ``model``, on ``meta``, to quantise besides the feed-forward layers in ``strategies``."""
    sites = [layer.site for layer in plan.layers if layer.site.key in strategies]
    return find_linears(model, sites, on_meta=True)[0]
