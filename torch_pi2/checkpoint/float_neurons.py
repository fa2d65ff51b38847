"""A float checkpoint becomes a folder with neurons of floats: what the neuron store of a float model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES, dtype_name
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.checkpoint.placing import Stored, refs_of
from torch_pi2.checkpoint.quantize import Quantizer, QuantizeReport, convert, converted, update_digest
from torch_pi2.formats import FLOATS, row_bytes
from torch_pi2.rewrite.skeleton import model_config
from torch_pi2.store.source import ExpertMatrix
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite, LinearRef

#: Bytes of neurons made at a time: a whole layer of a model of 7 billion parameters in 16 bits. Matrices are read once
#: for each such group of neurons.
_GROUP = 384 << 20
#: Bytes of a matrix read at a time.
_STRIP = 16 << 20


def float_neurons(
    source: Path,
    folder: Path,
    weights: str | None = None,
    *,
    trust_remote_code: bool = False,
    progress: bool = False,
) -> QuantizeReport:
    """Write ``folder`` as :func:`torch_pi2.quantize` does, with nothing quantised: neurons in floats.

    Args:
        weights: of the neurons, a name in ``FLOATS`` (rounding to it if they are something else); None or
            ``float``: what the model has when it is loaded, so that nothing is lost.

    Raises:
        NonFiniteError: NaN, infinity, or a number that ``weights`` cannot hold. Others: as ``quantize``.
    """

    def make(stored: Stored, plan: Plan, ways: dict[str, str], _linears: dict[str, int]) -> Quantizer:
        kind = weights if weights in FLOATS else None
        if kind is None:  # what transformers loads: as the configuration says, or as it is stored
            said = model_config(source, trust_remote_code=trust_remote_code).dtype
            kind = dtype_name(said) if said in DTYPES.values() else None
        return _FloatQuantizer(stored, plan, ways, kind)

    return convert(source, folder, make, with_linears=False, trust_remote_code=trust_remote_code, progress=progress)


class _FloatQuantizer(Quantizer):
    """As its base, with ``kind`` a name in ``FLOATS`` (None: as in the checkpoint) and no linears."""

    def __init__(self, stored: Stored, plan: Plan, ways: dict[str, str], kind: str | None) -> None:
        super().__init__(stored, plan, ways, {}, kind or "")
        if kind is None:
            site = self._layers[0].site
            name, _, _ = self._place(site, site.up, "up")
            self._kind = dtype_name(stored.checkpoint.spec(name).dtype)

    def _write_site(self, layer: LayerPlan, out: TensorWriter, digest: Any) -> float:
        site, order = layer.site, layer.order.long()
        refs, dtype = refs_of(site), DTYPES[self._kind]
        group = max(1, _GROUP // (len(refs) * row_bytes(self._kind, site.hidden)))
        for first in range(0, site.intermediate, group):
            neurons = order[first : first + group]
            neuron_rows = self._scratch(Spec((len(neurons), len(refs), site.hidden), dtype))
            for row, (role, ref) in enumerate(refs):
                for start, strip in self._strips(site, ref, role, None if first else digest):
                    if role == "down":
                        part = converted(strip[:, neurons], dtype, ref.weight)
                        neuron_rows[:, row, start : start + len(strip)] = part.T
                    else:
                        here = ((neurons >= start) & (neurons < start + len(strip))).nonzero().flatten()
                        neuron_rows[here, row] = converted(strip[neurons[here] - start], dtype, ref.weight)
            out.write(f"{site.key}.bundles", neuron_rows.view(torch.uint8), row=first)
        self._write_biases(layer, out, digest)
        return 0.0

    def _strips(self, site: FFNSite, ref: LinearRef, role: str, digest: Any) -> Iterator[tuple[int, torch.Tensor]]:
        """First row, and rows from there on, of one matrix after the other; ``digest`` is told unless it is None."""
        if ref.transposed or len(ref.rows or ()) == 3:  # its rows lie in pieces: it is read whole
            matrix = self._whole(site, ref, role)
            if digest is not None:
                update_digest(digest, matrix)
            yield 0, matrix
            return
        name, first, shape = self._place(site, ref, role)
        dtype = self._checkpoint.spec(name).dtype
        per_row = shape[1] * dtype.itemsize
        if digest is not None:  # as torch_pi2.types.plan.weights_hash
            digest.update(str(shape).encode() + str(dtype).encode())
        step = max(1, _STRIP // per_row)
        for start in range(0, shape[0], step):
            stop = min(start + step, shape[0])
            data = self._checkpoint.read_bytes(name, (first + start) * per_row, (first + stop) * per_row)
            if digest is not None:
                digest.update(data.numpy().data)
            yield start, data.view(dtype).view(stop - start, shape[1])

    def _whole(self, site: FFNSite, ref: LinearRef, role: str) -> torch.Tensor:
        """A matrix in memory of its own, not of the neurons that are being made."""
        if ref.expert is None:
            return ref.take(self._checkpoint.read(self._stored(ref.weight))).contiguous()
        found = ExpertMatrix(self._checkpoint, site, ref, role)
        found.read_into(matrix := torch.empty(found.shape, dtype=self._checkpoint.spec(found.name).dtype))
        return matrix

    def _place(self, site: FFNSite, ref: LinearRef, role: str) -> tuple[str, int, tuple[int, int]]:
        """Name of the tensor that has a matrix, its first row there, and its shape."""
        if ref.expert is not None:
            found = ExpertMatrix(self._checkpoint, site, ref, role)
            return found.name, found.first, found.shape
        name = self._stored(ref.weight)
        rows, columns = self._checkpoint.spec(name).shape
        first, last = ref.rows[:2] if ref.rows else (0, rows)
        return name, first, (last - first, columns)
