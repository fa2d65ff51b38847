"""``supported``: which feed-forward layers of a model can be made sparse, and why not, before any weight is read."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.fields import Field, checked, shown
from torch_pi2.base.modules import has_sparse_layers
from torch_pi2.base.package import quiet_imports
from torch_pi2.graph.find import search
from torch_pi2.layers.linear import QuantEmbedding, QuantLinear
from torch_pi2.planner.hot_neurons import gate_method
from torch_pi2.rewrite.skeleton import skeleton
from torch_pi2.store.folder import PI2_FOLDER, quantised_by, read_config
from torch_pi2.store.gguf import gguf_in
from torch_pi2.store.storefile import weights_path
from torch_pi2.types.method import Method
from torch_pi2.types.site import FFNSite

#: Quantised checkpoints that :func:`torch_pi2.import_quantized` takes.
_IMPORTED = ("gptq", "awq", "compressed-tensors", "torchao")
_OURS = "its weights are in torch_pi2's own form, which runs as it is; those of the float model can be"


@dataclass(frozen=True)
class SupportedLayer:
    """One feed-forward layer or expert that can be made sparse: the ``key`` of its site, its formula (``form``, such as
    ``silu(gate)*up``), H, I and number of weights. ``method``: used by :func:`torch_pi2.optimize` without predictors:
    ``exact``, or ``threshold``, which needs calibration data. ``lossless``: the method skips only zeros.
    """

    key: str
    form: str
    hidden: int
    neurons: int
    method: str
    lossless: bool
    parameters: int


@dataclass(frozen=True)
class Supported:
    """The result of :func:`supported`: the class of the ``model``, its number of ``parameters`` (tied ones count once),
    and ``layers`` in order of execution. ``left``: name -> reason of layers that look feed-forward and stay dense.
    ``refused``: why no layer can be made sparse, such as an unknown quantisation format, or empty.
    """

    model: str
    parameters: int
    layers: list[SupportedLayer]
    left: dict[str, str] = field(default_factory=dict)
    refused: str = ""

    @property
    def share(self) -> float:
        """Share of the model's parameters in ``layers``."""
        return sum(layer.parameters for layer in self.layers) / max(1, self.parameters)

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"share": self.share}


@checked
@quiet_imports()
def supported(
    model: nn.Module | str | Path,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Supported:
    """Formula, sizes and method of each feed-forward layer, or why it stays dense. ``model`` is not modified.

    Only :func:`torch_pi2.optimize`, with the weights, finds out whether a layer can be *replaced*.

    Args:
        model: a model with weights in memory or on ``meta``, or the folder of a Hugging Face checkpoint, of which only
            ``config.json`` is read.
        args, kwargs: of one call, for models whose inputs cannot be guessed (:func:`torch_pi2.find_sites`).

    Raises:
        ArtifactError: no model can be built from the folder. CalibrationError: inputs are missing or wrong.
        UnsupportedModelError: Dynamo cannot capture it. ConfigError: it is already sparse.
    """
    others = refused = ""
    if isinstance(model, nn.Module):
        quantised = any(isinstance(module, QuantLinear | QuantEmbedding) for module in model.modules())
        refused = _OURS if quantised and not has_sparse_layers(model) else ""
    else:
        if gguf_in(model) is not None:
            fix = "Import it: torch_pi2.import_gguf(file, folder), and ask of torch_pi2.load_dense(folder)."
            expected = "a model, or the folder of a Hugging Face checkpoint"
            Field(model, f"supported({model})", fix).wrong(expected, "a GGUF file")
        with torch.device("meta"):
            folder, model = Path(model), skeleton(model, trust_remote_code=trust_remote_code)
        others = quantised_by(read_config(folder)) if os.path.isdir(folder) else ""
        refused = "" if weights_path(folder / PI2_FOLDER) is None else _OURS
    if others and others not in _IMPORTED:
        refused = f"its weights are what {shown(others)} has quantised; the float checkpoint can be"
    if refused:
        return Supported(type(model).__name__, _parameters(model), [], {}, refused)
    on_meta = all(p.is_meta for p in model.parameters())
    found = search(model, args, kwargs, on_meta=on_meta, needed=False, warn=False)
    refused = "" if found.refused is None else found.refused.found
    if refused and found.left:  # where layers that stay dense are named, they are the reason
        refused = "each of its feed-forward layers stays dense"
    layers = [_layer(site) for site in found.sites]
    return Supported(type(model).__name__, _parameters(model), layers, found.left, refused)


def _parameters(model: Any) -> int:
    count = int(sum(parameter.numel() for parameter in model.parameters()))
    ends = [getattr(model, f"get_{which}_embeddings", nn.Module)() for which in ("output", "input")]
    if isinstance(ends[0], QuantLinear) and isinstance(ends[1], QuantEmbedding):
        rows = ends[0].in_row_order()
        count -= ends[1].weight.numel() * (rows.shape == ends[1].rows.shape and rows.equal(ends[1].rows))  # tied
    return count


def _layer(site: FFNSite) -> SupportedLayer:
    method = gate_method(site)
    numbers = site.rows_per_neuron * site.intermediate * site.hidden
    return SupportedLayer(site.key, site.form, site.hidden, site.intermediate, method, method == Method.EXACT, numbers)
