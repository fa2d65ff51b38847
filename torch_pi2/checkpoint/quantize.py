"""``torch_pi2.quantize``: a float checkpoint becomes a quantised folder, one matrix in memory at a time."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.checkpoint.calibrated import rows_of_checkpoint
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.placing import Stored, placed, refs_of
from torch_pi2.errors import (
    ArtifactError,
    CalibrationError,
    ConfigError,
    NonFiniteError,
    StaleArtifactError,
    check_choice,
)
from torch_pi2.fitting.calibrated import neuron_key
from torch_pi2.formats import QUANTIZED, row_bytes
from torch_pi2.graph.experts import check_known_experts
from torch_pi2.graph.find import Found, search
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.ops.quantized import quantize as quantize_rows
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.profiling.data import calibration_batches
from torch_pi2.rewrite.fits import check_names
from torch_pi2.rewrite.linears import check_some, find_linears
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.store.folder import (
    PI2_FOLDER,
    SMALL_FILES,
    check_float,
    check_replaceable,
    check_separate,
    declare,
    read_config,
)
from torch_pi2.store.parts import Parts, check_predictors
from torch_pi2.store.source import Checkpoint, ExpertMatrix
from torch_pi2.store.trust import remember
from torch_pi2.store.weights import NO_EMBEDDINGS, NO_FORMATS, WEIGHTS_FILE, metadata, neuron_specs
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef

#: Float32 bytes of the rows that are quantised at a time.
_CHUNK = 2 << 20
NO_ROWS: Mapping[str, torch.Tensor] = {}
#: Stands in the header until the hash is known.
NO_HASH = "0" * 64


@dataclass
class QuantizeReport:
    """What :func:`quantize` did.

    Attributes:
        weights: the format. bytes_in, bytes_out: of the weight files. seconds: wall time.
        errors: name of every linear and key of every feed-forward layer -> ``|w' - w| / |w|`` over all its weights.
    """

    weights: str
    bytes_in: int = 0
    bytes_out: int = 0
    seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


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

    Feed-forward layers become neurons, other linear layers rows; embeddings, norms and small layers stay as they are:
    what ``optimize(model, weights=...)`` and ``save`` would write. A feed-forward layer that cannot be made sparse, or
    not be put into a model without its weights, is linear layers like others, and a warning, the plan and the loaded
    model's ``torch_pi2.left`` say why; there may be no other. A folder written by :func:`torch_pi2.save` keeps its
    plan and predictors; of any other, neurons stay in the model's order with the exact gate (smooth activations: all of
    them computed). Weights are read matrix by matrix.

    Args:
        weights: ``int4`` or ``int8``, groups of 32 with one scale.
        quantization: see :class:`torch_pi2.Config`: ``rtn``, or ``gptq``, which runs the model over ``calibration``
            with the weights of one module in memory at a time (rows are in files beside ``folder_out`` meanwhile).
        calibration, tokenizer, calibration_tokens: for ``gptq``, as in :func:`torch_pi2.profile`.
        plan: folder with a plan of a dense checkpoint, and beside it predictors and statistics (all three written with
            one ``--out`` of ``torch-pi2 profile``, ``fit`` and ``plan``), to be kept as those of a folder of ours.

    Raises:
        ConfigError, ArtifactError, DtypeError, NonFiniteError, StaleArtifactError, UnsupportedModelError,
        NoFFNFoundError, CalibrationError: on any of them nothing is left half-written.
    """
    source, folder = Path(folder_in).resolve(), Path(folder_out).resolve()
    config = Config(calibration_tokens=calibration_tokens)
    _check(source, folder, weights, quantization, calibration)
    if plan is not None:
        _check_parts(source, Path(plan))

    def make(stored: Stored, plan: Plan, ways: dict[str, str], linears: dict[str, int]) -> Quantizer:
        rows = NO_ROWS
        if quantization == "gptq":
            data = calibration_batches(stored.model, calibration, tokenizer, config)
            sites = [layer.site for layer in plan.layers if layer.site.key in ways]
            rows = rows_of_checkpoint(stored, data, sites, linears, weights, folder.parent, progress=progress)
        return Quantizer(stored, plan, ways, linears, weights, rows=rows)

    parts = None if plan is None else Path(plan)
    return convert(source, folder, make, parts=parts, trust_remote_code=trust_remote_code, progress=progress)


def convert(
    source: Path,
    folder: Path,
    make: MakeWriter,
    *,
    with_linears: bool = True,
    parts: Path | None = None,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> QuantizeReport:
    """Write ``folder``, with what ``make`` writes in the place of the weights of the float checkpoint ``source``.

    Args:
        with_linears: whether other linear layers than those of feed-forward layers are to be found.
        parts: folder of plan, predictors and statistics (default: ``source``'s own, if it has some).

    Raises: as :func:`quantize`.
    """
    load_library()
    check_replaceable(folder)
    start = time.perf_counter()
    check_float(source, read_config(source))
    with torch.device("meta"):
        empty = skeleton(source, trust_remote_code=trust_remote_code)
    check_known_experts(f"quantize({source})", empty)
    parts = parts or source / PI2_FOLDER
    plan = _plan_of(parts, empty, needed=not with_linears)
    with replacing_folder(folder) as staging:
        keep_card(folder, staging)
        (staging / PI2_FOLDER).mkdir()
        copy_small_files(source, staging)
        model = skeleton(source, trust_remote_code=trust_remote_code)
        with Checkpoint(source) as checkpoint:
            stored = Stored(model, checkpoint)
            ways, left = stored.place_layers(plan, needed=not with_linears)
            linears = other_linears(empty, plan, ways) if with_linears else {}
            check_some(f"quantize({source})", ways, linears)
            writer = make(stored, plan, ways, {name: m.in_features for name, m in linears.items()})
            report, found_hash = writer.write(staging / PI2_FOLDER, progress)
            report.bytes_in = checkpoint.nbytes
        placed(plan, ways, left, found_hash).save(staging / PI2_FOLDER)
        for name in ("predictors.safetensors", "stats.safetensors"):
            if (parts / name).exists():
                shutil.copyfile(parts / name, staging / PI2_FOLDER / name)
        report.bytes_out = (staging / PI2_FOLDER / WEIGHTS_FILE).stat().st_size
        declare(staging)
    if trust_remote_code:
        remember(folder)
    report.seconds = time.perf_counter() - start
    return report


def copy_small_files(source: Path, folder: Path) -> None:
    """Everything of a checkpoint but its weights and its ``pi2/``."""
    for path in small_files(source):
        shutil.copyfile(path, folder / path.name)


def small_files(source: Path) -> list[Path]:
    """What :func:`copy_small_files` copies."""
    found = {path for pattern in SMALL_FILES for path in source.glob(pattern)}
    return sorted(path for path in found if not path.name.endswith(".index.json"))


def _check(source: Path, folder: Path, weights: str, quantization: str, calibration: Any) -> None:
    check_choice("quantize(weights=...)", weights, QUANTIZED, "Choose one of these.")
    if quantization not in ("rtn", "gptq"):
        raise ConfigError(
            "quantize(quantization=...)",
            expected="rtn or gptq",
            found=repr(quantization),
            fix="Weighted errors need the running model and text: torch_pi2.optimize(model, text, "
            "weights=..., quantization='weighted') and save, or torch-pi2 optimize with these options.",
        )
    if (quantization == "gptq") != (calibration is not None):
        raise CalibrationError(
            f"quantize(quantization='{quantization}')",
            expected="no calibration data, which rounding to nearest does not look at"
            if quantization == "rtn"
            else "calibration data",
            found="some" if quantization == "rtn" else "none",
            fix="Pass both calibration=... and quantization='gptq', or neither.",
        )
    check_separate("quantize", source, folder)


def _check_parts(source: Path, parts: Path) -> None:
    """Raises ConfigError: ``source`` has its own. ArtifactError, StaleArtifactError: they do not belong together."""
    if (source / PI2_FOLDER).exists():
        raise ConfigError(
            "quantize(plan=...)",
            expected="none: the folder has its own",
            found=str(parts),
            fix="Leave it out, or name the dense checkpoint.",
        )
    with Parts(parts) as found:
        plan = found.plan()
        check_predictors(plan, found.each_predictor(plan.model_hash), parts)


def _plan_of(parts: Path, model: nn.Module, *, needed: bool) -> Plan:
    """The plan in ``parts``, or one of the layers of a checkpoint's ``model``, which is on ``meta``."""
    if (parts / "plan.json").exists():
        plan = Plan.load(parts)
        check_names(model, plan)
        return plan
    return new_plan(search(model, on_meta=True, needed=needed))


def new_plan(found: Found) -> Plan:
    """Neurons in the model's order: the exact gate where that skips any, else all of them computed."""
    layers = []
    for site in found.sites:
        order = torch.arange(site.intermediate, dtype=torch.int32)
        exact = exact_zeros(site.activation) or site.experts is not None  # nothing of an expert is hot
        method = Method.EXACT if exact else Method.DENSE
        layers.append(LayerPlan(site, method, 0 if exact else site.intermediate, order))
    return Plan(layers, NO_HASH, {"planner": "none", "left": found.left})


def other_linears(model: nn.Module, plan: Plan, ways: Mapping[str, str]) -> dict[str, nn.Linear]:
    """Linear layers of ``model``, on ``meta``, to quantise beside the layers of ``plan`` that are in ``ways``."""
    sites = [layer.site for layer in plan.layers if layer.site.key in ways]
    return find_linears(model, sites, on_meta=True)[0]


class Quantizer:
    """Writes the weights file of one model.

    Args:
        stored: the model's skeleton and its checkpoint. plan: with ``model_hash`` of the checkpoint, or ``NO_HASH``.
        ways: of its layers those that become neurons, by key, as :meth:`Stored.place_layers` finds them.
        linears: name -> inputs of the linears to quantise beside the plan's layers. kind: the format.
        formats: of linears, embeddings and sites' keys that are of another. embeddings: name -> width of those to
            quantise. rows: what is written as it is in the place of weights that are rounded, under the keys of
            :mod:`torch_pi2.fitting.calibrated`.
    """

    def __init__(
        self,
        stored: Stored,
        plan: Plan,
        ways: Mapping[str, str],
        linears: dict[str, int],
        kind: str,
        *,
        formats: Mapping[str, str] = NO_FORMATS,
        embeddings: Mapping[str, int] = NO_EMBEDDINGS,
        rows: Mapping[str, torch.Tensor] = NO_ROWS,
    ) -> None:
        self._checkpoint, self._plan, self._kind, self._linears = stored.checkpoint, plan, kind, linears
        self._formats, self._embeddings, self._ways, self._given = formats, embeddings, ways, rows
        self._layers = [layer for layer in plan.layers if layer.site.key in ways]
        refs = [ref for layer in self._layers for _, ref in refs_of(layer.site)]
        in_sites = {name for ref in refs for name in (ref.weight, ref.bias) if name}
        self._stored, self._alias, named = stored.name, stored.alias, stored.model.get_submodule
        biases = {f"{name}.bias" for name in linears if getattr(named(name), "bias", None) is not None}
        elsewhere = in_sites | biases | {f"{name}.weight" for name in (*linears, *embeddings)}
        self._biases = sorted(biases)
        # of the names of a tied tensor the first: a quantised output layer leaves it to the embedding
        self._floats = [left[0] for names in stored.groups if (left := [n for n in names if n not in elsewhere])]
        self._held: dict[torch.dtype, torch.Tensor] = {}

    def write(self, folder: Path, progress: bool) -> tuple[QuantizeReport, str]:
        """Write the file into ``folder``; the report, and the hash of the float feed-forward weights."""
        specs = {name: self._checkpoint.spec(self._stored(name)) for name in self._floats}
        specs |= {name: Spec(self._checkpoint.spec(self._stored(name)).shape, torch.float32) for name in self._biases}
        for name, columns in self._in_rows.items():
            rows = self._rows_of(f"{name}.weight", columns)
            specs[f"{name}.weight"] = Spec((rows, row_bytes(self._formats.get(name, self._kind), columns)), torch.uint8)
        for layer in self._layers:
            specs |= neuron_specs(layer.site, self._format_of(layer.site))
        report = QuantizeReport(self._kind)
        digest = hashlib.sha256()
        meta = metadata(
            self._kind, NO_HASH, self._linears, self._ways, formats=self._formats, embeddings=self._embeddings
        )
        with TensorWriter(folder / WEIGHTS_FILE, specs, meta, progress=progress) as out:
            for name in self._floats:
                if not specs[name].shape:
                    out.write(name, self._checkpoint.read(self._stored(name)))
                    continue
                for start, stop in row_chunks(specs[name]):
                    out.write(name, self._checkpoint.read(self._stored(name), (start, stop)), row=start)
            for name in self._biases:
                out.write(name, self._checkpoint.read(self._stored(name)).float())
            for name in self._in_rows:
                report.errors[name] = self._write_linear(name, out, digest)
            for layer in self._plan.layers:
                if layer.site.key in self._ways:
                    report.errors[layer.site.key] = self._write_site(layer, out, digest)
                else:  # in the hash all the same, as where it is replaced in memory
                    self._add_to(digest, layer.site)
            found = digest.hexdigest()
            if self._plan.model_hash not in (found, NO_HASH):
                raise StaleArtifactError(
                    f"plan in {self._checkpoint.folder}",
                    expected=f"feed-forward weights {self._plan.model_hash[:12]}",
                    found=found[:12],
                    fix="The weights were changed or converted since; optimise and save the model again.",
                )
            out.set_metadata("model_hash", found)
        return report, found

    def _add_to(self, digest: Any, site: FFNSite) -> None:
        for role, ref in refs_of(site):
            update_digest(digest, self._matrix(site, ref, role))
        for _, ref in refs_of(site):
            if ref.bias is not None:
                update_digest(digest, ref.take_bias(self._checkpoint.read(self._stored(ref.bias))))

    def _rows_of(self, name: str, columns: int) -> int:
        """Rows of a linear's weight. Raises ArtifactError or DtypeError if the checkpoint's cannot be it."""
        stored = self._stored(name)
        self._checkpoint.check_float(stored)
        shape = self._checkpoint.spec(stored).shape
        if len(shape) != 2 or shape[1] != columns:
            raise ArtifactError(
                f"{stored} in {self._checkpoint.folder}",
                expected=f"[rows, {columns}]",
                found=str(list(shape)),
                fix="The weights are not those of config.json beside them.",
            )
        return shape[0]

    @property
    def _in_rows(self) -> dict[str, int]:
        """Linears and embeddings with rows of their own, and their columns; one tied to an embedding has none."""
        own = {name: n for name, n in self._linears.items() if not self._is_tied(name)}
        return {**self._embeddings, **own}

    def _is_tied(self, name: str) -> bool:
        return any(f"{other}.weight" in self._alias.get(f"{name}.weight", ()) for other in self._embeddings)

    def _write_linear(self, name: str, out: TensorWriter, digest: Any) -> float:
        stored = self._stored(f"{name}.weight")
        error = RelativeError()
        for start, stop in row_chunks(self._checkpoint.spec(stored)):
            values = self._checkpoint.read(stored, (start, stop))
            given = self._given.get(f"{name}.weight")
            rows = self._rows(values, stored, error, given=None if given is None else given[start:stop])
            out.write(f"{name}.weight", rows, row=start)
        return error.relative

    def _rows(
        self,
        values: torch.Tensor,
        name: str,
        error: RelativeError,
        kind: str = "",
        given: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``values`` in the format ``kind`` (default: the neurons'), or what is ``given`` for them."""
        kind = kind or self._kind
        rows = quantize_rows(name, values, kind) if given is None else given
        error.add(values, torch.ops.pi2.dequantize(rows, kind, values.shape[1], torch.float32))
        return rows

    def _write_site(self, layer: LayerPlan, out: TensorWriter, digest: Any) -> float:
        site, order, kind = layer.site, layer.order.long(), self._format_of(layer.site)
        specs = neuron_specs(site, kind)
        neuron_rows = self._scratch(specs[f"{site.key}.bundles"])
        error = RelativeError()
        refs = refs_of(site)
        step = max(1, _CHUNK // (4 * site.hidden))
        for row, (role, ref) in enumerate(refs):
            matrix = self._matrix(site, ref, role)
            update_digest(digest, matrix)
            by_neuron = matrix.T if role == "down" else matrix
            rows, of = row_of_neurons(neuron_rows, row, kind, site.hidden)
            given = self._given.get(neuron_key(site, role))
            for start in range(0, site.intermediate, step):
                wanted = order[start : start + step]
                made, exact = self._as_stored(site, ref, role, wanted, of)
                if made is None or not exact:
                    made = given[wanted] if made is None and given is not None else made
                    made = self._rows(by_neuron[wanted].contiguous(), ref.weight, error, of, made)
                rows[start : start + step] = made
            del matrix, by_neuron
        out.write(f"{site.key}.bundles", neuron_rows)
        self._write_biases(layer, out, digest)
        return error.relative

    def _format_of(self, site: FFNSite) -> str:
        """The format of its neurons, or the two."""
        return self._formats.get(site.key, self._kind)

    def _as_stored(
        self, site: FFNSite, ref: LinearRef, role: str, neurons: torch.Tensor, kind: str
    ) -> tuple[torch.Tensor | None, bool]:
        """Rows of ``neurons`` that the checkpoint has in ``kind`` (None: it has not), and whether they are exact."""
        return None, False

    def _write_biases(self, layer: LayerPlan, out: TensorWriter, digest: Any) -> None:
        site, order = layer.site, layer.order.long()
        for role, ref in refs_of(site):
            if ref.bias is not None:
                bias = ref.take_bias(self._checkpoint.read(self._stored(ref.bias)))
                update_digest(digest, bias)
                name = f"{site.key}.bias_{role}"
                made = converted(bias, out.specs[name].dtype, ref.bias)
                out.write(name, made if role == "down" else made[order])

    def _matrix(self, site: FFNSite, ref: LinearRef, role: str) -> torch.Tensor:
        if ref.expert is not None:
            found = ExpertMatrix(self._checkpoint, site, ref, role)
            matrix = self._scratch(Spec(found.shape, self._checkpoint.spec(found.name).dtype))
            found.read_into(matrix)
            return matrix
        stored = self._stored(ref.weight)
        spec = self._checkpoint.spec(stored)
        if ref.transposed:
            whole = self._scratch(spec)
            self._checkpoint.read_into(stored, whole)
            return ref.take(whole)
        start, stop = ref.rows[:2] if ref.rows else (0, spec.shape[0])
        matrix = self._scratch(Spec((stop - start, *spec.shape[1:]), spec.dtype))
        self._checkpoint.read_into(stored, matrix, start)
        return matrix

    def _scratch(self, spec: Spec) -> torch.Tensor:
        """Memory that every layer uses again: what is freed, malloc may keep, and it would add up."""
        size = math.prod(spec.shape)
        held = self._held.get(spec.dtype)
        if held is None or held.numel() < size:
            held = self._held[spec.dtype] = torch.empty(size, dtype=spec.dtype)
        return held[:size].view(spec.shape)


def converted(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """``values`` of the checkpoint's tensor ``name`` in ``dtype``. Raises NonFiniteError: NaN or infinite there."""
    made = values.to(dtype)
    if not made.numel() or all(map(math.isfinite, map(float, made.aminmax()))):
        return made
    sound = bool(values.isfinite().all())
    raise NonFiniteError(
        f"values of {name}",
        expected=f"numbers of at most {torch.finfo(dtype).max:.6g}, the largest in {dtype_name(dtype)}",
        found=f"{float(values.abs().max()):.6g}",
        fix="Pack it with weights='bfloat16' or 'float'." if sound else "The checkpoint is damaged; get it again.",
    )


#: Skeleton with checkpoint, plan, ways and linears to quantise -> what writes the weights.
MakeWriter = Callable[[Stored, Plan, dict[str, str], dict[str, int]], Quantizer]


class RelativeError:
    """Relative error over chunks."""

    def __init__(self) -> None:
        self._wrong, self._all = 0.0, 0.0

    def add(self, wanted: torch.Tensor, found: torch.Tensor) -> None:
        wanted = wanted.float()
        self._all += float(wanted.square().sum(dtype=torch.float64))
        self._wrong += float(found.sub_(wanted).square_().sum(dtype=torch.float64))

    @property
    def relative(self) -> float:
        return math.sqrt(self._wrong / self._all) if self._all else 0.0


def row_chunks(spec: Spec) -> Iterator[tuple[int, int]]:
    rows = spec.shape[0] if spec.shape else 1
    step = max(1, _CHUNK // max(4, 4 * math.prod(spec.shape[1:])))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def update_digest(digest: Any, tensor: torch.Tensor) -> None:
    """As :func:`torch_pi2.types.plan.weights_hash` does."""
    digest.update(str(tuple(tensor.shape)).encode() + str(tensor.dtype).encode())
    digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
