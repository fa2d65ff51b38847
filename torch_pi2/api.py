"""The public functions, in order of the data flow (docs/design.md)::

    profile -> fit -> plan -> rewrite    all together: optimize
    quantize_                            without sparsity
    save / load / restore

Each has a CLI verb of the same name.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import checked
from torch_pi2.base.memory import is_mapped
from torch_pi2.base.modules import evaluating, fresh_settings
from torch_pi2.base.progress import log
from torch_pi2.checkpoint.gguf.importing import cached_import, import_gguf
from torch_pi2.checkpoint.importing import ImportReport, import_quantized
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.decode import hf_generate
from torch_pi2.decode.plan_controller import follow
from torch_pi2.errors import CalibrationError, ConfigError, DtypeError, StaleArtifactError, check_choice
from torch_pi2.fitting.fit import cold_neurons, fit_layers
from torch_pi2.fitting.fit import fit as fit_predictors
from torch_pi2.fitting.loss import causal_lm_loss
from torch_pi2.fitting.search import FitSettings
from torch_pi2.fitting.thresholds import Thresholds, choose_thresholds, read_first
from torch_pi2.formats import FLOAT, FORMATS, QUANTIZED
from torch_pi2.graph.capture import example_inputs
from torch_pi2.graph.find import Found, named, search
from torch_pi2.machine.find import find_hardware
from torch_pi2.machine.hardware import Hardware
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import exact_zeros, of_all
from torch_pi2.planner.for_machine import plan_for, plannable_gpu_bytes
from torch_pi2.planner.hot_neurons import greedy_plan, hot_cut, plan_without_data
from torch_pi2.predict import AnyPredictor, check_all_known
from torch_pi2.predict.file import FittedPredictors
from torch_pi2.profiling.data import MIN_SEQUENCES, MIN_TOKENS, Batch, batches, calibration_batches, rows_of
from torch_pi2.profiling.run import profile as profile_sites
from torch_pi2.profiling.samples import samples_bytes
from torch_pi2.rewrite.gpu import checked_memory, hot_on_gpu, on_the_cpu, room_on_gpu
from torch_pi2.rewrite.inputs import fit_inputs, of_inputs, sparsify_inputs
from torch_pi2.rewrite.rewrite import apply, replaceable
from torch_pi2.rewrite.rewrite import restore as restore_modules
from torch_pi2.rewrite.skeleton import on_meta
from torch_pi2.rewrite.state import ModelState, SparseState, get_state
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, check_separate
from torch_pi2.store.gguf import gguf_in
from torch_pi2.store.storefile import open_weights
from torch_pi2.types.config import Config, check_patterns, check_registered, configured, method_for
from torch_pi2.types.method import LOSSY, PREDICTED, Method, prepare
from torch_pi2.types.plan import LayerPlan, Plan, lossy_methods, weights_hash
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import ActivationStats, LayerStats

Model = TypeVar("Model", bound=nn.Module)

#: Tokens for fitting predictors (for calibrating sign-bit ones), and most memory for their samples.
_FIT_TOKENS = 20_000
_LAYER_TOKENS = 8192
_FIT_BYTES = 2 << 30


def _search(
    model: nn.Module,
    data: list | None,
    stats: ActivationStats | None = None,
    needed: bool = True,
    sites: Sequence[FFNSite] | None = None,
) -> Found:
    """FFN sites of ``model`` and layers left dense; the first batch of ``data`` is the example if inputs cannot be
    guessed. ``stats``: sites are read up first or gate first as there. ``needed``: raise if there is no layer.
    ``sites``: given ones.
    """
    inputs: dict[str, Any] = {}
    if is_mapped(model):  # no weights are needed
        model, inputs = on_meta(model), {"on_meta": True}
    elif data and (data[0].input_ids is None or data[0].kwargs):  # it needs more than ids
        inputs = dict(zip(("args", "kwargs"), data[0].arguments(model)))
    elif data and not hasattr(model, "config"):
        assert data[0].input_ids is not None
        inputs = {"args": (data[0].input_ids[:2, :8],)}
    try:
        if sites:
            example = inputs.get("args", ()), inputs.get("kwargs", {}) if inputs else example_inputs(model)
            found = Found(list(sites), {}, None, example)
        else:
            found = search(model, needed=needed, **inputs)
    except CalibrationError as error:
        matrices = {dtype_name(p.dtype): name for name, p in model.named_parameters() if p.dim() == 2}
        if len(matrices) < 2:
            raise
        what, expected = f"dtypes of {type(model).__name__}, which does not run", "one dtype for all matrices"
        several = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(matrices.items()))
        fix = "Convert the model with model.to(torch.bfloat16) (or float32) first."
        raise DtypeError(what, expected=expected, found=several, fix=fix) from error
    return found if stats is None else _as_profiled(found, stats)


@checked
@fresh_settings()
def profile(
    model: nn.Module,
    data: Any,
    *,
    tokenizer: Any = None,
    config: Config | None = None,
    progress: bool = False,
    **fields: Annotated[Any, Config],
) -> ActivationStats:
    """Measure how often each FFN neuron of ``model`` fires on ``data``.

    ReLU-family neurons fire when they are not exactly zero. In other layers a neuron fires when its gate exceeds
    the magnitude below which ``config.sparsity`` of all gate values lie (CATS; the data is read twice), or its own
    threshold with ``config.score`` and ``config.max_loss`` (:mod:`torch_pi2.fitting.thresholds`).

    Args:
        model: any ``nn.Module``; it runs in evaluation mode on the CPU, and is left unchanged where it was.
        data: text, token ids, or batches: see :func:`torch_pi2.profiling.data.batches`.
        tokenizer: for text (default: from the folder that the model was loaded from).
        config, fields: settings, as one object or as keywords (``sparsity=0.7``).
    """
    config = configured(config, fields)
    with on_the_cpu(model):
        kept = calibration_batches(model, data, tokenizer, config)
        return _profile(model, kept, _search(model, kept).sites, config, progress)


def _profile(model: nn.Module, data: list, sites: list[FFNSite], config: Config, progress: bool) -> ActivationStats:
    settings: dict[str, Any] = {"batch_size": config.batch_size, "seq_len": config.seq_len, "progress": progress}
    dense = [site for site in sites if not exact_zeros(site.activation)]
    chosen = Thresholds()
    if sites and not dense and config.method == Method.THRESHOLD:
        log.warning("thresholds are for activations without exact zeros: the exact gate, which is lossless, is used")
    if dense and (config.sparsity > 0 or config.max_loss is not None) and config.method not in ("dense", "exact"):
        chosen = choose_thresholds(model, data, dense, config, progress=progress)
    sites = list({site.key: site for site in (*sites, *chosen.sites)}.values())
    found = profile_sites(model, data, sites, thresholds=chosen.cuts, scales=chosen.scales, **settings)
    found.made_by |= chosen.made_by
    _warn_of_few(found)
    return found


def _warn_of_few(stats: ActivationStats) -> None:
    experts = [layer for layer in stats if layer.experts is not None]
    few = [layer for layer in experts if layer.borrowed]
    if few:
        least = min(few, key=lambda layer: layer.tokens - layer.borrowed)
        log.warning(
            "%d of %d experts were routed fewer than %d calibration tokens (%s: %d): they are also measured on tokens "
            "of their block that went to other experts; calibrate on more text",
            *(len(few), len(experts), MIN_TOKENS, least.key, least.tokens - least.borrowed),
        )


def _as_profiled(found: Found, stats: ActivationStats) -> Found:
    """``found`` with each site read up first or gate first, as in ``stats``."""
    return replace(found, sites=[_read_as(site, stats[site.key]) for site in found.sites])


def _read_as(site: FFNSite, stats: LayerStats) -> FFNSite:
    read = read_first(site, "up") if stats.up_first else site
    if read.up_first != stats.up_first:
        what, found = f"statistics of {site.key}", "statistics of up, of another layer"
        expected = "statistics of its first matrix: it has no up, or zeros that tell what is skipped"
        raise StaleArtifactError(what, expected=expected, found=found, fix="Profile this model (torch_pi2.profile).")
    return read


@checked
@fresh_settings()
def fit(
    model: nn.Module,
    data: Any,
    *,
    stats: ActivationStats | None = None,
    tokenizer: Any = None,
    config: Config | None = None,
    work: str | Path | None = None,
    progress: bool = False,
    **fields: Annotated[Any, Config],
) -> FittedPredictors:
    """Fit low-rank predictors for the cold neurons, just large enough to keep the model's loss within the tolerance.

    With ``config.method`` "signbit": sign-bit predictors, each with the recall of ``config.target_recall``. With
    "auto", experts get none: the router already skips most of their neurons, and each would need training. With a
    ``SparseMethod`` or an ``InputMethod``: its copies, fitted to their layers (those of linear layers by module name).

    ``data`` must give next-token logits (a causal language model); for other models use
    :func:`torch_pi2.fitting.fit.fit` with a ``loss_fn``. Other arguments are those of :func:`profile`.

    Args:
        stats: of this model (:func:`profile`); an ``InputMethod`` needs none.
        work: a folder for samples and fitted predictors. Memory then does not grow with the number of layers (nor with
            the weights of a model from :func:`torch_pi2.load_mapped`), and the same call resumes after a kill. Remove
            it when the result is saved. None: all in memory.

    Raises:
        CalibrationError, StaleArtifactError (statistics of other weights; another fit was begun in ``work``),
        ConfigError, ArtifactError (``work`` cannot be written, or another process fits there).
    """
    config = configured(config, fields)
    with on_the_cpu(model):
        kept = calibration_batches(model, data, tokenizer, config)
        if of_inputs(config):
            return fit_inputs(model, kept, config, progress)
        if stats is None:
            fix = "Pass stats=torch_pi2.profile(model, text)."
            raise CalibrationError("fit", expected="statistics of the model", found="none", fix=fix)
        sites = _search(model, kept, stats).sites
        return _fit(model, kept, sites, stats, config, progress, None if work is None else Path(work))


def _fit(
    model: nn.Module,
    data: list[Batch],
    sites: list[FFNSite],
    stats: ActivationStats,
    config: Config,
    progress: bool,
    work: Path | None = None,
) -> FittedPredictors:
    cold = {s.key: cold_neurons(stats, s.key, hot_cut(s, stats[s.key], config)) for s in sites}
    if config.method == Method.CUSTOM:  # which decides for every neuron
        check_patterns(config, [s.key for s in sites])
        cold = {s.key: torch.arange(s.intermediate if method_for(config, s.key) else 0) for s in sites}
    cold |= {s.key: torch.empty(0, dtype=torch.int64) for s in sites if of_all(s.activation)}
    if config.method == "auto":
        # one training per expert would be needed; the router already skips most neurons
        cold |= {s.key: torch.empty(0, dtype=torch.int64) for s in sites if s.experts is not None}
        if not any(s.experts is None for s in sites):
            return FittedPredictors()
    fitted = [s for s in sites if len(cold[s.key])]
    # samples of all layers are in memory at once: fewer tokens for large models (7B: about 6,000)
    share = 1.0 if work else _FIT_BYTES / max(1, samples_bytes(model, fitted, _FIT_TOKENS))
    n_tokens = max(1024, int(min(1.0, share) * _FIT_TOKENS))
    if n_tokens < _FIT_TOKENS:
        log.warning("predictors are fitted to %d tokens instead of %d, to bound memory", n_tokens, _FIT_TOKENS)
    if config.method in (Method.SIGNBIT, Method.CUSTOM):
        settings = FitSettings(**vars(config), n_tokens=min(n_tokens, _LAYER_TOKENS))
        return fit_layers(model, data, sites, stats, settings, cold=cold, work=work, progress=progress)
    weight_bits = FitSettings.weight_bits if config.weights == FLOAT else FORMATS[config.weights].bits_per_weight
    settings = FitSettings(**vars(config), n_tokens=n_tokens, weight_bits=weight_bits)
    return fit_predictors(model, data, sites, stats, settings, cold=cold, work=work, progress=progress)


@checked
@fresh_settings()
def plan(
    model: nn.Module,
    stats: ActivationStats,
    predictors: Mapping[str, AnyPredictor] | None = None,
    *,
    config: Config | None = None,
    example: Any = None,
    **fields: Annotated[Any, Config],
) -> Plan:
    """Decide which neurons are hot, their order, and how cold ones are selected. The plan is bound to ``model``.

    Args:
        example: calibration data whose first batch is used to capture the model; only needed if its inputs cannot be
            guessed (not a Hugging Face model).
        config, fields: settings, as one object or as keywords.

    Raises:
        StaleArtifactError: ``stats`` or ``predictors`` are of other weights.
        ConfigError: ``lowrank`` without predictors.
    """
    chosen = configured(config, fields)
    data = None if example is None else list(islice(batches(example), 1))
    found = _search(model, data, stats)
    return _plan(model, found, stats, predictors, chosen).bind(model)


def _plan(model: nn.Module, found: Found, stats: ActivationStats, predictors: Mapping | None, config: Config) -> Plan:
    check_all_known(predictors or {})
    if isinstance(predictors, FittedPredictors):
        predictors.check_hash(stats.model_hash)
    weight_bytes: float = model.get_parameter(found.sites[0].up.weight).element_size()
    if config.weights != FLOAT:
        weight_bytes = FORMATS[config.weights].bits_per_weight / 8
    made = greedy_plan(found.sites, stats, predictors, config, weight_bytes)
    made.made_by["left"] = found.left
    report = getattr(predictors, "report", None)
    if report is not None and lossy_methods(made).keys() <= set(PREDICTED):
        made.made_by["loss_change"] = report.change
    elif lossy_methods(made).keys() == {Method.THRESHOLD} and "loss_change" in stats.made_by:
        made.made_by["loss_change"] = stats.made_by["loss_change"]
    return made


@checked
@fresh_settings()
def optimize_quantized(
    source: str | Path,
    folder: str | Path,
    calibration: Any = None,
    config: Config | None = None,
    *,
    tokenizer: Any = None,
    stats: ActivationStats | None = None,
    predictors: Mapping[str, AnyPredictor] | None = None,
    progress: bool = False,
    **fields: Annotated[Any, Config],
) -> ImportReport:
    """Make a quantised model sparse, and write it to ``folder``; :func:`torch_pi2.load` and ``pack`` take that.

    The model is profiled and fitted to with its dequantised weights in bfloat16, which are in memory meanwhile. Rows of
    gate and up, of attention and of the embedding are then kept bit for bit as by :func:`torch_pi2.import_gguf` with
    ``neurons="all"``; columns of down, which files store across neurons, are rounded to int8. Layers in which choosing
    neurons does not pay keep all their rows.

    Args:
        source: a GGUF file, or a folder that :func:`torch_pi2.import_quantized` takes.
        calibration, config, tokenizer, stats, predictors, progress, fields: as for :func:`optimize`; the tokenizer is
            by default the model's own. ``weights`` and ``activations`` are the file's.

    Raises:
        Pi2Error: as :func:`optimize` and the imports do. ConfigError: ``weights`` or ``quantization``, an
            ``InputMethod``, or a method that changes the model first (``prepare``).
    """
    config = configured(config, fields)
    given = {name: getattr(config, name) for name in ("weights", "quantization", "activations")}
    if changed := [f"{name}={y}" for name, y in given.items() if y != getattr(Config(), name)]:
        what, fix = f"optimize_quantized({', '.join(changed)})", "Leave it out."
        raise ConfigError(what, expected="the weights of the file", found="others", fix=fix)
    if of_inputs(config) or any(method.changes_model for method in config._custom.values()):
        fix = "Optimise torch_pi2.load_dense(folder of an import) in memory."
        expected = "a SparseMethod without prepare"
        raise ConfigError("optimize_quantized(method=...)", expected=expected, found="another", fix=fix)
    check_registered(config)
    load_library()
    file, folder = gguf_in(source), Path(folder)
    check_separate("optimize_quantized", Path(source), folder)
    check_replaceable(folder)
    with ExitStack() as stack:
        if file is not None:
            imported = cached_import(file, packed=False, progress=progress)
        else:
            beside = folder.resolve().parent
            imported = Path(stack.enter_context(TemporaryDirectory(dir=beside))) / "imported"
            import_quantized(source, imported, progress=progress)
        model = load_dense(imported, dtype=torch.bfloat16)
        with open_weights(imported / PI2_FOLDER) as weights:
            bits = {name: FORMATS[weights.format_of(name)].bits_per_weight for name in weights.linears}
    data = None if calibration is None else calibration_batches(model, calibration, tokenizer, config, MIN_TOKENS)
    if data is None and stats is None:
        fix = "Pass calibration=text; without it, torch_pi2.import_gguf keeps exact zeros."
        raise CalibrationError("optimize_quantized", expected="calibration data", found="none", fix=fix)
    parts = _decided(model, data, _search(model, data), config, stats, predictors, progress)
    del model
    for layer in parts.plan.layers:
        if not _pays(layer, bits):
            layer.method = str(Method.DENSE)
    write: Any = partial(import_quantized, source) if file is None else partial(import_gguf, file)
    report: ImportReport = write(folder, parts=parts, progress=progress)
    return report


def _pays(layer: LayerPlan, bits: Mapping[str, float]) -> bool:
    """Whether a token reads fewer bytes of a layer's neurons, with down in int8, than of its rows in a file, which have
    ``bits`` a weight by the names of linear layers; True for what is in neurons anyway.
    """
    site = layer.site
    names = {role: ref.weight.removesuffix(".weight") for role, ref in site.refs.items()}
    if site.experts is not None or not bits.keys() >= set(names.values()):
        return True
    first, *rest = [*(bits[name] for role, name in names.items() if role != "down"), FORMATS["int8"].bits_per_weight]
    share = (layer.n_hot + layer.n_cold * layer.expected_active) / site.intermediate
    read = share * (first + sum(rest)) if layer.method in PREDICTED else first + share * sum(rest)
    return read < sum(bits[name] for name in names.values())


@checked
@fresh_settings()
def optimize(
    model: Model,
    calibration: Any = None,
    config: Config | None = None,
    *,
    tokenizer: Any = None,
    stats: ActivationStats | None = None,
    predictors: Mapping[str, AnyPredictor] | None = None,
    hardware: Any = None,
    gpu_memory: float | str | None = None,
    sites: Sequence[FFNSite] | None = None,
    progress: bool = False,
    **fields: Annotated[Any, Config],
) -> Model:
    """Replace the FFNs of ``model`` by predictor-gated neuron clusters, in place; returns ``model``.

    Without ``calibration`` only the lossless exact gate is possible, for layers of the ReLU family; other layers then
    stay dense, and a model that has only such layers is refused.
    With it: profile, fit (for ``auto`` and ``lowrank``), plan, rewrite. Each expert of a mixture has its own threshold
    and, with ``lowrank`` or ``signbit``, its own predictor. ``generate``, ``save_pretrained`` and ``state_dict`` keep
    working; :func:`restore` gives the original back bit for bit, unless weights are quantised. Parameters of FFNs and
    modules within them are gone, and any access raises an error by name (:mod:`torch_pi2.base.offloaded`); hooks are
    kept or refused by name (:mod:`torch_pi2.base.modules`).

    Args:
        model: any ``nn.Module`` with feed-forward layers of a known form, on the CPU or on one GPU. A model on a GPU
            moves to the CPU meanwhile.
        calibration, tokenizer: ``data`` and ``tokenizer`` of :func:`profile`.
        config, fields: settings (:class:`torch_pi2.Config`), as one object or as keywords: ``method="exact"``,
            ``weights="int4"``.
        stats, predictors: results of :func:`profile` and :func:`fit`, to skip these steps.
        sites: FFNs made by hand, for what :func:`find_sites` does not see; others stay dense. The whole model is
            compared on an example with and without them, as always. None: those that are found.
        hardware: also plan for a machine and apply that plan: ``measured`` (after ``torch-pi2 doctor --measure``) or
            anything that :func:`torch_pi2.plan_for` takes, which has more settings.
        progress: show progress bars on a terminal's standard error, else log (:mod:`torch_pi2.base.progress`).
        gpu_memory: bytes (or ``"6GiB"``) for weights on torch's current GPU: everything but FFNs, and as many of their
            neurons as fit; the CPU computes the others meanwhile (docs/GPU.md). If ``hardware`` was measured with its
            GPU, the neurons with the fastest predicted steps, by a plan that is then followed; else, and in models with
            thresholds, the most frequent neurons. None: no division.

    Raises:
        Pi2Error: see :mod:`torch_pi2.errors`. The model is then left dense and where it was, with two exceptions: with
            too little ``gpu_memory`` or free GPU memory (OutOfMemoryError), or if no plan can be made for the optimised
            model, it stays optimised, and with ``gpu_memory`` whole on the CPU. What a
            method's ``prepare`` did stays.
    """
    config = configured(config, fields)
    check_all_known(predictors or {})
    memory_bytes = None if gpu_memory is None else checked_memory(gpu_memory)
    divided = memory_bytes is not None
    if hardware is not None:
        hardware = _machine(hardware, calibration is not None or stats is not None)
    with on_the_cpu(model, stays_here=divided):
        _optimize(model, calibration, config, tokenizer, stats, predictors, progress, sites)
        if hardware is not None and not divided:
            _plan_and_follow(model, hardware, 0, progress)
    if memory_bytes is not None:
        room_bytes = room_on_gpu(model, memory_bytes)
        if hardware is not None:
            _plan_and_follow(model, hardware, plannable_gpu_bytes(model, hardware, room_bytes), progress)
        hot_on_gpu(model, memory_bytes)
    return model


def _plan_and_follow(model: nn.Module, hardware: Hardware, accelerator_memory: int, progress: bool) -> None:
    parts = get_state(model)
    parts.plan = plan_for(model, hardware, accelerator_memory=accelerator_memory, progress=progress)
    follow(model, parts.plan)


def _optimize(
    model: Model,
    data: Any,
    config: Config,
    tokenizer: Any,
    stats: Any,
    predictors: Mapping | None,
    progress: bool,
    sites: Sequence[FFNSite] | None,
) -> None:
    load_library()
    for method in config._custom.values():
        prepare(method, model)
    if data is None and stats is None:
        _optimize_without_data(model, config, progress, sites=sites)
        return
    measured = config.method not in ("exact", "dense") or stats is not None or config.quantization != "rtn"
    least = MIN_TOKENS if measured else 1
    data = None if data is None else calibration_batches(model, data, tokenizer, config, least)
    if data and not measured and 0 < sum(batch.n_tokens for batch in data) < MIN_TOKENS:
        log.warning("fewer than %d tokens tell nothing of how often neurons fire: their order is kept", MIN_TOKENS)
        _optimize_without_data(model, config, progress, data, sites)
        return
    if of_inputs(config, predictors):
        what = "optimize with an InputMethod"
        if not data:
            raise CalibrationError(what, expected="calibration data", found="none", fix="Pass calibration=text.")
        if config.quantization != "rtn":
            raise ConfigError(what, expected="rtn", found=config.quantization, fix="Leave quantization out.")
        methods = fit_inputs(model, data, config, progress) if predictors is None else predictors
        sparsify_inputs(model, dict(methods), config, data[0], progress)
        hf_generate.attach(model)
        _say_lossy(get_state(model), config)
        return
    found, strategies = replaceable(model, _search(model, data, sites=sites))
    parts = _decided(model, data, found, config, stats, predictors, progress)
    apply(model, parts, progress, config, data, strategies)
    hf_generate.attach(model)
    _say_lossy(get_state(model), config)


def _decided(
    model: nn.Module,
    data: list[Batch] | None,
    found: Found,
    config: Config,
    stats: ActivationStats | None,
    predictors: Mapping | None,
    progress: bool,
) -> SparseState:
    """Plan, predictors and statistics of the dense ``model``; the last two are made unless given."""
    if stats is None:
        assert data is not None
        stats = _profile(model, data, found.sites, config, progress)
    found = _as_profiled(found, stats)
    if predictors is None and (config.method in PREDICTED or (config.method == "auto" and _can_fit(model, data))):
        if data is None:
            expected = "calibration data or fitted predictors"
            fix = "Pass calibration=..., or predictors=torch_pi2.fit(...)."
            raise CalibrationError(f"optimize(method='{config.method}')", expected=expected, found="neither", fix=fix)
        predictors = _fit(model, data, found.sites, stats, config, progress)
    fitted = predictors if isinstance(predictors, FittedPredictors) else FittedPredictors(predictors or {})
    return SparseState(_plan(model, found, stats, fitted, config), fitted, stats)


def _say_lossy(parts: SparseState, config: Config) -> None:
    methods = lossy_methods(parts.plan)
    if not methods:
        return
    change = parts.loss_change
    line = "lossy: {} ({})".format(
        ", ".join(f"{count} of {len(parts.plan.layers)} layers {method}" for method, count in methods.items()),
        "what that does to the loss was not measured" if change is None else f"loss {change:+.2%} on held-out data",
    )
    if config.method == "auto":
        log.warning("method 'auto' chose what is %s; method='exact' is lossless", line)
    else:
        log.info(line)


def _machine(hardware: Any, has_data: bool) -> Hardware:
    """The profile of ``hardware``, read early. Raises ConfigError, ArtifactError, CalibrationError."""
    if not has_data:
        expected = "calibration data or statistics: how often neurons fire decides which are hot"
        fix = "Pass calibration=... or stats=...."
        raise CalibrationError("optimize(hardware=...)", expected=expected, found="neither", fix=fix)
    return hardware if isinstance(hardware, Hardware) else find_hardware(hardware)


def _can_fit(model: nn.Module, data: list[Batch] | None) -> bool:
    """Whether ``auto`` may fit predictors: their size is chosen by a next-token loss."""
    if not data:
        return False
    try:
        with evaluating(model):
            causal_lm_loss(model, data[0])
    except CalibrationError:
        log.warning("%s gives no next-token logits: no predictors are fitted to it", type(model).__name__)
        return False
    sequences = len(rows_of(data))
    if sequences < MIN_SEQUENCES:
        log.warning("%d sequences are too few to fit predictors to (%d): none are", sequences, MIN_SEQUENCES)
        return False
    return True


def _optimize_without_data(
    model: Model,
    config: Config,
    progress: bool,
    data: list[Batch] | None = None,
    sites: Sequence[FFNSite] | None = None,
) -> Model:
    needed = config.method != Method.DENSE or config.weights == "float"  # else linear layers are enough
    found, strategies = replaceable(model, _search(model, data, needed=needed, sites=sites), needed)
    sites = found.sites
    no_zeros = {site.key: site.activation for site in sites if not exact_zeros(site.activation)}
    smooth = sorted(set(no_zeros.values()))
    if config.method == "auto" and 0 < len(no_zeros) < len(sites):
        left = {key: f"{name} has no exact zeros, and there is no calibration" for key, name in no_zeros.items()}
        log.warning("left dense: %s", named(left))
        found.left.update(left)
        if config.weights == FLOAT:  # else they are quantised, all neurons of them
            sites = [site for site in sites if site.key not in no_zeros]
    elif config.method in LOSSY or (config.method == "auto" and no_zeros):
        wanted = f"method '{config.method}'" if not smooth else f"activation {', '.join(smooth)} (no exact zeros)"
        fix = "Pass calibration=text or ids (torch_pi2.profiling.text.stdlib_text('train') needs no download)."
        expected = "calibration data"
        raise CalibrationError(f"optimize without calibration, {wanted}", expected=expected, found="none", fix=fix)
    made = plan_without_data(sites, weights_hash(model, sites), config)
    made.made_by["left"] = found.left
    apply(model, SparseState(made, FittedPredictors(), None), progress, config, data, strategies)
    hf_generate.attach(model)
    return model


@checked
@fresh_settings()
def quantize_(
    model: Model,
    weights: str = "int4",
    calibration: Any = None,
    *,
    activations: str = "float",
    quantization: str = "rtn",
    tokenizer: Any = None,
    progress: bool = False,
) -> Model:
    """Quantise the linear layers of ``model``, those of FFNs included, in place; returns ``model``. Lossy.

    Nothing becomes sparse: every neuron is computed. Embeddings, norms and small layers stay as they are, and
    ``model.torch_pi2.quantization`` has every layer's error. It is :func:`optimize` with ``method="dense"``, so
    :func:`torch_pi2.save`, ``generate`` and ``Decoder`` take the result; :func:`restore` cannot undo it. For a
    checkpoint too large for memory use :func:`torch_pi2.quantize`, from folder to folder. Feed-forward layers of
    unknown form are treated as linear layers; a model may have no others.

    Args:
        weights: ``int4`` or ``int8``, groups of 32 with a float16 scale: 4.5 and 8.5 bits per weight.
        calibration: as ``data`` of :func:`profile`: needed by ``gptq``, and by models that are not of Hugging Face.
        activations, quantization: see :class:`torch_pi2.Config`. tokenizer: as in :func:`profile`.

    Raises:
        Pi2Error: see :mod:`torch_pi2.errors`; on any of them the model is left as it was.
    """
    check_choice("quantize_(weights)", weights, QUANTIZED, "Choose one of these.")
    config = Config(method="dense", weights=weights, activations=activations, quantization=quantization)
    load_library()
    with on_the_cpu(model):
        data = None if calibration is None else calibration_batches(model, calibration, tokenizer, config)
        return _optimize_without_data(model, config, progress, data)


@checked
@fresh_settings()
def restore(model: Model) -> Model:
    """Restore the original modules and weights, bit for bit, and stop following a plan; returns ``model``. A dense
    model is left alone. Raises ConfigError if weights are quantised.
    """
    restore_modules(model)
    ModelState.detach(model)
    hf_generate.detach(model)
    return model
