"""Quantised models in memory and on disk, with rows and neurons in the layout of the kernels; settings for loading."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import DTYPES, check_computed, dtype_name, format_name
from torch_pi2.base.fields import Field, argument
from torch_pi2.base.memory import trim
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.progress import bar
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.base.units import parse_bytes
from torch_pi2.distributed.pipeline_parallel import remove_other_blocks
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError
from torch_pi2.formats import ACTIVATIONS, FLOAT, QUANTIZED, formats_of, main_format
from torch_pi2.layers.experts import SparseExperts, expert_groups
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.inputs import InputSparseLinear
from torch_pi2.layers.linear import QuantEmbedding, QuantLinear, can_stand_for
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.ops import load as load_library
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.predict.method import InputMethod
from torch_pi2.rewrite.linears import untie
from torch_pi2.rewrite.place import check_sizes, place, strategies_used
from torch_pi2.rewrite.rewrite import predictor_tensors
from torch_pi2.rewrite.skeleton import check_filled, fill, places, put, skeleton
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE, open_weights, weights_path
from torch_pi2.store.weights import WEIGHTS_FILE, QuantizedWeights, metadata, neuron_specs
from torch_pi2.types.method import prepare
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.shard import GroupConfig

_BIASES = ("bias_gate", "bias_up", "bias_down")

#: Default ``context`` of a budget, in tokens.
DEFAULT_CONTEXT = 1024
#: Plan of a layer, the open file, dtype of the float parameters -> the layer.
MakeLayer = Callable[[LayerPlan, QuantizedWeights, torch.dtype], SparseFFN]
#: The layers of all experts of a module, their plans -> the module.
MakeExperts = Callable[[Iterable[SparseFFN], Sequence[LayerPlan]], SparseExperts]


@dataclass(frozen=True)
class LoadSettings:
    """Arguments of :func:`torch_pi2.load`, and ``config``, a transformers configuration in place of the folder's."""

    model: nn.Module | None = None
    trust_remote_code: bool = False
    dtype: torch.dtype | None = None
    activations: str | None = None
    budget: float | str | None = None
    offload: OffloadConfig | None = None
    context: int | None = None
    plan: Plan | str | Path | None = None
    group: GroupConfig | None = None
    progress: bool = False
    config: Any = None

    def __post_init__(self) -> None:
        if self.context is not None:
            argument(self.context, "load(context=...)").whole(1, 1 << 31)
        if self.dtype is not None:
            check_computed("load(dtype=...)", self.dtype)

    @property
    def budget_bytes(self) -> int | None:
        """The budget, or None. Raises ConfigError: not a number of bytes."""
        return None if self.budget is None else parse_bytes(self.budget)

    @property
    def int8_activations(self) -> bool:
        return self.activations == "int8"

    def check(self, folder: Path, *, is_shard: bool) -> None:
        """Raises ConfigError: a setting that contradicts another, or the content of ``folder``."""
        path = weights_path(folder / PI2_FOLDER)
        in_floats, has_store = path is None, path is not None and path.name == STORE_FILE
        of_budget = {"offload": self.offload, "context": self.context}
        given = ", ".join(f"{name}=..." for name, value in of_budget.items() if value is not None)

        def check(good: bool, setting: str, expected: str, found: str, fix: str) -> None:
            if not good:
                raise ConfigError(f"load({folder}, {setting})", expected=expected, found=found, fix=fix)

        fix = "Pass budget=..., for instance '2.5GiB'."
        good = not given or self.budget is not None or is_shard
        check(good, given, "a budget with it", "none: all weights would be in memory", fix)
        fix = "Make shards (torch-pi2 pack --ranks N), or leave --reduction and --timeout out."
        good = self.group is None or is_shard
        check(good, "group=...", "a shard", "a whole model, which each process computes alone", fix)
        fix = "Make one with torch_pi2.pack(folder, out), which changes no number."
        found = "float weights" if in_floats else "weights that are read whole"
        good = self.budget is None or has_store
        check(good, "budget=...", f"a folder with a neuron store (pi2/{STORE_FILE})", found, fix)
        fix, found = "Leave model out, or use load_dense for the float weights.", f"a {type(self.model).__name__}"
        expected = "no model: a quantised one is built from its configuration"
        check(self.model is None or in_floats, "model=...", expected, found, fix)
        fix = "Correct it, or quantise the folder first (torch_pi2.quantize)."
        expected = "float, as the weights are float" if in_floats else " or ".join(ACTIVATIONS)
        good = self.activations in (None, "float", *(() if in_floats else ACTIVATIONS))
        check(good, "activations=...", expected, repr(self.activations), fix)


def weights_of(model: nn.Module) -> str:
    """How the weights of an optimised model are stored: ``float``, ``int4``, ``int8``, or a format of GGUF."""
    neurons = (getattr(layer, "weights", "float") for layer in sparse_layers(model))
    linears = (module.weights for module in model.modules() if isinstance(module, QuantLinear | InputSparseLinear))
    return next((kind for kind in (*neurons, *linears) if kind != "float"), "float")


def save_weights(model: nn.Module, plan: Plan, folder: Path) -> None:
    """Write ``weights.safetensors`` of ``model`` into ``folder``; the neurons of a float model are floats. Raises
    UnsupportedModelError: not a Hugging Face model.
    """
    if not hasattr(model, "save_pretrained"):
        what = f"saving a quantised {type(model).__name__}"
        expected = "a Hugging Face model, which can be built from its configuration"
        fix = "Save the float model, and quantise it again after loading."
        raise UnsupportedModelError(what, expected=expected, found="another module", fix=fix)
    layers, found = sparse_layers(model), weights_of(model)
    kind = found if found in QUANTIZED else QUANTIZED[0]
    if layers:  # the format of neurons, or of their down rows
        down = formats_of(format_name(getattr(layers[0], "weights", "float"), layers[0].neuron_rows.dtype))[1]
        kind = main_format(down)
    linears = {name: m for name, m in model.named_modules() if isinstance(m, QuantLinear)}
    embeddings = {name: m for name, m in model.named_modules() if isinstance(m, QuantEmbedding)}
    channels = {name: m for name, m in model.named_modules() if isinstance(m, InputSparseLinear)}
    if channels and found == FLOAT:
        kind = dtype_name(next(iter(channels.values())).rows.dtype)
    rows_of: dict[str, QuantLinear | SparseFFN] = {f"{name}.weight": linear for name, linear in linears.items()}
    tensors: dict[str, torch.Tensor] = {f"{name}.weight": linear.rows for name, linear in linears.items()}
    tensors |= {f"{name}.weight": embedding.rows for name, embedding in embeddings.items()}
    tensors |= {f"{name}.channels": linear.rows for name, linear in channels.items()}
    biases_of = {name: linear.bias for name, linear in (linears | channels).items()}
    tensors |= {f"{name}.bias": bias for name, bias in biases_of.items() if bias is not None}
    taken = strategies_used(model)
    strategies = {layer.site.key: taken.get(layer.site.experts or layer.site.key, "lazy") for layer in layers}
    for layer in layers:
        tensors[f"{layer.site.key}.bundles"] = layer.neuron_rows.view(torch.uint8)
        rows_of[f"{layer.site.key}.bundles"] = layer
        biases = {name: getattr(layer, name) for name in _BIASES}
        tensors |= {f"{layer.site.key}.{name}": bias for name, bias in biases.items() if bias is not None}
    tensors |= _floats(model)
    columns = {name: m.in_features for name, m in linears.items()}
    formats = {name: m.weights for name, m in (linears | embeddings).items() if m.weights != kind}
    formats |= {layer.site.key: layer.weights for layer in layers if layer.weights not in (FLOAT, kind)}
    widths = {name: m.embedding_dim for name, m in embeddings.items()}
    outputs = {name: linear.out_features for name, linear in channels.items()}
    more: Any = {"formats": formats, "embeddings": widths, "channels": outputs}
    about = metadata(kind, plan.model_hash, columns, strategies, **more)
    specs = {name: Spec.of(tensor) for name, tensor in tensors.items()}
    with TensorWriter(folder / WEIGHTS_FILE, specs, about) as out:
        for name, tensor in tensors.items():
            out.write(name, rows_of[name].in_row_order().view(torch.uint8) if name in rows_of else tensor)


def save_without_weights(model: Any, folder: Path) -> None:
    """Write configuration and modelling code of ``model``; dense weights in ``folder`` are removed."""
    model.save_pretrained(folder, state_dict={})  # writes a file without weights
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


def _floats(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers of modules that were not replaced; tied ones under their first name."""
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen or name in module._non_persistent_buffers_set:
                continue
            if isinstance(tensor, OffloadedParameter):
                continue
            seen.add(id(tensor))
            found[f"{prefix}.{name}" if prefix else name] = tensor.detach()
    return found


def load_sparse(
    folder: Path,
    plan: Plan,
    predictors: Mapping[str, Any],
    settings: LoadSettings,
    *,
    make_layer: MakeLayer | None = None,
    make_experts: MakeExperts | None = None,
) -> nn.Module:
    """The model of ``folder``, quantised or in a store, with all its weights; see :func:`torch_pi2.load`.

    ``make_layer`` and ``make_experts`` are for layers whose neurons stay in the file (default: they are read); experts
    are passed without their neurons.
    """
    load_library()
    int8_activations, progress = settings.int8_activations, settings.progress
    with open_weights(folder / PI2_FOLDER) as weights:
        weights.check_activations(int8_activations)
        weights.check_plan(plan)
        how: Any = {name: getattr(settings, name) for name in ("dtype", "trust_remote_code", "config")}
        model = skeleton(folder, stored=weights.float_dtype, **how)
        here = getattr(weights, "shard", None)
        own = plan if here is None else here.plan(plan)
        if here is not None and here.by_layers:
            remove_other_blocks(model, here)
        check_sizes(model, Plan([y for y in plan.layers if here is None or here.has(y.site.key)], plan.model_hash))
        if weights.channels:
            _prepare(model, plan)
        weights.check_linears(model)
        hf: Any = model.config
        if getattr(hf, "rescale_every", 0):
            hf.rescale_every = 0  # RWKV-4 would divide weights in place
        kind = next(model.parameters()).dtype
        check_computed(f"dtype of {folder}", kind)
        groups = places(model)
        ours = {name for layer in plan.layers for name in layer.site.parameter_names}
        embeddings: dict[str, torch.Tensor] = {}
        if on_disk := weights.path.name == WEIGHTS_FILE:
            weights.memory.use_huge_pages()
        for name, width in weights.embeddings.items():
            ours.add(f"{name}.weight")
            # rows stay in the file, of which a prompt reads few, unless a layer computes with them or a budget counts
            embedding: Any = model.get_submodule(name)
            if not can_stand_for(embedding):
                what, found = f"{name} in {weights.path}", f"a {type(embedding).__name__} in the model"
                fix = "The file is of another model; make the folder again."
                raise ArtifactError(what, expected="an nn.Embedding, or one with a scale", found=found, fix=fix)
            scale = getattr(embedding, "embed_scale", None)
            stored_as, outputs = weights.format_of(name), {weights.rows_name(linear) for linear in weights.linears}
            in_blocks = wants_blocks(stored_as, embedding.num_embeddings, width, int8_activations)
            computed = f"{name}.weight" in outputs and not in_blocks
            rows = (weights.mapped if on_disk and not computed else weights.read)(f"{name}.weight")
            embedded = QuantEmbedding(rows, width, stored_as, embedding.padding_idx, scale)
            embedded.dtype = embedding.weight.dtype
            model.set_submodule(name, embedded.eval())
            embeddings[f"{name}.weight"] = embedded.rows
        for name, columns in bar(list(weights.linears.items()), "load linear layers", progress, delay=2):
            ours |= {f"{name}.weight", f"{name}.bias"}
            linear: Any = model.get_submodule(name)
            stored_as = weights.format_of(name)
            in_blocks = wants_blocks(stored_as, linear.out_features, columns, int8_activations)
            found_in_blocks = name in weights.in_blocks and (in_blocks or f"{name}.weight" in weights.specs)
            of_rows = weights.blocks_name(name) if found_in_blocks else weights.rows_name(name)
            if of_rows in embeddings and not in_blocks:  # shared
                rows = embeddings[of_rows]
            elif on_disk and in_blocks == found_in_blocks:
                rows = weights.mapped(of_rows, whole=True)
            else:
                rows = weights.read(of_rows)
            made = QuantLinear(rows, _bias(linear, name, weights), columns, stored_as, int8_activations)
            made.dtype, made.blocks = linear.weight.dtype, found_in_blocks
            if in_blocks:
                made.use_blocks()
            elif made.blocks:
                made.leave_blocks()
            model.set_submodule(name, made.eval())
        for name, width in weights.channels.items():
            ours |= {f"{name}.weight", f"{name}.bias"}
            rows, method, linear = weights.read(f"{name}.channels"), predictors.get(name), model.get_submodule(name)
            if not isinstance(method, InputMethod):
                what, expected = f"predictors of {folder}", f"the InputMethod of {name}"
                raise ArtifactError(what, expected=expected, found="none", fix="Make the folder again.")
            rows = rows if weights.weights != FLOAT else rows.to(kind)
            bias = _bias(linear, name, weights)
            sparse = InputSparseLinear(rows, bias, width, method, weights.weights, name)
            model.set_submodule(name, sparse.eval())
        trim()  # rows that were copied into blocks

        whole = {layer.site.key: layer for layer in plan.layers}

        def empty(layer: LayerPlan) -> SparseFFN:
            tensors, threshold = predictor_tensors(predictors.get(layer.site.key))
            operand: Any = (layer.site, layer, weights.operand_of(layer.site.key), tensors, threshold)
            dtype = DTYPES.get(weights.kind, kind)
            return SparseFFN.empty(*operand, int8_activations=int8_activations, dtype=dtype)

        for group in bar(list(expert_groups(own.layers)), "load feed-forward layers", progress, delay=2):
            if group[0].site.experts is not None:
                for layer in group:
                    weights.strategy(layer.site.key)  # raises if the file has no such layer
                parts = (_with_biases(empty(layer), weights) for layer in group)
                experts = SparseExperts(parts, len(group)) if make_experts is None else make_experts(parts, group)
                if experts.in_memory:
                    read_rows = (weights.as_computed(weights.read_neurons(site)) for site in experts.sites)
                    put(experts, ["neuron_rows"], experts.stacked(read_rows))
                place(model, [whole[layer.site.key] for layer in group], experts.eval())
                continue
            layer = group[0]
            ffn = _with_biases(empty(layer) if make_layer is None else make_layer(layer, weights, kind), weights)
            if ffn.in_memory:
                put(ffn, ["neuron_rows"], ffn.arranged(weights.as_computed(weights.read_neurons(ffn.site))))
            place(model, group, ffn, weights.strategy(layer.site.key))
            ffn.eval()

        def read(name: str, like: torch.Tensor) -> torch.Tensor | None:
            return weights.read_like(name, like, kind)

        fill(model, ([name for name in names if name not in ours] for names in groups), read, weights.path)
    check_filled(model, weights.path)
    if getattr(hf, "tie_word_embeddings", False):
        head = model.get_output_embeddings()  # type: ignore[operator]
        if any(model.get_submodule(name) is head for name in weights.linears):  # it has its own weights
            untie(hf)
    trim()
    return model


def _bias(linear: Any, name: str, weights: QuantizedWeights) -> torch.Tensor | None:
    if linear.bias is None:
        return None
    weights.spec(f"{name}.bias")  # raises if there is none
    return weights.read_like(f"{name}.bias", linear.bias, torch.float32)


def _prepare(model: nn.Module, plan: Plan) -> None:
    """Exchange the modules of ``model``, which has no weights yet, as the methods of its plan did (``prepare``)."""
    custom = Field(plan.made_by, "plan.json, made_by", "Make the folder again.").at("config").at("custom", {})
    for entry in custom.each().values():
        method = InputMethod.read({}, Field({**entry.value, "tensors": []}, entry.path, entry.fix), 0.0, None)
        prepare(method, model)


def _with_biases(ffn: SparseFFN, weights: QuantizedWeights) -> SparseFFN:
    for name, spec in neuron_specs(ffn.site, weights.format_of(ffn.site.key)).items():
        if name != f"{ffn.site.key}.bundles":
            put(ffn, [name.rpartition(".")[2]], weights.take(name, spec))
    return ffn
