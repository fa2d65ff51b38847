"""``save`` and ``load``: an optimised model on disk is an ordinary dense checkpoint plus a ``pi2/`` folder.

``pi2/`` holds plan.json, plan.safetensors, predictors.safetensors and stats.safetensors. The rest is written by
``save_pretrained`` (``model.safetensors`` for other modules), so other tools can read it. Quantised weights are in
``pi2/weights.safetensors``, with only configuration and tokenizer outside. :func:`torch_pi2.pack` turns all of ``pi2/``
into one store, ``pi2/model.pi2``.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from torch_pi2.base.dtypes import stands_for_another
from torch_pi2.base.fields import checked, shown
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings, is_input_sparse
from torch_pi2.base.offloaded import OffloadedParameter
from torch_pi2.base.package import quiet_imports
from torch_pi2.base.tensorfile import adding_checks, verifying
from torch_pi2.checkpoint.gguf.importing import cached_import
from torch_pi2.checkpoint.offloaded import load_offloaded
from torch_pi2.checkpoint.sparse import LoadSettings, load_sparse, save_weights, save_without_weights, weights_of
from torch_pi2.decode.hf_generate import attach
from torch_pi2.decode.plan_controller import follow
from torch_pi2.distributed.join import own_shard
from torch_pi2.distributed.shard_store import refuse_shards
from torch_pi2.errors import ArtifactError, ConfigError, Pi2Error, StaleArtifactError, UnsupportedModelError
from torch_pi2.layers.experts import expert_groups
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes
from torch_pi2.predict.file import FittedPredictors, save_predictors
from torch_pi2.rewrite.gpu import checked_memory, hot_on_gpu
from torch_pi2.rewrite.install import NAME
from torch_pi2.rewrite.rewrite import apply
from torch_pi2.rewrite.skeleton import check_filled, fill, model_config, named_class, places, skeleton
from torch_pi2.rewrite.state import SparseState, get_state, store_of
from torch_pi2.store import folder as folders
from torch_pi2.store.gguf import gguf_in
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import weights_path
from torch_pi2.store.trust import how_to_trust, remember, trusted
from torch_pi2.types.method import LOSSY
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan, weights_hash
from torch_pi2.types.shard import GroupConfig

if TYPE_CHECKING:
    from torch_pi2.rewrite.state import LoadedModel

_WEIGHTS = "model.safetensors"


@checked
@fresh_settings()
def save(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write an optimised ``model`` to ``folder``. An earlier result there is replaced once everything is written.

    Raises:
        ConfigError: the model is dense or has PEFT adapters, or ``folder`` overlaps the folder that it was loaded from.
        ArtifactError: the folder cannot be written, or holds other files.
        UnsupportedModelError: a quantised model that could not be loaded again, or weights of another library.
    """
    stored = [home for home in homes(model) if not home.in_memory]
    if stored:
        what = f"saving a {type(model).__name__} over a neuron store"
        found = f"{len(stored)} layers whose weights are in a file already"
        fix = "Copy the store's folder, or load the whole model without a budget."
        raise ConfigError(what, expected="a model in memory", found=found, fix=fix)
    parts, folder = current_state(model), Path(folder).resolve()
    folders.check_replaceable(folder)
    source = getattr(model, "name_or_path", "")
    if Path(source).resolve() != folder:  # a result may replace its own source folder
        folders.check_separate("save", source, folder)
    if adapters := [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]:
        what, expected = f"saving a {type(model).__name__}", "a model that can be built from its configuration"
        found = f"adapters in it ({adapters[0] or 'the model itself'})"
        raise ConfigError(what, expected=expected, found=found, fix="model = model.merge_and_unload() first.")
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, OffloadedParameter) and (reason := stands_for_another(parameter)):
            what, expected = f"saving a {type(model).__name__}", "floats, and what torch_pi2 has quantised"
            fix = "Optimise the float model; torch_pi2.optimize(weights='int8') quantises its linear layers."
            raise UnsupportedModelError(what, expected=expected, found=f"{name}, {reason.partition(':')[0]}", fix=fix)
    quantised = weights_of(model) != "float" or is_input_sparse(model)
    with replacing_folder(folder) as staging:
        if quantised:
            save_weights(model, parts.plan, staging / folders.PI2_FOLDER)
            save_without_weights(model, staging)
        else:
            with adding_checks(staging):
                if hasattr(model, "save_pretrained"):
                    model.save_pretrained(staging, state_dict=_as_it_was_read(model))  # type: ignore[operator]
                else:
                    from safetensors.torch import save_model

                    save_model(model, str(staging / _WEIGHTS))
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        save_parts(parts, staging / folders.PI2_FOLDER)
        if quantised:
            folders.declare(staging)
    remember(folder)  # its code already runs in this process
    return folder


def _as_it_was_read(model: Any) -> dict[str, torch.Tensor] | None:
    """Weights of a model that divides some when it is first evaluated (RWKV-4), multiplied again; None: of another."""
    values: dict[str, torch.Tensor] | None = None
    for name, part in model.named_modules():
        if getattr(part, "layers_are_rescaled", False) and part.config.rescale_every:
            values = values or model.state_dict()
            for index in range(len(part.blocks)):
                for linear in ("attention.output", "feed_forward.value"):
                    key = f"{name}.blocks.{index}.{linear}.weight".removeprefix(".")
                    values[key] = values[key] * 2 ** (index // part.config.rescale_every)
    return values


def save_parts(parts: SparseState, pi2: Path) -> None:
    """Write plan, predictors and statistics as files into ``pi2``."""
    parts.plan.save(pi2)
    save_predictors(pi2, parts.predictors, parts.plan.model_hash)
    if parts.stats is not None:
        parts.stats.save(pi2)


def current_state(model: nn.Module) -> SparseState:
    """The state of ``model`` for its current weights, which may have been converted or replaced: a plan without
    predictors or thresholds gets the new hash and loses its statistics. Raises StaleArtifactError: others were fitted
    to other weights.
    """
    parts = get_state(model)
    modules = dict(getattr(model, "_orig_mod", model).named_modules(remove_duplicate=False))
    for site in (group[0].site for group in expert_groups(parts.plan.layers)):
        host = modules.get(site.down.weight.rpartition(".")[0])
        home = None if host is None else host._modules.get(NAME)
        if getattr(getattr(home, "site", None), "down", None) != site.down:
            what, expected = f"saving {type(model).__name__}", "the sparse layers of its plan, each in its place"
            other = f"another or none at {site.key}: layers were exchanged, taken out or replaced since"
            fix = "Put it back; or call torch_pi2.restore(model) and optimize it again."
            raise ConfigError(what, expected=expected, found=other, fix=fix)
    if weights_of(model) != "float":
        return parts  # quantised rows cannot change; the hash is that of the float weights
    values = {name: value for home in homes(model) for name, value in home.dense_values().items()}
    dense: Any = SimpleNamespace(get_parameter=values.__getitem__)
    found = weights_hash(dense, [layer.site for layer in parts.plan.layers])
    if found == parts.plan.model_hash:
        return parts
    fitted = sorted({layer.method for layer in parts.plan.layers} & {*LOSSY})
    if fitted:
        what, expected = f"plan with {' and '.join(fitted)} layers", "the FFN weights it was fitted to"
        expected, others = f"{expected} ({parts.plan.model_hash[:12]})", "the model was converted or loaded anew since"
        fix = "Call torch_pi2.restore(model) and optimize it again."
        raise StaleArtifactError(what, expected=expected, found=f"others ({found[:12]}): {others}", fix=fix)
    return SparseState(replace(parts.plan, model_hash=found), FittedPredictors(), None)


@checked
@fresh_settings()
@quiet_imports()
def load(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    activations: str | None = None,
    budget: float | str | None = None,
    offload: OffloadConfig | None = None,
    context: int | None = None,
    plan: Plan | str | Path | None = None,
    gpu_memory: float | str | None = None,
    group: GroupConfig | None = None,
    progress: bool = False,
) -> "LoadedModel":
    """Load the optimised model that :func:`save`, :func:`torch_pi2.quantize`, ``pack`` or ``synthetic`` wrote.

    It is in evaluation mode, and a transformers model unless another was passed as ``model``. Quantised weights are
    read once, into the memory that kernels use.

    Args:
        folder: a Hugging Face checkpoint with a ``pi2/`` folder; or a GGUF file, or a folder with one, which is first
            imported (with ``budget`` also packed) into the user's cache, once (docs/GGUF.md). Nothing is downloaded.
        model: an instance to load into, for models that transformers cannot build (float weights only).
        trust_remote_code: passed to transformers, for checkpoints with modelling code of their own. Not needed for a
            folder made on this machine from a model whose code ran then (:mod:`torch_pi2.store.trust`).
        dtype: of the weights (default: as stored). Another dtype than the plan's is a StaleArtifactError. For a
            quantised folder or a store: dtype of the float weights other than neurons, and of the hidden states.
        activations: with quantised weights, ``int8`` rounds the inputs of matrices to int8 (lossy, faster); ``float``
            does not. Default: as the model computed that was saved, and for imports of GGUF files as their own engine
            does, ``int8``; else ``float``.
        budget: bytes (or ``"2.5GiB"``) for weights, neuron cache, KV cache, and activations of a forward pass. Needs a
            store (:func:`torch_pi2.pack`); neurons that do not fit stay on flash. Lossless: the result does not depend
            on it. Activations are those of ``context`` tokens, at most 1,024: :class:`torch_pi2.Decoder` and
            :func:`torch_pi2.generate` prefill longer prompts in chunks, and other calls with more tokens cause a
            warning. Not included: Python and PyTorch themselves, returned tensors (logits of all tokens, without
            ``logits_to_keep=1``), and memory for compiling a step beyond what the neuron cache can free (a warning says
            how much). From then on the whole process returns freed memory to the system (glibc's ``mallopt``). None:
            everything is in memory.
        offload: how neurons are read and cached; with ``budget`` only. Default: the plan's settings, if it has a part
            for hardware.
        context: with ``budget`` only: tokens of all sequences together for which the budget includes KV cache and
            activations (default: 1,024). More of them in a :class:`torch_pi2.Decoder`, :func:`torch_pi2.generate` or
            ``model.generate`` cause a warning; caches that transformers makes itself (for beams) are not counted.
        plan: a plan, or its folder (``torch-pi2 plan FOLDER --hardware ... --out``), to use instead of the folder's,
            with the same weights, neuron orders and methods. A plan with a part for hardware, given here or the
            folder's, is followed as the number of sequences changes (:func:`torch_pi2.follow`).
        group: for shards (``pack(ranks=N)``), of which each process of a group loads its own: how they work together.
            Without ``budget`` all neurons of a shard are in memory.
        gpu_memory: as in :func:`torch_pi2.optimize`. With ``budget``, which limits the CPU's memory, neurons of the
            store are copied to the GPU and are not in the cache: those that the plan gives to an accelerator
            (``torch-pi2 plan FOLDER --hardware measured --accelerator-memory ...``), if there are any and they fit;
            otherwise the most frequent ones.

    Raises:
        ArtifactError: something is missing or damaged. StaleArtifactError: plan and weights do not match.
        ConfigError: a setting that this folder does not support. DtypeError: no kernel computes in ``dtype``.
        DeviceError: no GPU with kernels. OutOfMemoryError: ``gpu_memory`` is too little.
    """
    given = {name: value for name, value in locals().items() if name not in ("folder", "gpu_memory")}
    gpu_bytes = None if gpu_memory is None else checked_memory(gpu_memory)
    settings = LoadSettings(**given)
    folder = Path(folder)
    if (file := gguf_in(folder)) is not None:
        folder = cached_import(file, packed=budget is not None, progress=progress)
    folder = own_shard(folder)
    _check_ours(folder)
    return finish_loading(read_model(folder, settings), gpu_bytes)


def _check_ours(folder: Path) -> None:
    """Raises ArtifactError: a file, or a checkpoint that torch_pi2 did not write."""
    folders.check_folder(folder)
    expected = f"a folder that torch_pi2 wrote, with {folders.PI2_FOLDER}/ in it"
    if not folder.is_dir():
        raise ArtifactError(str(folder), expected=expected, found="nothing", fix="Check the folder's name.")
    if (folder / folders.PI2_FOLDER).exists() or not (folder / "config.json").is_file():
        return
    by = folders.quantised_by(folders.read_config(folder))
    found = f"a checkpoint that {shown(by)} has quantised" if by else "a checkpoint without one"
    fix = "Make one: torch_pi2.quantize(folder, other), or load it with transformers and torch_pi2.optimize it."
    fix = "Import it: torch_pi2.import_quantized(folder, other)." if by else fix
    raise ArtifactError(str(folder), expected=expected, found=found, fix=fix)


def read_model(folder: Path, settings: LoadSettings) -> nn.Module:
    """:func:`load` up to :func:`finish_loading`."""
    pi2 = folder / folders.PI2_FOLDER
    with Parts(pi2) as parts:
        settings.check(folder, is_shard=parts.shard is not None)
        over_store = settings.budget is not None or parts.shard is not None
        plan = checked_plan(own := parts.plan(), settings.plan, folder)
        settings = replace(settings, activations=settings.activations or own.activations)
        if settings.activations != plan.activations:  # for another folder that save() writes
            plan = replace(plan, made_by=plan.made_by | {"activations": settings.activations})
        predictors = parts.predictors(plan.model_hash)
        stats = None if over_store else parts.stats(plan.model_hash)  # they are not part of a budget
    if weights_path(pi2) is not None:
        folders.read_config(folder)  # raises if there is none
        if over_store:
            return load_offloaded(folder, plan, predictors, settings)
        quantized = load_sparse(folder, plan, predictors, settings)
        SparseState(plan, predictors, stats, weights=weights_of(quantized)).attach(quantized)
        return quantized
    model = settings.model
    if model is None:
        model = _from_pretrained(folder, settings)
    else:
        _load_weights(model, folder / _WEIGHTS)
        if settings.dtype is not None:
            model = model.to(settings.dtype)
    # what RWKV-4 does with weights that were just read when it is first evaluated
    modules: Any = model.eval().modules()
    for part in modules:
        if hasattr(part, "layers_are_rescaled"):
            part.layers_are_rescaled = False
            part._rescale_layers()
    return apply(model, SparseState(plan, predictors, stats), settings.progress)


def finish_loading(model: nn.Module, gpu_bytes: int | None) -> "LoadedModel":
    """Let ``model`` generate with our steps, and follow its plan if that has a part for hardware."""
    attach(model)
    if gpu_bytes is not None:
        hot_on_gpu(model, gpu_bytes)
    store, plan = store_of(model), get_state(model).plan
    if store is not None and store.config.preload:  # after neurons were placed on a GPU
        store.preload()
    if plan.hardware is not None:
        follow(model, plan)
    return cast("LoadedModel", model)


def checked_plan(own: Plan, other: Plan | str | Path | None, folder: Path) -> Plan:
    """``other``, if given, instead of the folder's ``own`` plan. Raises StaleArtifactError: it is for another one."""
    if other is None:
        return own
    made = other if isinstance(other, Plan) else Plan.load(other)
    fixed: tuple[tuple[str, Callable[[Plan], Any]], ...] = (  # the numbers of hot neurons may change
        ("weights", lambda plan: plan.model_hash),
        ("layers", lambda plan: [layer.site for layer in plan.layers]),
        ("neuron orders", lambda plan: plan.orders_hash),
        ("methods and thresholds", lambda plan: [(layer.method, layer.threshold) for layer in plan.layers]),
    )
    if different := [what for what, of in fixed if of(own) != of(made)]:
        fix = "Plan this folder itself: torch-pi2 plan FOLDER --hardware measured --out DIR."
        expected = f"{different[0]} as in its own plan"
        raise StaleArtifactError(f"plan for {folder}", expected=expected, found="others", fix=fix)
    return made


@checked
@fresh_settings()
@quiet_imports()
def load_dense(folder: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The ordinary model of one of our folders, in evaluation mode; of a quantised one with its dequantised weights
    (exact in float32, rounded in bfloat16).

    Args:
        dtype: of all weights (default: as the configuration says).

    Raises:
        ArtifactError: something is missing or damaged. StaleArtifactError: plan and weights do not match. ConfigError:
            a shard, which has only some of the neurons.
    """
    folder = Path(folder)
    pi2 = folder / folders.PI2_FOLDER
    if weights_path(pi2) is None:
        return _from_pretrained(folder, LoadSettings(dtype=dtype, trust_remote_code=trust_remote_code)).eval()
    folders.read_config(folder)  # raises if there is none
    with Parts(pi2) as parts:
        refuse_shards(folder, parts.shard)
        plan = parts.plan()
        predictors = parts.predictors(plan.model_hash)
    sparse: Any = load_sparse(folder, plan, predictors, LoadSettings(dtype=dtype, trust_remote_code=trust_remote_code))
    kind = next(sparse.parameters()).dtype
    values = sparse.state_dict()
    model: Any = skeleton(folder, dtype=kind, config=sparse.config, trust_remote_code=trust_remote_code)
    if isinstance(sparse.get_output_embeddings(), QuantLinear):  # which is tied to no embedding
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)

    def read(name: str, like: torch.Tensor) -> torch.Tensor | None:
        value: torch.Tensor | None = values.get(name)
        return value if value is None else value.to(like.dtype)

    fill(model, places(model), read, pi2)
    check_filled(model, pi2)
    return model


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if not path.is_file():
        raise ArtifactError(str(path), expected="the model's weights", found="nothing", fix="Check the folder's name.")
    try:
        with verifying(path.parent):
            load_model(model, str(path))
    except (SafetensorError, RuntimeError) as error:
        fix = "Pass the model that was saved, built with the same sizes."
        expected = f"the weights of this {type(model).__name__}"
        raise ArtifactError(str(path), expected=expected, found=str(error).splitlines()[0], fix=fix) from error


def pretrained(kind: Any, folder: str | Path, **how: Any) -> nn.Module:
    """``kind.from_pretrained``. Raises ArtifactError: damage, or no tensor for a parameter (then random values)."""
    with verifying(Path(folder)):
        model, loading = kind.from_pretrained(folder, **how, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        expected = f"tensors of every parameter of {type(model).__name__}"
        found = f"no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        fix = "Save the model again, or load it with its own class and pass it as model=..."
        raise ArtifactError(f"loading {folder}", expected=expected, found=found, fix=fix)
    if not type(model).__module__.startswith("transformers.models."):
        # buffers that no checkpoint has: transformers 5 computes those of its own classes only
        built = skeleton(folder, config=model.config, trust_remote_code=how["trust_remote_code"])
        values = dict(built.named_buffers())
        for name in values.keys() - built.state_dict().keys():
            model.get_buffer(name).copy_(values[name])
    return model


def _from_pretrained(folder: Path, settings: LoadSettings) -> nn.Module:
    folders.read_config(folder)  # with clearer errors than transformers'
    trust = settings.trust_remote_code
    config = settings.config or model_config(folder, trust_remote_code=trust)
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    try:
        kind = named_class(config) or AutoModelForCausalLM
        how: Any = {"trust_remote_code": trusted(folder, trust), "dtype": settings.dtype or "auto"}
        return pretrained(kind, folder, config=config, local_files_only=True, **how)
    except (MemoryError, Pi2Error):
        raise
    except Exception as error:  # model classes raise anything
        of_file = isinstance(error, (OSError, SafetensorError)) and "trust_remote_code" not in str(error)
        copy = "Copy its weights (*.safetensors) again from where they were made."
        what, found = f"loading {folder}", f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}"
        fix = f"{copy if of_file else how_to_trust(folder)} Or pass model=... to load into."
        raise ArtifactError(what, expected="a model that transformers can build", found=found, fix=fix) from error
