"""Import of quantised checkpoints from other tools: rows are kept bit for bit if one of our formats can hold them."""

import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from torch_pi2.base.fields import checked
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.base.memory import leave_cache
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.package import quiet_imports
from torch_pi2.base.tensorfile import TensorWriter
from torch_pi2.checkpoint.foreign import QuantizedCheckpoint
from torch_pi2.checkpoint.quantize import copy_small_files, new_plan, other_linears
from torch_pi2.checkpoint.stored import PackedSource, Stored, bound_plan
from torch_pi2.checkpoint.weights_writer import NO_HASH, Quantizer, QuantizeReport, row_chunks, update_digest
from torch_pi2.errors import UnsupportedModelError, check_choice
from torch_pi2.formats import FORMATS, IMPORT_NEURONS, PAIRS, QUANTIZED, formats_of
from torch_pi2.graph.find import Found, search
from torch_pi2.layers.linear import can_stand_for
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.linear import to_blocks
from torch_pi2.ops.quantized import RelativeError
from torch_pi2.predict.file import save_predictors
from torch_pi2.rewrite.skeleton import on_meta, skeleton
from torch_pi2.rewrite.state import SparseState
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, check_separate, declare, read_config
from torch_pi2.store.source import ExpertMatrix
from torch_pi2.store.trust import has_tokenizer
from torch_pi2.store.weights import WEIGHTS_FILE
from torch_pi2.types.method import Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite, LinearRef


@dataclass
class ImportReport(QuantizeReport):
    """Result of an import.

    Attributes:
        types: type in the checkpoint -> number of matrices kept bit for bit. rounded: name -> "from to" of the other
            matrices; those "with float16 scales" keep their integers.
        weights: formats of the neurons, such as ``q4_k+int8`` if down has another format than gate and up; the main
            format if there are no neurons.
        neurons: number of layers (experts count singly) that became neurons. tokenizer: why there is none; empty if
            there is one.
        predictors: tensors of PowerInfer's predictors that were ignored.
        errors: relative errors of rounded matrices; 0 for those that keep their integers.
    """

    types: dict[str, int] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    neurons: int = 0
    tokenizer: str = ""
    predictors: int = 0


@checked
@fresh_settings()
@quiet_imports()
def import_quantized(
    folder_in: str | Path,
    folder_out: str | Path,
    *,
    neurons: str = "auto",
    parts: SparseState | None = None,
    progress: bool = False,
) -> ImportReport:
    """Write the quantised checkpoint in ``folder_in`` to ``folder_out``, in the form that :func:`torch_pi2.load` reads.

    Supported are GPTQ (2, 4, 8 bits, groups of adjacent columns), AWQ (4 bits, ``gemm``), compressed-tensors
    (``pack-quantized``, ``int-quantized``, 4 or 8 bits) and torchao (``Int8WeightOnlyConfig``,
    ``IntxWeightOnlyConfig``, and those with dynamic inputs). If groups are a multiple of 32 columns, integers less zero
    points from -8 to 7 become ``int4``, and those from -128 to 127 ``int8``. Scales are rounded only if float16 cannot
    represent them, which the report lists. All other matrices are rounded to ``int8``. Settings for inputs are ignored;
    other settings that change numbers (docs/GGUF.md) are refused.

    Args:
        neurons, parts: as for :func:`torch_pi2.import_gguf`.

    Raises:
        UnsupportedModelError: an unsupported method, setting or tensor. ArtifactError: damage, or ``folder_out`` cannot
            be written. NonFiniteError: NaN or infinite scales. ConfigError: an invalid ``neurons``, or nested folders.
    """
    check_choice("import_quantized(neurons=...)", neurons, IMPORT_NEURONS, "Choose one of these.")
    load_library()
    source, folder = Path(folder_in).resolve(), Path(folder_out).resolve()
    check_separate("import_quantized", source, folder)
    check_replaceable(folder)
    start = time.perf_counter()
    with QuantizedCheckpoint(source) as checkpoint, replacing_folder(folder) as staging:
        copy_small_files(source, staging)
        config = read_config(staging)
        config.pop("quantization_config", None)
        atomic_write(staging / "config.json", json.dumps(config, indent=2))
        report = write_imported(checkpoint, staging, neurons, progress, parts=parts)
        report.tokenizer = "" if has_tokenizer(staging) else "the folder has none"
    report.seconds = time.perf_counter() - start
    return report


def write_imported(
    checkpoint: PackedSource,
    folder: Path,
    neurons: str,
    progress: bool,
    activations: str = "float",
    parts: SparseState | None = None,
) -> ImportReport:
    """Write ``pi2/`` into ``folder``, which has the configuration. Raises as :func:`torch_pi2.import_gguf`."""
    (folder / PI2_FOLDER).mkdir()
    built = skeleton(folder)
    empty = on_meta(built)
    if parts is not None:  # layers that would be dense stay in their rows, which are smaller
        chosen = [layer for layer in parts.plan.layers if layer.method != Method.DENSE or layer.site.experts]
        plan, neurons = replace(parts.plan, layers=chosen, model_hash=NO_HASH), "all" if neurons == "auto" else neurons
    else:
        none = neurons == "auto" and not checkpoint.zeros  # a search takes seconds
        plan = new_plan(Found([], {}) if none else _found(empty, neurons))
    stored = Stored(built, checkpoint)
    strategies, dense = stored.place_layers(plan, needed=False)
    linears, embeddings = dict[str, int](), dict[str, int]()
    for name, linear in other_linears(empty, plan, strategies).items():
        if any(_is_packed(checkpoint, other) for other in stored.alias.get(f"{name}.weight", ())):
            linears[name] = linear.in_features
    for name, module in empty.named_modules():
        if isinstance(module, nn.Embedding) and can_stand_for(module) and _is_packed(checkpoint, f"{name}.weight"):
            embeddings[name] = module.embedding_dim
    writer = _Importer(stored, plan, strategies, linears, embeddings, neurons, activations == "int8")
    made, found_hash = writer.write(folder / PI2_FOLDER, progress)
    if unused := checkpoint.unused():
        expected = f"the tensors of a {checkpoint.about} model"
        more = unused[0] + (f" and {len(unused) - 1} others as well" if len(unused) > 1 else " as well")
        fix = "Load the model's original checkpoint with transformers, and optimise that."
        raise UnsupportedModelError(str(checkpoint.folder), expected=expected, found=more, fix=fix)
    plan = bound_plan(plan, strategies, dense, found_hash)
    if activations != "float" and (linears or embeddings or plan.layers):
        plan.made_by["activations"] = activations
    plan.save(folder / PI2_FOLDER)
    if parts is not None:
        save_predictors(folder / PI2_FOLDER, parts.predictors, found_hash)
        if parts.stats is not None:
            replace(parts.stats, model_hash=found_hash).save(folder / PI2_FOLDER)
    declare(folder)
    report = ImportReport(**vars(made), types=dict(writer.kept), rounded=writer.rounded, neurons=len(plan.layers))
    report.weights = writer.neuron_formats
    report.bytes_in = checkpoint.nbytes
    weights = folder / PI2_FOLDER / WEIGHTS_FILE
    report.bytes_out = weights.stat().st_size
    leave_cache(weights)  # which has it in small pages
    return report


def _is_packed(checkpoint: PackedSource, parameter: str) -> bool:
    return parameter in checkpoint and checkpoint.packed(parameter) is not None


def _found(model: nn.Module, neurons: str) -> Found:
    found = search(model, on_meta=True, needed=False)
    if neurons != "auto":
        return found
    return Found([y for y in found.sites if y.experts is not None or exact_zeros(y.activation)], found.left)


class _Importer(Quantizer):
    """Writes the weights of an imported checkpoint. ``neurons``: the format of all neurons if one of ``QUANTIZED``;
    else gate and up keep theirs if possible.
    """

    def __init__(
        self, stored: Stored, plan: Plan, strategies: dict, linears: dict, embeddings: dict, neurons: str, int8: bool
    ) -> None:
        self._packed = checkpoint = cast(PackedSource, stored.checkpoint)
        self.kept: Counter[str] = Counter()
        self.rounded: dict[str, str] = {}
        self._counted: set[tuple[str, str]] = set()
        self._whole: tuple[Any, torch.Tensor] = None, torch.empty(0)  # rows of the matrix read last, out of order
        formats: dict[str, str] = {}
        super().__init__(stored, plan, strategies, linears, neurons, formats=formats, embeddings=embeddings)
        if neurons not in QUANTIZED:
            kept = {layer.site.key: self._kept_format(layer.site) for layer in self._layers}
            if any(kept.values()):  # int8 for the few other layers, as for columns of down
                self._kind = "int4" if set(kept.values()) == {"int4"} else "int8"
                formats |= {key: made for key, made in kept.items() if made not in (None, self._kind)}
            else:  # the closest format that is not much smaller than the checkpoint's
                self._kind = "int4" if self._bits() < 6 else "int8"
        for name in (*linears, *embeddings):
            packed = checkpoint.packed(self._stored(f"{name}.weight"))
            if packed is not None and packed.format != self._kind:
                formats[name] = packed.format
        for name, columns in linears.items():
            rows = checkpoint.spec(self._stored(f"{name}.weight")).shape[0]
            if wants_blocks(formats.get(name, self._kind), rows, columns, int8):
                self._in_blocks.append(name)
        self._tied = [name for name in self._in_blocks if name not in self._in_rows]

    @property
    def neuron_formats(self) -> str:
        """Formats of all layers, or the main format if there are no neurons."""
        return ", ".join(dict.fromkeys(self._format_of(layer.site) for layer in self._layers)) or self._kind

    def _kept_format(self, site: FFNSite) -> str | None:
        """Format or pair that keeps rows of gate, up and perhaps down; None: none, or int8 (see :meth:`_bits`)."""
        refs = site.refs.items()
        if any(ref.transposed and ref.expert is None for role, ref in refs if role != "down"):
            return None
        packed = {role: self._packed.packed(self._name_of(site, ref, role)) for role, ref in refs}
        kept = {role: one.format if one is not None and one.kept else None for role, one in packed.items()}
        down = kept.pop("down")
        if {*kept.values(), down} == {"int4"} and self._packed.by_neuron:
            return "int4"
        if {*kept.values(), down} == {"tq2_0"} and self._has_one_scale(self._name_of(site, site.down, "down")):
            return "tq2_0+tq2_0"
        return next((pair for pair in PAIRS if {*kept.values()} == {formats_of(pair)[0]}), None)

    def _has_one_scale(self, name: str) -> bool:
        """Whether all blocks of a ternary matrix have the same scale, as BitNet's have."""
        first, block = self._packed.own_rows(name, 0, 1)[0, -2:], FORMATS["tq2_0"].block_bytes
        parts = (self._packed.own_rows(name, *ends) for ends in row_chunks(self._checkpoint.spec(name)))
        return all(bool((rows.reshape(-1, block)[:, -2:] == first).all()) for rows in parts)

    def _bits(self) -> float:
        """Bits per weight of feed-forward layers in the checkpoint; 0 if it has none."""
        sites = [layer.site for layer in self._layers]
        names = [self._name_of(site, ref, role) for site in sites for role, ref in site.refs.items()]
        packed = [self._packed.packed(name) for name in names]
        return sum(16.0 if one is None else one.bits for one in packed) / max(1, len(packed))

    def _name_of(self, site: FFNSite, ref: LinearRef, role: str) -> str:
        if ref.expert is not None:
            return ExpertMatrix(self._checkpoint, site, ref, role).name
        return self._stored(ref.weight)

    def _write_linear(self, name: str, out: TensorWriter, digest: Any) -> float:
        stored, error = self._stored(f"{name}.weight"), RelativeError()
        packed = self._packed.packed(stored)
        assert packed is not None
        for start, stop in row_chunks(self._checkpoint.spec(stored)):
            if packed.kept:
                rows = self._packed.own_rows(stored, start, stop)
            else:
                rows = self._rows(self._checkpoint.read(stored, (start, stop)), stored, error, packed.format)
            update_digest(digest, rows)
            for tied in self._tied_to(name):
                out.write(f"{tied}.blocks", to_blocks(rows, packed.format, self._linears[tied]), row=start)
            if name in self._in_blocks:
                rows = to_blocks(rows, packed.format, self._linears[name])
            out.write(f"{name}.weight", rows, row=start)
        self._count(name, stored, packed.format, packed.kept)
        return error.relative

    def _as_stored(self, site: FFNSite, ref: LinearRef, role: str, neurons: torch.Tensor, kind: str) -> Any:
        stored, first = self._name_of(site, ref, role), int(neurons[0])
        rows_lie = (role != "down" or self._packed.by_neuron) and (not ref.transposed or ref.expert is not None)
        packed = self._packed.packed(stored)
        same = rows_lie and packed is not None and packed.kept and packed.format == kind
        if (site.key, role) not in self._counted:
            self._counted.add((site.key, role))
            self._count(stored, stored, kind, same or kind == "tq2_0")  # ternary numbers stay as they are
        if packed is None or not same:
            return None
        # a part of a matrix; experts are single in the file
        start = ref.rows[0] if ref.rows is not None and ref.expert is None else 0
        if bool((neurons == torch.arange(first, first + len(neurons))).all()):
            return self._packed.own_rows(stored, start + first, start + first + len(neurons))
        if self._whole[0] != (site.key, role):
            self._whole = (site.key, role), self._packed.own_rows(stored, start, start + site.intermediate)
        return self._whole[1][neurons]

    def _count(self, name: str, stored: str, to: str, kept: bool) -> None:
        """Record that matrix ``stored`` was written in format ``to``; kept: with its own integers."""
        packed = self._packed.packed(stored)
        of = "floats" if packed is None else packed.kind
        if kept and packed is not None and packed.exact:
            self.kept[of] += 1
        else:
            self.rounded[name] = f"{of} to {to}" + (" with float16 scales" if kept else "")
