"""Importing quantised checkpoints of others: rows are kept bit for bit if one of our formats can hold them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from torch_pi2.base.tensorfile import TensorWriter
from torch_pi2.checkpoint.placing import Stored, bound_plan, refs_of
from torch_pi2.checkpoint.quantize import new_plan, other_linears
from torch_pi2.checkpoint.weights_writer import Quantizer, QuantizeReport, RelativeError, row_chunks, update_digest
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.formats import PAIRS, QUANTIZED, formats_of
from torch_pi2.graph.find import Found, search
from torch_pi2.layers.linear import can_stand_for
from torch_pi2.ops.activations import exact_zeros
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.store.folder import PI2_FOLDER, declare
from torch_pi2.store.source import ExpertMatrix, Source, wrong_shape
from torch_pi2.store.weights import WEIGHTS_FILE
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite, LinearRef


class PackedSource(Source, Protocol):
    """A checkpoint with matrices in few bits.

    Attributes:
        about: of what model it is, for messages. by_neuron: columns of down lie together, as rows.
    """

    @property
    def about(self) -> str: ...

    @property
    def by_neuron(self) -> bool: ...

    def type_of(self, name: str) -> str:
        """The checkpoint's name for the type of matrix ``name``; empty: floats."""

    def own_format(self, name: str) -> str | None:
        """The format of ours that has its integers; None: it has to be rounded."""

    def exact(self, name: str) -> bool:
        """Whether that format has its scales as well, so that nothing is rounded."""

    def rounded_format(self, name: str) -> str:
        """The format of ours to which it is rounded otherwise."""

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)`` in :meth:`own_format`, uint8."""

    def ffn_bits(self) -> float:
        """Bits per weight in feed-forward layers."""

    def unused(self) -> list[str]:
        """Tensors that were not read."""


@dataclass
class ImportReport(QuantizeReport):
    """What an import did.

    Attributes:
        types: type in the checkpoint -> how many of its matrices are kept bit for bit. rounded: name -> "from to" of
            the other matrices; those "with float16 scales" still have their integers.
        weights: the formats of the neurons, such as ``q4_k+int8`` if down has another one than gate and up; without
            neurons the main format.
        neurons: layers (each expert is one) that became neurons. tokenizer: why there is none; empty: there is one.
        predictors: tensors of PowerInfer's predictors that were ignored. recall: of those that were imported, key of a
            layer -> share of its firing neurons that they predict, on the given text.
        errors: of rounded matrices; 0 for the others.
    """

    types: dict[str, int] = field(default_factory=dict)
    rounded: dict[str, str] = field(default_factory=dict)
    neurons: int = 0
    tokenizer: str = ""
    predictors: int = 0
    recall: dict[str, float] = field(default_factory=dict)


def write_imported(checkpoint: PackedSource, folder: Path, neurons: str, progress: bool) -> ImportReport:
    """Write ``pi2/`` into ``folder``, where the configuration is. Raises as :func:`torch_pi2.import_gguf`."""
    (folder / PI2_FOLDER).mkdir()
    with torch.device("meta"):
        empty = skeleton(folder)
    plan, stored = new_plan(_found(empty, neurons, checkpoint.by_neuron)), Stored(skeleton(folder), checkpoint)
    strategies, dense = stored.place_layers(plan, needed=False)
    linears, embeddings = _what_is_packed(checkpoint, stored, empty, other_linears(empty, plan, strategies))
    kind = neurons if neurons in QUANTIZED else _kind_of_neurons(checkpoint, strategies)
    writer = _Importer(stored, checkpoint, plan, strategies, linears, kind, embeddings, neurons not in QUANTIZED)
    made, found_hash = writer.write(folder / PI2_FOLDER, progress)
    _check_used(checkpoint)
    plan = bound_plan(plan, strategies, dense, found_hash)
    plan.save(folder / PI2_FOLDER)
    declare(folder)
    report = ImportReport(**vars(made), types=dict(writer.kept), rounded=writer.rounded, neurons=len(plan.layers))
    report.weights = writer.neuron_formats
    report.bytes_in = checkpoint.nbytes
    report.bytes_out = (folder / PI2_FOLDER / WEIGHTS_FILE).stat().st_size
    return report


def _what_is_packed(
    checkpoint: PackedSource, stored: Stored, model: nn.Module, found: dict[str, nn.Linear]
) -> tuple[dict[str, int], dict[str, int]]:
    """Columns of the linears in ``found`` and of the embeddings of ``model`` that the checkpoint has quantised."""
    linears = {
        name: module.in_features
        for name, module in found.items()
        if any(_is_packed(checkpoint, other) for other in stored.alias.get(f"{name}.weight", ()))
    }
    embeddings = {
        name: module.embedding_dim
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and can_stand_for(module) and _is_packed(checkpoint, f"{name}.weight")
    }
    return linears, embeddings


def _is_packed(checkpoint: PackedSource, parameter: str) -> bool:
    return parameter in checkpoint and bool(checkpoint.type_of(parameter))


def _found(model: nn.Module, neurons: str, by_neuron: bool) -> Found:
    """The layers that become neurons."""
    found = search(model, on_meta=True, needed=False)
    if neurons in ("all", *QUANTIZED):
        return found
    wanted = [site for site in found.sites if site.experts is not None]
    if neurons == "none" and (wanted or by_neuron):
        raise UnsupportedModelError(
            "an import with neurons='none'",
            expected="a model without experts" if wanted else "down matrices that lie row by row",
            found=f"{len(wanted)} of them" if wanted else "PowerInfer's, which lie neuron by neuron",
            fix="Leave it out: these are always neurons.",
        )
    sparse = [site for site in found.sites if site.experts is None and exact_zeros(site.activation)]
    return Found([*wanted, *sparse] if neurons == "auto" else [], found.left)


def _kind_of_neurons(checkpoint: PackedSource, strategies: Collection[str]) -> str:
    """The nearest format that is not much smaller than the checkpoint's."""
    return "int4" if not strategies or checkpoint.ffn_bits() < 6 else "int8"


def _check_used(checkpoint: PackedSource) -> None:
    """Raises UnsupportedModelError: a tensor that the model has no parameter for."""
    if unused := checkpoint.unused():
        raise UnsupportedModelError(
            str(checkpoint.folder),
            expected=f"the tensors of a {checkpoint.about} model",
            found=unused[0] + (f" and {len(unused) - 1} others as well" if len(unused) > 1 else " as well"),
            fix="Load the model's original checkpoint with transformers, and optimise that.",
        )


class _Importer(Quantizer):
    """Writes the weights of an imported checkpoint.

    Args:
        kind: of neurons, where ``in_pairs`` does not find another: gate and up as the checkpoint has them.
    """

    def __init__(
        self,
        stored: Stored,
        checkpoint: PackedSource,
        plan: Plan,
        strategies: dict[str, str],
        linears: dict[str, int],
        kind: str,
        embeddings: dict[str, int],
        in_pairs: bool,
    ) -> None:
        self._packed = checkpoint
        self.kept: Counter[str] = Counter()
        self.rounded: dict[str, str] = {}
        formats: dict[str, str] = {}
        super().__init__(stored, plan, strategies, linears, kind, formats=formats, embeddings=embeddings)
        if in_pairs:
            kept = {layer.site.key: self._kept_format(layer.site) for layer in self._layers}
            if any(kept.values()):  # int8 costs the few others no more than it costs columns of down
                kind = self._kind = "int4" if set(kept.values()) == {"int4"} else "int8"
                formats |= {key: made for key, made in kept.items() if made not in (None, kind)}
        for name in (*linears, *embeddings):
            own = self._stored(f"{name}.weight")
            made = checkpoint.own_format(own) or checkpoint.rounded_format(own)
            if made != kind:
                formats[name] = made
        for name in (*self._floats, *self._biases, *(f"{name}.weight" for name in self._in_rows)):
            self._check_shape(name, stored.model)

    @property
    def neuron_formats(self) -> str:
        """Formats of all layers; without neurons the main format."""
        return ", ".join(dict.fromkeys(self._format_of(layer.site) for layer in self._layers)) or self._kind

    def _kept_format(self, site: FFNSite) -> str | None:
        """The two formats of neurons that keep the rows of gate and up as they are, or the one that keeps down as well.

        None: there are none, or it is int8, which is for :func:`_kind_of_neurons` to say.
        """
        refs = {role: (ref, self._name_of(site, ref, role)) for role, ref in refs_of(site)}
        down = refs.pop("down")[1]
        if any(ref.transposed and ref.expert is None for ref, _ in refs.values()):
            return None
        found = {self._packed.own_format(stored) for _, stored in refs.values()}
        if found == {"int4"} and self._packed.by_neuron and self._packed.own_format(down) == "int4":
            return "int4"
        return next((pair for pair in PAIRS if found == {formats_of(pair)[0]}), None)

    def _name_of(self, site: FFNSite, ref: LinearRef, role: str) -> str:
        """The checkpoint's name of a site's matrix."""
        if ref.expert is not None:
            return ExpertMatrix(self._checkpoint, site, ref, role).name
        return self._stored(ref.weight)

    def _check_shape(self, name: str, model: nn.Module) -> None:
        """Raises ArtifactError: the file's tensor is not the model's."""
        owner, _, local = name.rpartition(".")
        wanted = getattr(model.get_submodule(owner), local).shape
        found = self._checkpoint.spec(self._stored(name)).shape
        if tuple(wanted) != found:
            raise wrong_shape(name, self._checkpoint.folder, list(wanted), list(found))

    def _write_linear(self, name: str, out: TensorWriter, digest: Any) -> float:
        stored = self._stored(f"{name}.weight")
        spec, own, error = self._checkpoint.spec(stored), self._packed.own_format(stored), RelativeError()
        kind, exact = own or self._packed.rounded_format(stored), self._exact(stored)
        for start, stop in row_chunks(spec):
            rows = None if own is None else self._packed.own_rows(stored, start, stop)
            if rows is None or not exact:
                rows = self._rows(self._checkpoint.read(stored, (start, stop)), stored, error, kind, rows)
            update_digest(digest, rows)
            out.write(f"{name}.weight", rows, row=start)
        self._count(name, stored, kind, own is not None)
        return error.relative

    def _exact(self, stored: str) -> bool:
        return self._packed.own_format(stored) is not None and self._packed.exact(stored)

    def _as_stored(
        self, site: FFNSite, ref: LinearRef, role: str, neurons: torch.Tensor, kind: str
    ) -> tuple[torch.Tensor | None, bool]:
        stored, first = self._name_of(site, ref, role), int(neurons[0])
        rows_lie = (role != "down" or self._packed.by_neuron) and (not ref.transposed or ref.expert is not None)
        same = rows_lie and self._packed.own_format(stored) == kind
        if first == 0:
            self._count(stored, stored, kind, same)
        if not same:
            return None, False
        if ref.rows is not None and ref.expert is None:  # a part of a matrix; experts are single in the file
            first += ref.rows[0]
        return self._packed.own_rows(stored, first, first + len(neurons)), self._exact(stored)

    def _count(self, name: str, stored: str, to: str, kept: bool) -> None:
        """Of matrix ``stored`` in the format ``to``. kept: its integers are."""
        of = self._packed.type_of(stored) or "floats"
        if kept and self._exact(stored):
            self.kept[of] += 1
        else:
            self.rounded[name] = f"{of} to {to}" + (" with float16 scales" if kept else "")
