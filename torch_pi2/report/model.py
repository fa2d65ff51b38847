"""Whose report it is: name, sizes and bytes, from the headers of the folder's files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_pi2.base.tensorfile import Spec, TensorReader
from torch_pi2.ops.dtypes import dtype_name
from torch_pi2.report.facts import Model
from torch_pi2.store.folder import read_config
from torch_pi2.store.storefile import STORE_FILE, StoreReader
from torch_pi2.store.weights import WEIGHTS_FILE, QuantizedWeights
from torch_pi2.types.plan import Plan
from torch_pi2.types.stats import ActivationStats

#: Regions of a store by what the report calls them.
_REGIONS = {
    "bundles": "neurons",
    "linears": "attention, embeddings, head",
    "floats": "attention, embeddings, head",
    "predictors": "predictors",
    "plan": "plan and statistics",
    "stats": "plan and statistics",
}
_REST = "padding and checksums"


def describe(
    folder: Path, inner: Path, plan: Plan | None, stats: ActivationStats | None
) -> tuple[Model, dict[str, int]]:
    """The model in ``folder``, whose files of ours are in ``inner``; and the bytes of its neurons by site key."""
    stored = os.path.lexists(inner / STORE_FILE)
    weights, by_part, neurons = _store(inner / STORE_FILE) if stored else _saved(folder, inner, plan)
    shape, synthetic = _shape(folder / "config.json")
    model_hash = plan.model_hash if plan else stats.model_hash if stats else ""
    name = folder.resolve().name
    return Model(name, shape, synthetic, stored, weights, model_hash, by_part), neurons


def _store(path: Path) -> tuple[str, dict[str, int], dict[str, int]]:
    with StoreReader(path) as store:
        parts: dict[str, int] = {}
        for region, size in store.regions().items():
            part = _REGIONS.get(region, _REST)
            parts[part] = parts.get(part, 0) + size
        neurons = {key: y.neurons * y.neuron_bytes for key, y in zip(store.keys, store.entries, strict=True)}
        return store.neuron_formats, {name: parts[name] for name in (*dict.fromkeys(_REGIONS.values()), _REST)}, neurons


def _saved(folder: Path, inner: Path, plan: Plan | None) -> tuple[str, dict[str, int], dict[str, int]]:
    """Weights in ``pi2/weights.safetensors``, or as the checkpoint has them."""
    if os.path.lexists(inner / WEIGHTS_FILE):
        with QuantizedWeights(inner / WEIGHTS_FILE) as file:
            weights, specs = file.neuron_formats, file.specs
        neurons = {n.removesuffix(".bundles"): s.nbytes for n, s in specs.items() if n.endswith(".bundles")}
    else:
        specs = {}
        for path in sorted(folder.glob("*.safetensors")) if inner != folder else ():
            with TensorReader(path) as reader:
                specs |= reader.specs
        neurons, weights = _float_neurons(specs, plan)
    found = {"neurons": sum(neurons.values())}
    found["attention, embeddings, head"] = sum(spec.nbytes for spec in specs.values()) - found["neurons"]
    found["predictors"] = _sizes(inner.glob("predictors.safetensors"))
    found["plan and statistics"] = _sizes([*inner.glob("plan.*"), *inner.glob("stats.safetensors")])
    return weights, {part: size for part, size in found.items() if size}, neurons


def _float_neurons(specs: Mapping[str, Spec], plan: Plan | None) -> tuple[dict[str, int], str]:
    """Bytes of neurons by site, and their dtype; nothing where the weights are not there."""
    neurons: dict[str, int] = {}
    dtypes: set[str] = set()
    for layer in plan.layers if plan else ():
        spec = specs.get(layer.site.up.weight)
        if spec is not None:
            values = layer.site.rows_per_neuron * layer.site.intermediate * layer.site.hidden
            neurons[layer.site.key] = values * spec.dtype.itemsize
            dtypes.add(dtype_name(spec.dtype))
    return neurons, ", ".join(sorted(dtypes))


def _sizes(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


def _shape(path: Path) -> tuple[str, str | None]:
    """Class and sizes; and what the file says of random weights. Raises ArtifactError: damaged."""
    if not os.path.lexists(path):
        return "", None
    config = read_config(path.parent)
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else config.get("model_type", "")
    words = [str(name)]
    for field, unit in (
        ("num_hidden_layers", "layers"),
        ("hidden_size", "wide"),
        ("intermediate_size", "neurons each"),
        ("num_attention_heads", "heads"),
        ("vocab_size", "tokens in the vocabulary"),
    ):
        if isinstance(config.get(field), int):
            words.append(f"{config[field]:,} {unit}")
    return ", ".join(words), _synthetic(config.get("torch_pi2_synthetic"))


def _synthetic(label: Any) -> str | None:
    if not label:
        return None
    if not isinstance(label, dict):
        return "random weights"
    share, shape = label.get("active"), label.get("shape")
    of = f" of the shape {shape}" if isinstance(shape, str) else ""
    return f"random weights{of}" + (f", made so that {share:.0%} of neurons fire" if isinstance(share, float) else "")
