"""``torch_pi2.export(model, folder)``: write an optimised model as a bundle for ExecuTorch (docs/BUNDLE.md)."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.base.progress import log
from torch_pi2.decode.generate import ignored_settings
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export import qnn
from torch_pi2.export.delegated import delegated_copy, exported_layers, linears_of, prepare_rest, registered
from torch_pi2.export.describe import manifest_of, runner_constants
from torch_pi2.export.executorch import check_executorch
from torch_pi2.export.manifest import CHUNK, PROGRAM_FILE, STORE_FILE
from torch_pi2.export.methods import Methods, Source, chunks_of, decoder_methods_of, module_methods
from torch_pi2.export.program import named_failures, trace
from torch_pi2.export.settings import ExportSettings, check_bundle_folder
from torch_pi2.export.store import NO_STORE, StoreFacts, blob_of, write_store
from torch_pi2.export.text import write_chat
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.ops.activations import check_plain, norm
from torch_pi2.rewrite.state import get_state
from torch_pi2.types.plan import refuse_custom


@checked
def export(
    model: nn.Module,
    folder: str | Path,
    *,
    target: str = "xnnpack",
    tokenizer: Any = None,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    max_tokens: int = 512,
    max_prompt: int = 256,
    batches: Sequence[int] = (1, 2, 4),
    linears: str = "float32",
    kv: str = "float32",
    hot: Mapping[int, int] | None = None,
    hot_prompts: Sequence[int] | None = None,
    hot_attention: str | None = None,
    precision: str = "w4a16",
    blocks: int | str = "auto",
    quantization: str = "rtn",
    weight_sharing: bool = True,
    calibration: Any = None,
    progress: bool = False,
) -> Path:
    """Write an optimised ``model`` as a bundle: ``model.pte``, ``model.pi2``, tokenizer and ``manifest.json``.

    Feed-forward layers become calls of our delegate, with all of their weights in the store ``model.pi2``; everything
    else goes to XNNPACK. ``model`` is not modified. An earlier bundle is replaced at the end.

    Args:
        model: from :func:`torch_pi2.optimize` or :func:`torch_pi2.load`, in memory or over a store. A Hugging Face
            decoder gets the methods ``forward``, ``decode_bN`` for each of ``batches``, and ``fork``, over one KV
            cache; any other module gets ``forward``, traced with ``args``, ``kwargs`` and ``dynamic_shapes`` of
            ``torch.export.export``.
        target: ``xnnpack`` (CPU), or hot neurons on Qualcomm's NPU: ``qnn:SM8650`` (others: docs/QNN.md).
        tokenizer: written to the bundle.
        max_tokens: sequence length, prompt and answer together. max_prompt: most tokens per call of ``forward``; longer
            prompts are split.
        linears: format of linear layers outside FFNs of a float model: ``float32``, ``int8`` or ``int4`` (lossy, with
            XNNPACK's 8-bit activations). Quantised layers keep their format.
        kv: format of the KV cache: ``float32``, ``float16`` or ``int8`` with a scale per token and head; the latter
            two are lossy and take a half and a quarter of the memory.
        hot: batch size -> chunks of 512 neurons per layer on the accelerator. Default: from the statistics. With
            ``xnnpack``, XNNPACK plays the accelerator (default: none).
        hot_prompts: token counts N of methods ``prefill_N``, which compute whole layers on the accelerator, with
            padding; ``forward`` reads other prompts. Default: 128 if the NPU's memory holds the FFNs, else none.
        hot_attention: ``prompts``: the accelerator also computes attention and its projections in ``prefill_N``, with
            ``kv`` in float32 or float16; or ``none``. Default: ``prompts`` if the NPU's memory holds it.
        precision, blocks, quantization, weight_sharing: of the NPU's part, see :class:`torch_pi2.export.qnn.Settings`.
        calibration: text (with ``tokenizer``), ids or batches, as for :func:`torch_pi2.optimize`, to observe the inputs
            of hot parts. Needed by ``qnn`` unless ``precision`` is ``fp16``.
        progress: bars on standard error in a terminal, else log lines (:mod:`torch_pi2.base.progress`).

    Raises:
        ConfigError: a dense model, an invalid setting, or ``max_tokens`` above the length for which the traced methods
            are correct (the message has it). UnsupportedModelError: hot parts of experts, or torch, transformers or
            ExecuTorch cannot export the model. LibraryMissingError: executorch or Qualcomm's libraries are not
            installed. ArtifactError: the folder holds other files, or cannot be written. CalibrationError: calibration
            data are missing.
    """
    given: dict[str, Any] = dict(locals())
    settings = ExportSettings(**{one.name: given[one.name] for one in fields(ExportSettings)})
    check_executorch()
    if settings.soc is not None:
        qnn.check(settings.qnn.soc)
    folder = Path(folder).resolve()
    check_bundle_folder(folder)
    parts, layers = get_state(model), exported_layers(model)
    refuse_custom(parts.plan, "export")
    if parts.inputs:
        fix = "Use another method there."
        raise ConfigError("export", expected="methods that kernels know", found="an InputMethod", fix=fix)
    if biased := [key for key, method in parts.predictors.items() if getattr(method, "bias_H", None) is not None]:
        fix = "Use a method without it there."
        raise ConfigError(f"export, method of {biased[0]}", expected="no bias_H", found="one", fix=fix)
    has_example = args is not None or kwargs is not None
    decoder = not has_example and hasattr(model, "config") and hasattr(model, "generate")
    _check_model(model, layers, settings, decoder, has_example, dynamic_shapes)
    source = Source(model, layers, parts, linears_of(model, linears), decoder, tokenizer, calibration)
    chunks = chunks_of(source, settings)
    with ExitStack() as stack:
        staging = stack.enter_context(replacing_folder(folder))
        name = stack.enter_context(registered(layers))
        _save_small(model, tokenizer, staging)
        facts = write_store(staging / STORE_FILE, layers, parts.plan, progress=progress) if layers else NO_STORE
        with named_failures(f"export of {source.name}", "a model that torch can copy and run with a cache"):
            delegated = delegated_copy(model, layers, name)
            prepare_rest(delegated, linears)
            if decoder:
                methods = decoder_methods_of(source, delegated, settings, staging, chunks)
            else:
                methods = module_methods(delegated, args, kwargs, dynamic_shapes)
        planned = _write_program(staging / PROGRAM_FILE, source, methods, settings, facts)
        manifest = manifest_of(source, settings, facts, staging, methods, planned)
        manifest.save(staging)
        manifest.verify(staging)
    return folder


def _check_model(
    model: nn.Module, layers: Sequence, settings: ExportSettings, decoder: bool, has_example: bool, dynamic_shapes: Any
) -> None:
    what = f"export of {type(model).__name__}"
    if dynamic_shapes is not None and not has_example:
        fix = "Leave it out for a Hugging Face decoder, whose methods have shapes of their own."
        expected = "the example inputs that they describe (args=... or kwargs=...)"
        argument(dynamic_shapes, f"{what} with dynamic_shapes", fix).wrong(expected, "none")
    if not decoder and not has_example:
        fix = "Pass what torch.export.export takes."
        argument(model, what, fix).wrong("example inputs (args=...), as it is no Hugging Face decoder", "none")
    if (ignored := settings.changed()) and not decoder:
        argument(model, f"{what} with {ignored[0]}", "Leave it out.").wrong(
            "a Hugging Face decoder, which has a KV cache", "another module, or a decoder with example inputs (args)"
        )
    if normed := next((layer.site.key for layer in layers if norm(layer.site.activation)), None):
        fix = "Run it here: generate, serve and load(budget=...) take such layers."
        expected = "layers without a norm over all neurons before down: bundles have none yet"
        raise UnsupportedModelError(what, expected=expected, found=normed, fix=fix)
    if not settings.splits:
        return
    for layer in layers:
        check_plain(layer.site.activation, "hot parts of bundles")
    if not decoder:
        argument(model, f"{what} with hot parts", "Export it with target='xnnpack' and without hot.").wrong(
            "a Hugging Face decoder, whose batch sizes are known", "another module"
        )
    mixtures = [layer.site.key for layer in layers if isinstance(layer, SparseExperts)]
    if mixtures or not layers:
        found = f"{len(mixtures)} mixtures of experts ({mixtures[0]})" if mixtures else "none"
        fix = "Import the file with neurons='all', or export with target='xnnpack' and without hot."
        fix = "Export with target='xnnpack' and without hot: the CPU computes experts." if mixtures else fix
        expected = "feed-forward layers without experts"
        raise UnsupportedModelError(f"{what} with hot parts", expected=expected, found=found, fix=fix)


def _write_program(
    path: Path, source: Source, methods: Methods, settings: ExportSettings, facts: StoreFacts
) -> tuple[int, int]:
    """Trace, check, lower and write the methods. Returns bytes of ExecuTorch's arena and XNNPACK's workspace."""
    from torch_pi2.export.partitioner import lower

    layers, progress = source.layers, settings.progress
    preload_from = [min(of_layer) * CHUNK for of_layer in zip(*methods.chunks.values())] or [0] * len(layers)

    def blob(layer: int, role: int, first: int, queue: int) -> bytes:
        wanted = min(preload_from[layer], layers[layer].site.intermediate)
        return blob_of(facts, layers, layer, role, first, queue, wanted).pack()

    constants = runner_constants(source, settings) if source.decoder else {}
    programs = trace(methods.specs, source.name, progress=progress)
    methods.check(programs)
    program = lower(programs, source.name, blob=blob, constant_methods=constants)
    atomic_write(path, program.pieces)
    return program.arena_bytes, program.workspace_bytes


def _save_small(model: nn.Module, tokenizer: Any, staging: Path) -> None:
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.to_json_file(staging / "config.json", use_diff=False)  # type: ignore[union-attr]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.to_json_file(staging / "generation_config.json")
        if ignored := [name for name in ignored_settings(model) if name != "repetition_penalty"]:
            log.warning("export: generation_config.json has %s, which bundles do not apply", ", ".join(ignored))
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "save_pretrained"):
        fix = "Pass AutoTokenizer.from_pretrained(...)."
        argument(tokenizer, "export(tokenizer=...)", fix).wrong("a tokenizer of transformers", type(tokenizer).__name__)
    tokenizer.save_pretrained(staging)
    for path in staging.iterdir():  # unused additional chat templates
        if path.is_dir():
            shutil.rmtree(path)
    if hasattr(tokenizer, "apply_chat_template"):
        write_chat(tokenizer, staging)
