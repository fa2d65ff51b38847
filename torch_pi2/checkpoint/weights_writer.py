"""Writing ``weights.safetensors`` from a checkpoint, one matrix at a time: quantised neurons and rows, or floats."""

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.checkpoint.stored import Stored
from torch_pi2.errors import NonFiniteError, check_made_from
from torch_pi2.fitting.gptq_model import neuron_key
from torch_pi2.formats import FLOATS, row_bytes
from torch_pi2.ops.linear import ROWS as BLOCK_ROWS
from torch_pi2.ops.quantize import ternary_rows
from torch_pi2.ops.quantized import RelativeError
from torch_pi2.ops.quantized import quantize as quantize_rows
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.store.source import ExpertMatrix
from torch_pi2.store.weights import NO_EMBEDDINGS, NO_FORMATS, WEIGHTS_FILE, metadata, neuron_specs
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef

#: Rows converted at a time, in bytes of float32.
_CHUNK = 2 << 20
#: Bytes of neurons built at a time; matrices are read once per such group.
_GROUP = 384 << 20
NO_ROWS: Mapping[str, torch.Tensor] = {}
_CONVERTED = (
    "The weights were changed or converted since; optimise and save the model again. Of a model that divides weights "
    "when evaluated (RWKV-4), take the checkpoint it was made of."
)
#: In the header until the hash is known.
NO_HASH = "0" * 64


@dataclass
class QuantizeReport:
    """Result of :func:`torch_pi2.quantize`.

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


class Quantizer:
    """Writes the weights file of a model, with quantised neurons and rows, or with float neurons.

    Args:
        stored: the model's skeleton and its checkpoint. plan: with the checkpoint's ``model_hash``, or ``NO_HASH``.
        strategies: site key -> strategy of the layers that become neurons, from :meth:`Stored.place_layers`.
        linears: name -> number of inputs of other linear layers to quantise. kind: the format, possibly a float one.
        formats: exceptions from ``kind``, by linear layer, embedding and site key. embeddings: name -> width of those
            to quantise.
        rows: calibrated rows to write instead of rounded weights, by keys of :mod:`torch_pi2.fitting.gptq_model`.
    """

    def __init__(
        self,
        stored: Stored,
        plan: Plan,
        strategies: Mapping[str, str],
        linears: dict[str, int],
        kind: str,
        *,
        formats: Mapping[str, str] = NO_FORMATS,
        embeddings: Mapping[str, int] = NO_EMBEDDINGS,
        rows: Mapping[str, torch.Tensor] = NO_ROWS,
    ) -> None:
        self._checkpoint, self._plan, self._kind, self._linears = stored.checkpoint, plan, kind, linears
        self._formats, self._embeddings, self._strategies, self._given = formats, embeddings, strategies, rows
        self._layers = [layer for layer in plan.layers if layer.site.key in strategies]
        in_sites = {name for layer in self._layers for name in layer.site.parameter_names}
        self._of, self._stored, named = stored, stored.name, stored.model.get_submodule
        biases = {f"{name}.bias" for name in linears if getattr(named(name), "bias", None) is not None}
        elsewhere = in_sites | biases | {f"{name}.weight" for name in (*linears, *embeddings)}
        self._biases = sorted(biases)
        # a tied tensor under its first name: a quantised output layer leaves it to the embedding
        floats = ([name for name in names if name not in elsewhere] for names in stored.groups)
        self._floats = [n for names in floats for n in names if n == names[0] or self._differ(n, names[0])]
        self._held: dict[torch.dtype, torch.Tensor] = {}
        #: Linears to write in blocks, as this CPU's kernels read them; ``_tied``: those with an embedding's rows.
        self._in_blocks: list[str] = []
        self._tied: list[str] = []

    def _differ(self, *names: str) -> bool:
        """Whether the checkpoint has other values for one of two tied names: from_pretrained does not tie them then."""
        (one, other), read = map(self._stored, names), self._checkpoint.read
        if one == other:
            return False
        spec, of_other = map(self._of.checked, names)
        return spec != of_other or not all(torch.equal(read(one, n), read(other, n)) for n in row_chunks(spec))

    def _tied_to(self, name: str) -> list[str]:
        """Linears with the rows of ``name``, if that is an embedding."""
        tied = self._tied if name in self._embeddings else []
        return [one for one in tied if self._stored(f"{one}.weight") == self._stored(f"{name}.weight")]

    def write(self, folder: Path, progress: bool) -> tuple[QuantizeReport, str]:
        """Write the file into ``folder``; returns the report and the hash of the float feed-forward weights."""
        specs = {name: self._of.checked(name) for name in self._floats}
        specs |= {name: Spec(self._of.checked(name).shape, torch.float32) for name in self._biases}
        for name, columns in self._in_rows.items():
            rows, kind = self._of.checked(f"{name}.weight", floats=True).shape[0], self._formats.get(name, self._kind)
            specs[f"{name}.weight"] = Spec((rows, row_bytes(kind, columns)), torch.uint8)
            for tied in self._tied_to(name):
                specs[f"{tied}.blocks"] = specs[f"{name}.weight"]
        for layer in self._layers:
            specs |= neuron_specs(layer.site, self._format_of(layer.site))
        report = QuantizeReport(self._kind)
        digest = hashlib.sha256()
        more: Any = {"formats": self._formats, "embeddings": self._embeddings, "in_blocks": self._in_blocks}
        meta = metadata(self._kind, NO_HASH, self._linears, self._strategies, **more)
        with TensorWriter(folder / WEIGHTS_FILE, specs, meta, progress=progress) as out:
            for name in self._floats:
                for start, stop in row_chunks(specs[name]):
                    part = (start, stop) if specs[name].shape else None
                    out.write(name, self._checkpoint.read(self._stored(name), part), row=start)
            for name in self._biases:
                out.write(name, self._checkpoint.read(self._stored(name)).float())
            for name in self._in_rows:
                report.errors[name] = self._write_linear(name, out, digest)
            for layer in self._plan.layers:
                if layer.site.key in self._strategies:
                    report.errors[layer.site.key] = self._write_site(layer, out, digest)
                else:  # the hash covers dense layers too, as when the model is rewritten in memory
                    for role, ref in layer.site.refs.items():
                        update_digest(digest, self._matrix(layer.site, ref, role))
                    for ref in layer.site.refs.values():
                        if ref.bias is not None:
                            update_digest(digest, ref.take_bias(self._checkpoint.read(self._stored(ref.bias))))
            found = digest.hexdigest()
            if self._plan.model_hash != NO_HASH:
                where, wanted = f"plan in {self._checkpoint.folder}", self._plan.model_hash
                check_made_from(where, found, wanted, "feed-forward weights", _CONVERTED)
            out.set_metadata("model_hash", found)
        return report, found

    @property
    def _in_rows(self) -> dict[str, int]:
        """Columns of quantised linears and embeddings that own their rows (a linear tied to an embedding does not)."""
        shared = {alias for name in self._embeddings for alias in self._of.alias.get(f"{name}.weight", ())}
        own = {name: n for name, n in self._linears.items() if f"{name}.weight" not in shared}
        return {**self._embeddings, **own}

    def _write_linear(self, name: str, out: TensorWriter, digest: Any) -> float:
        stored = self._stored(f"{name}.weight")
        error = RelativeError()
        for start, stop in row_chunks(self._checkpoint.spec(stored)):
            values = self._checkpoint.read(stored, (start, stop))
            given = self._given.get(f"{name}.weight")
            rows = self._rows(values, stored, error, self._kind, None if given is None else given[start:stop])
            out.write(f"{name}.weight", rows, row=start)
        return error.relative

    def _rows(
        self, values: torch.Tensor, name: str, error: RelativeError, kind: str, given: torch.Tensor | None = None
    ) -> torch.Tensor:
        """``values`` in format ``kind``, uint8, or the calibrated rows ``given`` for them."""
        if kind in FLOATS:
            return converted(values, DTYPES[kind], name).view(torch.uint8)
        if given is not None:
            rows = given
        else:  # down rows are ternary only where all their numbers are
            rows = ternary_rows(values) if kind == "tq2_0" else quantize_rows(name, values, kind)
        error.add(values, torch.ops.pi2.dequantize(rows, kind, values.shape[1], torch.float32))
        return rows

    def _write_site(self, layer: LayerPlan, out: TensorWriter, digest: Any) -> float:
        site, order, kind = layer.site, layer.order.long(), self._format_of(layer.site)
        spec, error = neuron_specs(site, kind)[f"{site.key}.bundles"], RelativeError()
        # half of float neurons: with one matrix they take less memory than the layer
        most = -(-site.intermediate // 2) if kind in FLOATS else site.intermediate
        group, step = max(1, min(most, _GROUP * site.intermediate // spec.nbytes)), max(1, _CHUNK // (4 * site.hidden))
        for first in range(0, site.intermediate, group):
            neurons = order[first : first + group]
            neuron_rows = self._scratch(Spec((len(neurons), *spec.shape[1:]), torch.uint8))
            for row, (role, ref) in enumerate(site.refs.items()):
                matrix = self._matrix(site, ref, role)
                if first == 0:
                    update_digest(digest, matrix)
                rows, of = row_of_neurons(neuron_rows, row, kind, site.hidden)
                by_neuron, calibrated = matrix.T if role == "down" else matrix, self._given.get(neuron_key(site, role))
                for start in range(0, len(neurons), step):
                    wanted = neurons[start : start + step]
                    made = self._as_stored(site, ref, role, wanted, of)
                    if made is None:
                        given = None if calibrated is None else calibrated[wanted]
                        made = self._rows(by_neuron[wanted].contiguous(), ref.weight, error, of, given)
                    rows[start : start + step] = made
                del matrix, by_neuron
            out.write(f"{site.key}.bundles", neuron_rows, row=first)
        for role, ref in site.refs.items():
            if ref.bias is not None:
                bias = ref.take_bias(self._checkpoint.read(self._stored(ref.bias)))
                update_digest(digest, bias)
                name = f"{site.key}.bias_{role}"
                floats = converted(bias, out.specs[name].dtype, ref.bias)
                out.write(name, floats if role == "down" else floats[order])
        return error.relative

    def _format_of(self, site: FFNSite) -> str:
        return self._formats.get(site.key, self._kind)

    def _as_stored(self, site: FFNSite, ref: LinearRef, role: str, neurons: torch.Tensor, kind: str) -> Any:
        """Rows of ``neurons`` as the checkpoint stores them, if that is in ``kind``; otherwise None."""
        return None

    def _matrix(self, site: FFNSite, ref: LinearRef, role: str) -> torch.Tensor:
        if ref.expert is not None:
            found = ExpertMatrix(self._checkpoint, site, ref, role)
            matrix = self._scratch(Spec(found.shape, found.dtype))
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
        self._checkpoint.read_into(stored, matrix, row=start)
        return matrix

    def _scratch(self, spec: Spec) -> torch.Tensor:
        """Memory shared by all layers, because malloc may keep freed memory."""
        size = math.prod(spec.shape)
        held = self._held.get(spec.dtype)
        if held is None or held.numel() < size:
            held = self._held[spec.dtype] = torch.empty(size, dtype=spec.dtype)
        return held[:size].view(spec.shape)


def converted(values: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    """``values`` of the checkpoint's tensor ``name`` in ``dtype``. Raises NonFiniteError: NaN or infinity there."""
    made = values.to(dtype)
    if not made.numel() or all(map(math.isfinite, map(float, made.aminmax()))):
        return made
    sound = bool(values.isfinite().all())
    expected = f"numbers of at most {torch.finfo(dtype).max:.6g}, the largest in {dtype_name(dtype)}"
    fix = "Pack it with weights='bfloat16' or 'float'." if sound else "The checkpoint is damaged; get it again."
    raise NonFiniteError(f"values of {name}", expected=expected, found=f"{float(values.abs().max()):.6g}", fix=fix)


def row_chunks(spec: Spec) -> Iterator[tuple[int, int]]:
    rows = spec.shape[0] if spec.shape else 1
    step = max(1, _CHUNK // max(4, 4 * math.prod(spec.shape[1:])))
    step = max(step - step % BLOCK_ROWS, BLOCK_ROWS)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def update_digest(digest: Any, tensor: torch.Tensor) -> None:
    """Hash a tensor as :func:`torch_pi2.types.plan.weights_hash` does."""
    digest.update(str(tuple(tensor.shape)).encode() + str(tensor.dtype).encode())
    digest.update(tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data)
