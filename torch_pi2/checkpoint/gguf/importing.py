"""``torch_pi2.import_gguf``: a GGUF file becomes a folder of ours, with its rows as they are wherever they can be."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.tensorfile import TensorWriter
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.gguf.families import configuration
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint, own_format
from torch_pi2.checkpoint.gguf.tokenizer import write_tokenizer
from torch_pi2.checkpoint.quantize import NO_HASH, Quantizer, QuantizeReport, RelativeError, row_chunks, update_hash
from torch_pi2.errors import ArtifactError, NoFFNFoundError, UnsupportedModelError, check_choice
from torch_pi2.formats import GGUF_NEURONS, QUANTIZED
from torch_pi2.graph.find import find_sites
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import SPARSE_ACTIVATIONS
from torch_pi2.ops.quantized import quantize as quantize_rows
from torch_pi2.rewrite.linears import find_linears
from torch_pi2.rewrite.skeleton import places, skeleton
from torch_pi2.spec.method import Method
from torch_pi2.spec.plan import LayerPlan, Plan
from torch_pi2.spec.site import FFNSite, LinearRef
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable
from torch_pi2.store.gguf import TYPES, TensorType
from torch_pi2.store.names import ExpertMatrix
from torch_pi2.store.weights import WEIGHTS_FILE

_TYPES = {one.name: one for one in TYPES.values()}
_FLOATS = ("F32", "F16", "BF16", "F64")


@dataclass
class ImportReport(QuantizeReport):
    """What :func:`import_gguf` did.

    Attributes:
        types: GGUF type -> matrices of it that are kept bit for bit. rounded: name -> "from to", of the others.
        neurons: layers (experts one by one) that became neurons. tokenizer: why there is none; empty: there is.
        predictors: tensors of PowerInfer's predictors that were left out: they see what comes before the norm.
        errors: of what was rounded again, and 0 for the rest.
    """

    types: dict[str, int] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    neurons: int = 0
    tokenizer: str = ""
    predictors: int = 0


@checked
@fresh_settings()
def import_gguf(
    file: str | Path,
    folder: str | Path,
    *,
    neurons: str = "auto",
    progress: bool = False,
) -> ImportReport:
    """Write the model of a GGUF file to ``folder``, for :func:`torch_pi2.load`, ``pack`` and the rest.

    Linear layers and the embedding keep the file's rows bit for bit where the type is Q4_0, Q8_0, Q4_1, Q5_0, Q5_1,
    Q4_K, Q5_K or Q6_K; other types are rounded again, to int4 if they have fewer than four bits a weight, else to int8,
    and the report says so. Feed-forward layers are such linear layers, too, unless they become neurons, which have a
    row of gate and up and a column of down together: gate and up are then taken over where the formats are the same,
    down is always rounded again, but of PowerInfer's files, where it lies neuron by neuron (their predictors are left
    out: the exact gate needs none, :func:`torch_pi2.fit` makes others). Rows are read some at a time.

    Args:
        neurons: ``auto``: experts, and layers whose activation gives zeros (ReLU), in int4 if the file has fewer than
            six bits a weight there, else int8; none of other layers. ``all``: all layers, as a neuron store and
            thresholds need them; ``int4`` or ``int8``: in this format. ``none``: none; experts are refused then.

    Raises:
        ArtifactError: damage, or ``folder`` cannot be written. UnsupportedModelError: an architecture, or something in
            it, that is not known. ConfigError: another ``neurons``. LibraryMissingError: no transformers, or no gguf.
    """
    check_choice("import_gguf(neurons=...)", neurons, GGUF_NEURONS, "Choose one of these.")
    load_library()
    file, folder = Path(file), Path(folder).resolve()
    check_replaceable(folder)
    start = time.perf_counter()
    with GgufCheckpoint(file) as checkpoint, replacing_folder(folder) as staging:
        keep_card(folder, staging)
        (staging / PI2_FOLDER).mkdir()
        _write_config(checkpoint, staging)
        tokenizer = write_tokenizer(checkpoint.file, staging)
        plan, linears, embeddings, kind = _what_becomes(checkpoint, staging, neurons)
        model = skeleton(staging)
        writer = _Importer(model, checkpoint, plan, linears, kind, embeddings)
        made, found_hash = writer.write(staging / PI2_FOLDER, progress)
        _check_used(checkpoint)
        replace(plan, model_hash=found_hash).save(staging / PI2_FOLDER)
        made.bytes_out = (staging / PI2_FOLDER / WEIGHTS_FILE).stat().st_size
        report = ImportReport(**vars(made), types=dict(writer.kept), rounded=writer.rounded, tokenizer=tokenizer)
        report.bytes_in, report.neurons = checkpoint.nbytes, len(plan.layers)
        report.predictors = len(checkpoint.predictors())
    report.seconds = time.perf_counter() - start
    return report


def _write_config(checkpoint: GgufCheckpoint, folder: Path) -> None:
    from transformers import CONFIG_MAPPING, GenerationConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    said = configuration(checkpoint.file)
    try:
        config = CONFIG_MAPPING[said.pop("model_type")](**said)
    except Exception as error:  # its checks raise many types
        raise UnsupportedModelError(
            str(checkpoint.folder),
            expected=f"a configuration of {checkpoint.family.model_type}",
            found=" ".join(str(error).split())[:200],
            fix="The file is damaged, or transformers too old for it: pip install -U transformers.",
        ) from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    GenerationConfig.from_model_config(config).save_pretrained(folder)


def _what_becomes(
    checkpoint: GgufCheckpoint, folder: Path, neurons: str
) -> tuple[Plan, dict[str, int], dict[str, int], str]:
    """The plan of the layers that become neurons; columns of linears and of embeddings; the main format."""
    with torch.device("meta"):
        model = skeleton(folder)
    sites = _sites(model, neurons)
    found, _ = find_linears(model, sites, on_meta=True)
    tied = {name: group for group in places(model) for name in group}
    linears = {
        name: module.in_features
        for name, module in found.items()
        if any(_is_packed(checkpoint, other) for other in tied.get(f"{name}.weight", ()))
    }
    embeddings = {
        name: module.embedding_dim
        for name, module in model.named_modules()
        if type(module) is nn.Embedding and _is_packed(checkpoint, f"{name}.weight")
    }
    kind = neurons if neurons in QUANTIZED else _kind_of_neurons(checkpoint, sites)
    layers = []
    for site in sites:
        exact = site.activation in SPARSE_ACTIVATIONS or site.experts is not None
        order = torch.arange(site.intermediate, dtype=torch.int32)
        method = Method.EXACT if exact else Method.DENSE
        layers.append(LayerPlan(site, method, 0 if exact else site.intermediate, order))
    return Plan(layers, NO_HASH, {"planner": "none"}), linears, embeddings, kind


def _is_packed(checkpoint: GgufCheckpoint, parameter: str) -> bool:
    return parameter in checkpoint and checkpoint.type_of(parameter) not in _FLOATS


def _sites(model: nn.Module, neurons: str) -> list[FFNSite]:
    try:
        sites = find_sites(model, strict=False, on_meta=True)
    except NoFFNFoundError:
        sites = []
    if neurons in ("all", *QUANTIZED):
        return sites
    wanted = [site for site in sites if site.experts is not None]
    if wanted and neurons == "none":
        raise UnsupportedModelError(
            "import_gguf(neurons='none')",
            expected="a model without experts",
            found=f"{len(wanted)} of them",
            fix="Leave it out: experts are always neurons.",
        )
    sparse = [site for site in sites if site.experts is None and site.activation in SPARSE_ACTIVATIONS]
    return [*wanted, *sparse] if neurons == "auto" else []


def _kind_of_neurons(checkpoint: GgufCheckpoint, sites: list[FFNSite]) -> str:
    """The nearest format that is not much smaller than what the file has."""
    if not sites:
        return "int4"
    tensors = [t for t in checkpoint.file.tensors.values() if ".ffn_" in t.name and len(t.shape) > 1]
    numbers = sum(t.rows * t.columns for t in tensors)
    return "int4" if 8 * sum(t.nbytes for t in tensors) < 6 * numbers else "int8"


def _check_used(checkpoint: GgufCheckpoint) -> None:
    """Raises UnsupportedModelError: a tensor that the model as it was built has no place for."""
    if left := checkpoint.left():
        raise UnsupportedModelError(
            str(checkpoint.folder),
            expected=f"the tensors of a {checkpoint.family.model_type} model",
            found=left[0] + (f" and {len(left) - 1} others as well" if len(left) > 1 else " as well"),
            fix="Load the model's original checkpoint with transformers, and optimise that.",
        )


def _rounded_to(of: TensorType) -> str:
    return "int4" if 8 * of.block_bytes < 4 * of.block else "int8"


class _Importer(Quantizer):
    """Writes the weights of a GGUF file."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: GgufCheckpoint,
        plan: Plan,
        linears: dict[str, int],
        kind: str,
        embeddings: dict[str, int],
    ) -> None:
        self._gguf = checkpoint
        self.kept: Counter[str] = Counter()
        self.rounded: dict[str, str] = {}
        formats: dict[str, str] = {}
        super().__init__(model, checkpoint, plan, linears, kind, formats=formats, embeddings=embeddings)
        for name in (*linears, *embeddings):
            of = checkpoint.type_of(self._stored(f"{name}.weight"))
            made = own_format(of) or _rounded_to(_TYPES[of])
            if made != kind:
                formats[name] = made
        for name in (*self._floats, *self._biases, *(f"{name}.weight" for name in self._in_rows)):
            self._check_shape(name, model)

    def _check_shape(self, name: str, model: nn.Module) -> None:
        """Raises ArtifactError: the file's tensor is not the model's."""
        owner, _, local = name.rpartition(".")
        wanted = getattr(model.get_submodule(owner), local).shape
        found = self._checkpoint.spec(self._stored(name)).shape
        if tuple(wanted) != found:
            raise ArtifactError(
                f"{name} in {self._checkpoint.folder}",
                expected=str(list(wanted)),
                found=str(list(found)),
                fix="The file's metadata is of another model; get it again.",
            )

    def _write_linear(self, name: str, out: TensorWriter, digest: Any) -> float:
        stored = self._stored(f"{name}.weight")
        spec, of = self._checkpoint.spec(stored), self._gguf.type_of(stored)
        own, error = own_format(of), RelativeError()
        for start, stop in row_chunks(spec):
            if own is not None:
                rows = self._gguf.own_rows(stored, start, stop)
            else:
                values = self._checkpoint.read(stored, (start, stop))
                rows = self._rounded(values, stored, _rounded_to(_TYPES[of]), error)
            update_hash(digest, rows)
            out.write(f"{name}.weight", rows, row=start)
        self._count(name, of, own or f"{_rounded_to(_TYPES[of])}", own is not None)
        return error.relative

    def _rounded(self, values: torch.Tensor, name: str, kind: str, error: RelativeError) -> torch.Tensor:
        rows = quantize_rows(name, values, kind)
        error.add(values, torch.ops.pi2.dequantize(rows, kind, values.shape[1], torch.float32))
        return rows

    def _as_stored(self, site: FFNSite, ref: LinearRef, role: str, neurons: torch.Tensor) -> torch.Tensor | None:
        stored = self._stored(ref.weight)
        if ref.expert is not None:
            stored = ExpertMatrix(self._checkpoint, site, ref, role).name
        of, first = self._gguf.type_of(stored), int(neurons[0])
        same = (role != "down" or self._gguf.family.by_neuron) and own_format(of) == self._kind
        if first == 0:
            self._count(stored, of, self._kind, same)
        if ref.rows is not None and ref.expert is None:  # a part of a matrix; experts are single in the file
            first += ref.rows[0]
        return self._gguf.own_rows(stored, first, first + len(neurons)) if same else None

    def _count(self, name: str, of: str, to: str, kept: bool) -> None:
        if kept:
            self.kept[of] += 1
        else:
            self.rounded[name] = f"{of} to {to}"
