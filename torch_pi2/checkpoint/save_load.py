"""``save`` and ``load``: an optimised model on disk is an ordinary dense checkpoint plus a ``pi2/`` folder.

``pi2/`` holds plan.json, plan.safetensors, predictors.safetensors and stats.safetensors. The rest is what
``save_pretrained`` writes (or ``model.safetensors`` for other modules), so every other tool still reads it. A model
with quantised weights has them in ``pi2/weights.safetensors``, and only its configuration and tokenizer outside;
:func:`torch_pi2.pack` makes a store ``pi2/model.pi2`` of all that is in ``pi2/``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from torch_pi2.base.absent import AbsentParameter
from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.extras import how_to_install
from torch_pi2.base.fields import argument, shown
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.units import parse_bytes
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.checkpoint.dense import load_dense as quantized_as_dense
from torch_pi2.checkpoint.gguf.kept import kept_import
from torch_pi2.checkpoint.offloaded import load_offloaded
from torch_pi2.checkpoint.shards import own_shard
from torch_pi2.checkpoint.sparse import load_sparse, save_weights, weights_of
from torch_pi2.decode.adapt import follow
from torch_pi2.decode.loop import attach
from torch_pi2.errors import ArtifactError, ConfigError, StaleArtifactError, UnsupportedModelError, check_choice
from torch_pi2.formats import ACTIVATIONS
from torch_pi2.layers.of_model import homes
from torch_pi2.ops.dtypes import check_computed, stands_for_another
from torch_pi2.predict.file import FittedPredictors, save_predictors
from torch_pi2.rewrite.apply import apply
from torch_pi2.rewrite.gpu import checked_memory, hot_on_gpu
from torch_pi2.rewrite.handle import Optimized, parts_of, store_of
from torch_pi2.rewrite.skeleton import model_config, named_class
from torch_pi2.store.folder import (
    PI2_FOLDER,
    check_folder,
    check_replaceable,
    check_separate,
    declare,
    quantised_by,
    read_config,
)
from torch_pi2.store.gguf_parts import gguf_in
from torch_pi2.store.parts import Parts
from torch_pi2.store.storefile import weights_path
from torch_pi2.store.trust import how_to_trust, remember, trusted
from torch_pi2.types.method import LOSSY
from torch_pi2.types.offload import OffloadConfig
from torch_pi2.types.plan import Plan, weights_hash
from torch_pi2.types.shard import GroupConfig

if TYPE_CHECKING:
    from torch_pi2.rewrite.handle import LoadedModel

_WEIGHTS = "model.safetensors"
#: Tokens that a budget has room for, where nobody says how many.
_CONTEXT = 1024


@checked
@fresh_settings()
def save(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> Path:
    """Write an optimised ``model`` to ``folder``; an earlier result there is replaced only when all is written.

    Raises:
        ConfigError: the model is dense, has PEFT's adapters in it, or ``folder`` is in or contains the one that it was
            loaded from.
        ArtifactError: the folder cannot be written, or holds other files.
        UnsupportedModelError: a quantised model that could not be loaded again, or weights of another library's.
    """
    stored = [home for home in homes(model) if not home.in_memory]
    if stored:
        raise ConfigError(
            f"saving a {type(model).__name__} over a neuron store",
            expected="a model in memory",
            found=f"{len(stored)} layers whose weights are in a file already",
            fix="Copy the store's folder, or load the whole model without a budget.",
        )
    parts, folder = parts_of_these_weights(model), Path(folder).resolve()
    check_replaceable(folder)
    source = getattr(model, "name_or_path", "")
    if Path(source).resolve() != folder:  # an earlier result may be replaced by what was made of it
        check_separate("save", source, folder)
    if adapters := [name for name, module in model.named_modules() if type(module).__module__.startswith("peft.")]:
        raise ConfigError(
            f"saving a {type(model).__name__}",
            expected="a model that can be built from its configuration",
            found=f"adapters in it ({adapters[0] or 'the model itself'})",
            fix="model = model.merge_and_unload() first.",
        )
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, AbsentParameter) and (reason := stands_for_another(parameter)):
            raise UnsupportedModelError(
                f"saving a {type(model).__name__}",
                expected="floats, and what torch_pi2 has quantised",
                found=f"{name}, {reason.partition(':')[0]}",
                fix="Optimise the float model; torch_pi2.optimize(weights='int8') quantises its linear layers.",
            )
    quantised = weights_of(model) != "float"
    with replacing_folder(folder) as staging:
        keep_card(folder, staging)
        if quantised:
            parts = replace(parts, plan=save_weights(model, parts.plan, staging / PI2_FOLDER))
            save_outside(model, staging)
        elif hasattr(model, "save_pretrained"):
            model.save_pretrained(staging)  # type: ignore[operator]
        else:
            from safetensors.torch import save_model

            save_model(model, str(staging / _WEIGHTS))
        if tokenizer is not None:
            tokenizer.save_pretrained(staging)
        save_parts(parts, staging / PI2_FOLDER)
        if quantised:
            declare(staging)
    remember(folder)  # copies of what runs in this process
    return folder


def save_parts(parts: Optimized, pi2: Path) -> None:
    """Plan, predictors and statistics, as files in ``pi2``."""
    parts.plan.save(pi2)
    save_predictors(pi2, parts.predictors, parts.plan.model_hash)
    if parts.stats is not None:
        parts.stats.save(pi2)


def save_outside(model: Any, folder: Path) -> None:
    """Configuration and modelling code of ``model``, without weights; earlier dense ones there are removed."""
    model.save_pretrained(folder, state_dict={})  # writes a file of no weights
    for path in folder.glob("model*.safetensors*"):
        path.unlink()


class _Values:
    """The dense parameters of an optimised model, in the one respect in which a site asks a model for them."""

    def __init__(self, model: nn.Module) -> None:
        self._values: dict[str, torch.Tensor] = {}
        for home in homes(model):
            self._values |= home.dense_values()

    def get_parameter(self, name: str) -> torch.Tensor:
        return self._values[name]


def parts_of_these_weights(model: nn.Module) -> Optimized:
    """The parts of ``model``, whose weights may have been converted or loaded anew since they were made.

    A plan without predictors or thresholds is right for any weights and is bound to the new ones; statistics are left
    out then.

    Raises:
        StaleArtifactError: predictors or thresholds were fitted to other weights.
    """
    parts = parts_of(model)
    if weights_of(model) != "float":
        return parts  # rows cannot be changed any more; the hash stays that of the float weights
    found = weights_hash(_Values(model), [layer.site for layer in parts.plan.layers])
    if found == parts.plan.model_hash:
        return parts
    fitted = sorted({layer.method for layer in parts.plan.layers} & {*LOSSY})
    if fitted:
        raise StaleArtifactError(
            f"plan with {' and '.join(fitted)} layers",
            expected=f"the FFN weights it was fitted to ({parts.plan.model_hash[:12]})",
            found=f"others ({found[:12]}): the model was converted or loaded anew since",
            fix="Call torch_pi2.restore(model) and optimize it again.",
        )
    return Optimized(replace(parts.plan, model_hash=found), FittedPredictors(), None)


@checked
@fresh_settings()
def load(
    folder: str | Path,
    *,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    activations: str = "float",
    budget: float | str | None = None,
    offload: OffloadConfig | None = None,
    context: int | None = None,
    strict_budget: bool = False,
    plan: Plan | str | Path | None = None,
    gpu_memory: float | str | None = None,
    group: GroupConfig | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Read what :func:`save`, :func:`torch_pi2.quantize`, ``pack`` or ``synthetic`` wrote: the optimised model.

    It is in evaluation mode, and a transformers model unless another was passed as ``model``. Quantised weights are
    read once, into the memory that they are computed from.

    Args:
        folder: a Hugging Face checkpoint with a ``pi2/`` folder in it; or a GGUF file, or a folder
            with one, which is imported (with ``budget`` also packed) into the folder of caches first, once
            (docs/GGUF.md). Nothing is downloaded.
        model: an instance to load into, for models that transformers cannot build (float weights only).
        trust_remote_code: passed to transformers, for checkpoints with modelling code of their own. Folders that were
            made on this machine of a model whose code ran then need it no more (:mod:`torch_pi2.store.trust`).
        dtype: of the weights (default: as stored). Another dtype than the plan's is a StaleArtifactError. Of a
            quantised folder or a store: that of what is float in it but neurons, and of the hidden states.
        activations: with quantised weights ``int8`` rounds the inputs of matrices to int8 (lossy, faster).
        budget: bytes (or ``"2.5GiB"``) for weights, cache, keys and values, and the activations of a forward pass, for
            a folder with a store (:func:`torch_pi2.pack`); neurons that do not fit stay on flash. Lossless: the bits do
            not depend on it. Activations are of ``context`` tokens, 1,024 at most: :class:`torch_pi2.Decoder` and
            :func:`torch_pi2.generate` read longer prompts in pieces, and other calls for more tokens are a warning.
            Not in it: Python and PyTorch themselves, what a call returns (logits of all tokens, without
            ``logits_to_keep=1``), and what of compiling a step the neuron cache cannot make room for (a warning says
            how much). What is freed goes back to the system from then on, for all of the process (glibc's
            ``mallopt``). None: all in memory.
        offload: how neurons are read and kept; with ``budget`` only. Default: as the plan says, if it has a part for
            hardware.
        context: with ``budget`` only, tokens of all sequences together whose keys and values, and activations, it is to
            have room for (default: 1,024). More in a :class:`torch_pi2.Decoder`, and so in :func:`torch_pi2.generate`
            and ``model.generate``, is a warning; what transformers keeps by itself (of beams; caches of one's own)
            nobody counts.
        strict_budget: refuse a budget whose cache holds less than one token wants, instead of a warning: nearly
            everything would come from flash each time. Both name the budget from which on it would not.
        plan: another than the folder's, or the folder that it is in (``torch-pi2 plan FOLDER --hardware ... --out``):
            of the same weights, neuron orders and methods. A plan with a part for hardware, this one or the folder's,
            is followed as the number of sequences changes (:func:`torch_pi2.follow`).
        group: of shards alone (``pack(ranks=N)``), of which each process of a group loads its own: how they work
            together.
            Their ``budget`` may be None: what it takes to have all neurons of the shard in memory.
        gpu_memory: as of :func:`torch_pi2.optimize`. With ``budget``, which is for what the CPU holds until then, too,
            neurons of a store: those on the GPU are not in the cache, which is for the others. Neurons are there that a
            plan gives to an accelerator (``torch-pi2 plan FOLDER --hardware measured --accelerator-memory ...``), if it
            gives it any and they have room; else those that fire most.

    Raises:
        ArtifactError: something is missing or damaged. StaleArtifactError: plan and weights do not belong together.
        ConfigError: a setting that this folder cannot have.
        DtypeError: no kernel computes in ``dtype``.
        DeviceError: no GPU that has kernels. OutOfMemoryError: ``gpu_memory`` is too little.
    """
    gpu_bytes = None if gpu_memory is None else checked_memory(gpu_memory)
    folder = Path(folder)
    if (file := gguf_in(folder)) is not None:
        folder = kept_import(file, packed=budget is not None, progress=progress)
    folder = own_shard(folder)
    _check_ours(folder)
    made = read_model(
        folder,
        model=model,
        trust_remote_code=trust_remote_code,
        dtype=dtype,
        activations=activations,
        budget=budget,
        offload=offload,
        context=context,
        strict_budget=strict_budget,
        plan=plan,
        group=group,
        progress=progress,
    )
    return set_going(made, gpu_bytes)


def _check_ours(folder: Path) -> None:
    """Raises ArtifactError: a file, or a checkpoint that nothing of ours was made of."""
    check_folder(folder)
    if (folder / PI2_FOLDER).exists() or not (folder / "config.json").is_file():
        return
    by = quantised_by(read_config(folder))
    raise ArtifactError(
        str(folder),
        expected=f"a folder that torch_pi2 wrote, with {PI2_FOLDER}/ in it",
        found=f"a checkpoint that {shown(by)} has quantised" if by else "a checkpoint without one",
        fix="Import it: torch_pi2.import_quantized(folder, other)."
        if by
        else "Make one: torch_pi2.quantize(folder, other), or load it with transformers and torch_pi2.optimize it.",
    )


def read_model(
    folder: Path,
    *,
    model: nn.Module | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
    activations: str = "float",
    budget: float | str | None = None,
    offload: OffloadConfig | None = None,
    context: int | None = None,
    strict_budget: bool = False,
    plan: Plan | str | Path | None = None,
    group: GroupConfig | None = None,
    progress: bool = False,
    config: Any = None,
) -> nn.Module:
    """What :func:`load` does before :func:`set_going`.

    Args:
        config: of transformers, to build the model with in place of the folder's.
    """
    pi2 = folder / PI2_FOLDER
    if context is not None:
        argument(context, "load(context=...)").whole(1, 1 << 31)
    if dtype is not None:
        check_computed("load(dtype=...)", dtype)
    with Parts(pi2) as parts:
        over_store = budget is not None or parts.shard is not None
        of_budgets = {"offload": offload is not None, "strict_budget": strict_budget, "context": context is not None}
        if any(of_budgets.values()) and not over_store:
            raise ConfigError(
                f"load({folder}, {', '.join(f'{name}=...' for name, said in of_budgets.items() if said)})",
                expected="a budget with it",
                found="none: all weights would be in memory",
                fix="Pass budget=..., for instance '2.5GiB'.",
            )
        if group is not None and parts.shard is None:
            raise ConfigError(
                f"load({folder}, group=...)",
                expected="a shard",
                found="a whole model, which each process computes alone",
                fix="Make shards (torch-pi2 pack --ranks N), or leave --reduction, --attention and --timeout out.",
            )
        made = planned_anew(parts.plan(), plan, folder)
        predictors = parts.predictors(made.model_hash)
        stats = None if over_store else parts.stats(made.model_hash)  # they are in no budget
    if weights_path(pi2) is not None:
        _check_settings(folder, model, activations)
        how: dict[str, Any] = {
            "dtype": dtype,
            "trust_remote_code": trust_remote_code,
            "int8_activations": activations == "int8",
            "progress": progress,
            "config": config,
        }
        if over_store:
            room = None if budget is None else parse_bytes(budget)
            more = (offload or offload_of(made), context or _CONTEXT, strict_budget)
            return load_offloaded(folder, pi2, made, predictors, room, *more, group=group, **how)
        quantized = load_sparse(folder, pi2, made, predictors, **how)
        Optimized(made, predictors, stats, weights=weights_of(quantized)).attach(quantized)
        return quantized
    _check_float(folder, activations, budget)
    if model is None:
        model = _from_pretrained(folder, trust_remote_code, dtype, config)
    else:
        _load_weights(model, folder / _WEIGHTS)
        if dtype is not None:
            model = model.to(dtype)
    return apply(model.eval(), Optimized(made, predictors, stats), progress)


def set_going(model: nn.Module, gpu_bytes: int | None) -> LoadedModel:
    """``model``, which generates with our steps, and follows its plan if that has a part for hardware."""
    attach(model)
    if gpu_bytes is not None:
        hot_on_gpu(model, gpu_bytes)
    store, plan = store_of(model), parts_of(model).plan
    if store is not None and store.config.preload:  # now that it is known what is on a GPU
        store.preload()
    if plan.hardware is not None:
        follow(model, plan)
    return cast("LoadedModel", model)


def offload_of(plan: Plan) -> OffloadConfig:
    """What ``plan`` says of reading and keeping neurons. Raises ConfigError: it makes no sense."""
    return OffloadConfig() if plan.hardware is None else OffloadConfig(**plan.hardware.offload)


def planned_anew(own: Plan, other: Plan | str | Path | None, folder: Path) -> Plan:
    """``other``, if there is one, in place of the folder's own. Raises StaleArtifactError: it is for another folder."""
    if other is None:
        return own
    made = other if isinstance(other, Plan) else Plan.load(other)
    for what, of in _FIXED:
        expected, found = of(own), of(made)
        if expected != found:
            raise StaleArtifactError(
                f"plan for {folder}",
                expected=f"{what} as in its own plan" + (f" ({expected[:12]})" if isinstance(expected, str) else ""),
                found="others" + (f" ({found[:12]})" if isinstance(found, str) else ""),
                fix="Plan this folder itself: torch-pi2 plan FOLDER --hardware measured --out DIR.",
            )
    return made


#: What weights and predictors in a folder belong to; how many neurons are hot, and when, may change.
_FIXED: tuple[tuple[str, Callable[[Plan], Any]], ...] = (
    ("weights", lambda plan: plan.model_hash),
    ("layers", lambda plan: [layer.site for layer in plan.layers]),
    ("neuron orders", lambda plan: plan.orders_hash),
    ("methods and thresholds", lambda plan: [(layer.method, layer.threshold) for layer in plan.layers]),
)


def _check_settings(folder: Path, model: nn.Module | None, activations: str) -> None:
    """Raises ConfigError for what a quantised folder cannot be loaded with."""
    read_config(folder)  # raises if there is none
    if model is not None:
        raise ConfigError(
            f"load({folder}, model=...)",
            expected="no model: a quantised one is built from its configuration",
            found=f"a {type(model).__name__}",
            fix="Leave model out, or use load_dense for the float weights.",
        )
    check_choice("load(activations=...)", activations, ACTIVATIONS, "Correct it.")


def _check_float(folder: Path, activations: str, budget: float | str | None = None) -> None:
    if budget is not None:
        raise ConfigError(
            f"load({folder}, budget=...)",
            expected="a folder with a neuron store (pi2/model.pi2)",
            found="float weights",
            fix="Make one with torch_pi2.pack(folder, out), which changes no number.",
        )
    if activations != "float":
        raise ConfigError(
            f"load({folder}, activations=...)",
            expected="float, as the weights are float",
            found=repr(activations),
            fix="Quantise the folder first (torch_pi2.quantize).",
        )


def load_dense(folder: str | Path, *, dtype: torch.dtype | None = None, trust_remote_code: bool = False) -> nn.Module:
    """The dense equivalent of a folder of ours: the ordinary model, in evaluation mode, without anything sparse.

    Of a quantised folder these are the numbers that its rows stand for (in float32 exactly, in bfloat16 rounded); of
    any other folder the model that transformers loads.

    Args:
        dtype: of all weights (default: as the configuration says).

    Raises:
        ArtifactError: something is missing or damaged. StaleArtifactError: plan and weights do not belong together.
    """
    folder = Path(folder)
    pi2 = folder / PI2_FOLDER
    if weights_path(pi2) is None:
        return _from_pretrained(folder, trust_remote_code, dtype).eval()
    read_config(folder)  # raises if there is none
    with Parts(pi2) as parts:
        plan = parts.plan()
    return quantized_as_dense(folder, pi2, plan, dtype=dtype, trust_remote_code=trust_remote_code)


def _load_weights(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_model

    if not path.is_file():
        raise ArtifactError(str(path), expected="the model's weights", found="nothing", fix="Check the folder's name.")
    try:
        load_model(model, str(path))
    except (SafetensorError, RuntimeError) as error:
        raise ArtifactError(
            str(path),
            expected=f"the weights of this {type(model).__name__}",
            found=str(error).splitlines()[0],
            fix="Pass the model that was saved, built with the same sizes.",
        ) from error


def _what_to_do(folder: Path, error: Exception) -> str:
    """Where transformers could not make the model of ``folder``."""
    from safetensors import SafetensorError

    if isinstance(error, (OSError, SafetensorError)) and "trust_remote_code" not in str(error):
        return "Copy its weights (*.safetensors) again from where they were made."
    return how_to_trust(folder)


def _from_pretrained(folder: Path, trust_remote_code: bool, dtype: torch.dtype | None, config: Any = None) -> nn.Module:
    read_config(folder)  # transformers says less of a damaged one
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ArtifactError(
            f"loading {folder}",
            expected="the package transformers, or a model to load into",
            found="neither",
            fix=f"{how_to_install('hf')}, or pass model=...",
        ) from error
    config = config or model_config(folder, trust_remote_code=trust_remote_code)
    named = named_class(config)
    try:
        model: nn.Module
        model, loading = (named or AutoModelForCausalLM).from_pretrained(
            folder,
            config=config,
            trust_remote_code=trusted(folder, trust_remote_code),
            dtype=dtype or "auto",
            local_files_only=True,
            output_loading_info=True,
        )
    except MemoryError:
        raise
    except Exception as error:  # transformers raises what its classes do
        raise ArtifactError(
            f"loading {folder}",
            expected="a model that transformers can build",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300].rstrip('.')}",
            fix=f"{_what_to_do(folder, error)} Or pass model=... to load into.",
        ) from error
    if missing := sorted(loading["missing_keys"]):  # transformers gives them random numbers
        raise ArtifactError(
            f"loading {folder}",
            expected=f"tensors of every parameter of {type(model).__name__}",
            found=f"no {missing[0]}" + (f" and {len(missing) - 1} more" if len(missing) > 1 else ""),
            fix="Save the model again, or load it with its own class and pass it as model=...",
        )
    return model
