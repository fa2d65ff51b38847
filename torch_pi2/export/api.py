"""``torch_pi2.export(model, folder)``: an optimised model as a folder that ExecuTorch runs (docs/BUNDLE.md)."""

from __future__ import annotations

import inspect
import logging
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.checkpoint.card import keep_card
from torch_pi2.decode.generate import not_done
from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.chat import write_chat
from torch_pi2.export.describe import manifest_of, runner_constants
from torch_pi2.export.failures import named_failures
from torch_pi2.export.hot import CHUNK
from torch_pi2.export.linears import linears_of, prepare_rest
from torch_pi2.export.manifest import PROGRAM_FILE, STORE_FILE
from torch_pi2.export.markers import registered
from torch_pi2.export.methods import Methods, Source, chunks_of, decoder_methods_of, module_methods
from torch_pi2.export.request import Request, check_bundle_folder, check_request, sorted_sizes
from torch_pi2.export.standins import delegated_copy, exported_layers
from torch_pi2.export.store import NO_STORE, StoreFacts, blob_of, write_store
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.ops.activations import check_plain
from torch_pi2.rewrite.handle import parts_of

_log = logging.getLogger("torch_pi2")


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
    outliers: int = 64,
    blocks: int | str = "auto",
    quantization: str = "rtn",
    weight_sharing: bool = True,
    calibration: Any = None,
    progress: bool = False,
) -> Path:
    """Write an optimised ``model`` as a bundle: ``model.pte``, ``model.pi2``, tokenizer and ``manifest.json``.

    Feed-forward layers become calls of our delegate, whose weights stay in the store ``model.pi2`` (none of them is in
    ``model.pte``); everything else goes to XNNPACK. ``model`` is left as it was. What is in ``folder`` from an earlier
    export is replaced when all is written.

    Args:
        model: that :func:`torch_pi2.optimize` or :func:`torch_pi2.load` gave, in memory or over a store. A Hugging Face
            decoder gets the methods ``forward``, ``decode_bN`` for each of ``batches``, and ``fork``, all over one KV
            cache; any other module the method ``forward``, traced with ``args``, ``kwargs`` and ``dynamic_shapes``
            as ``torch.export.export`` takes them.
        target: ``xnnpack`` (CPU) or ``qnn:SM8650`` (docs/QNN.md has the others): hot neurons on Qualcomm's NPU.
        tokenizer: written to the bundle.
        max_tokens: of a sequence, prompt and answer together. max_prompt: that one call of ``forward`` takes; memory is
            planned for as many, and longer prompts go in pieces.
        linears: layers outside feed-forward ones in a float model: ``float32``, ``int8`` or ``int4`` (lossy; XNNPACK's
            8-bit activations). Quantised ones, also as a GGUF file had them, stay as they are.
        kv: keys and values of a decoder: ``float32``, ``float16`` or ``int8`` (with a scale for each token and head;
            both are lossy, and a half and a quarter of the memory).
        hot: batch size -> chunks of 512 neurons that the accelerator computes in each layer. Default: from the
            statistics. With ``xnnpack`` XNNPACK stands in for the accelerator (default: there is none).
        hot_prompts: sizes of pieces in which prompts are read by methods ``prefill_N``, whole layers by the
            accelerator; the last one is filled up. Without them, or without room, ``forward`` reads. Default: one of
            128 tokens on an NPU whose memory holds the feed-forward layers, else none.
        hot_attention: in which methods the accelerator computes attention with its projections, too, over keys and
            values that it is given: ``none``, ``prompts`` (those of ``hot_prompts``) or ``all`` (decoding, too, with
            the last linear layer). ``kv`` is float32 or float16 then. Default: ``prompts`` on an NPU that holds it.
        precision, outliers, blocks, quantization, weight_sharing: of the NPU's part, see
            :class:`torch_pi2.export.qnn.Settings`.
        calibration: text (with ``tokenizer``), ids or batches, as for :func:`torch_pi2.optimize`: inputs of hot parts
            are seen on it. Needed by ``qnn`` unless ``precision`` is ``fp16``.
        progress: bars on standard error in a terminal, and else to the log (:mod:`torch_pi2.base.progress`).

    Raises:
        ConfigError: a dense model, a setting that makes no sense, or more ``max_tokens`` than what is traced is right
            for (the message has the most). UnsupportedModelError: hot parts of experts, or something that torch,
            transformers or ExecuTorch cannot export; the message has the reason. LibraryMissingError:
            executorch is not installed, or for ``qnn`` Qualcomm's libraries are not. ArtifactError: the folder holds
            other files, or cannot be written. CalibrationError: see ``calibration``.
    """
    request = Request(
        target,
        max_tokens,
        max_prompt,
        sorted_sizes(batches),
        linears,
        kv,
        hot,
        None if hot_prompts is None else sorted_sizes(hot_prompts),
        hot_attention,
        precision,
        outliers,
        blocks,
        quantization,
        weight_sharing,
        progress,
    )
    check_request(request)
    folder = Path(folder).resolve()
    check_bundle_folder(folder)
    parts, layers = parts_of(model), exported_layers(model)
    traced = args is not None or kwargs is not None
    decoder = not traced and hasattr(model, "config") and hasattr(model, "generate")
    _check_model(model, layers, request, decoder, traced, dynamic_shapes)
    source = Source(model, layers, parts, linears_of(model, linears), decoder, tokenizer, calibration)
    chunks = chunks_of(source, request)
    with ExitStack() as stack:
        staging = stack.enter_context(replacing_folder(folder))
        name = stack.enter_context(registered(layers))
        _save_small(model, tokenizer, staging)
        facts = write_store(staging / STORE_FILE, layers, parts.plan, progress=progress) if layers else NO_STORE
        with named_failures(f"export of {source.name}", "a model that torch can copy and run with a cache"):
            private = delegated_copy(model, layers, name)
            prepare_rest(private, linears)
            if decoder:
                made = decoder_methods_of(source, private, request, staging, chunks)
            else:
                made = module_methods(private, args, kwargs, dynamic_shapes)
        planned = _write_program(staging / PROGRAM_FILE, source, made, request, facts)
        manifest = manifest_of(source, request, facts, staging, made, planned)
        manifest.save(staging)
        manifest.verify(staging)
        keep_card(folder, staging)
    return folder


def _check_model(
    model: nn.Module, layers: Sequence[SparseLayer], request: Request, decoder: bool, traced: bool, dynamic_shapes: Any
) -> None:
    """``traced``: example inputs were given, so that ``forward`` is traced whatever the model is."""
    what = f"export of {type(model).__name__}"
    for home in layers if request.splits else ():
        check_plain(home.site.activation, "hot parts of bundles")
    if dynamic_shapes is not None and not traced:
        raise ConfigError(
            f"{what} with dynamic_shapes",
            expected="the example inputs that they are of (args=... or kwargs=...)",
            found="none",
            fix="Leave it out for a Hugging Face decoder, whose methods have shapes of their own.",
        )
    if not decoder and not traced:
        raise ConfigError(
            what,
            expected="example inputs (args=...), as it is no Hugging Face decoder",
            found="none",
            fix="Pass what torch.export.export takes.",
        )
    defaults, of_decoders = inspect.signature(export).parameters, ("max_tokens", "max_prompt", "batches", "kv")
    ignored = [name for name in of_decoders if getattr(request, name) != defaults[name].default]
    if ignored and not decoder:
        raise ConfigError(
            f"{what} with {ignored[0]}",
            expected="a Hugging Face decoder, which has a KV cache",
            found="another module, or a decoder with example inputs (args)",
            fix="Leave it out.",
        )
    if request.splits and not decoder:
        raise ConfigError(
            f"{what} with hot parts",
            expected="a Hugging Face decoder, whose batch sizes are known",
            found="another module",
            fix="Export it with target='xnnpack' and without hot.",
        )
    if request.splits and not layers:
        raise UnsupportedModelError(
            f"{what} with hot parts",
            expected="feed-forward layers of neurons",
            found="none",
            fix="Import the file with neurons='all', or export with target='xnnpack' and without hot.",
        )
    mixtures = [layer.site.key for layer in layers if isinstance(layer, SparseExperts)]
    if request.splits and mixtures:
        raise UnsupportedModelError(
            f"{what} with hot parts",
            expected="feed-forward layers without experts",
            found=f"{len(mixtures)} mixtures of experts ({mixtures[0]})",
            fix="Export it with target='xnnpack' and without hot: the CPU computes experts.",
        )


def _write_program(path: Path, source: Source, made: Methods, request: Request, facts: StoreFacts) -> tuple[int, int]:
    """Trace, check, lower and write methods; bytes of ExecuTorch's memory for them, and of XNNPACK's."""
    from torch_pi2.export.lower import lower, trace

    layers = source.layers
    preload_from = [min(of_layer) * CHUNK for of_layer in zip(*made.chunks.values())] or [0] * len(layers)

    def blob(layer: int, role: int, first: int, queue: int) -> bytes:
        """Of a delegate operator. The store is preloaded from the first neuron that decoding wants."""
        wanted = min(preload_from[layer], layers[layer].site.intermediate)
        return blob_of(facts, layers, layer, role, first, queue, wanted).pack()

    constants = runner_constants(source, request) if source.decoder else {}
    programs = trace(made.methods, source.name, progress=request.progress)
    made.check(programs)
    program = lower(programs, source.name, blob=blob, constants=constants, progress=request.progress)
    atomic_write(path, program.pieces)
    return program.arena_bytes, program.workspace_bytes


def _save_small(model: nn.Module, tokenizer: Any, staging: Path) -> None:
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.to_json_file(staging / "config.json", use_diff=False)  # type: ignore[union-attr]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.to_json_file(staging / "generation_config.json")
        if asked := [name for name in not_done(model) if name != "repetition_penalty"]:
            _log.warning("export: generation_config.json has %s, which bundles do not apply", ", ".join(asked))
    if tokenizer is None:
        return
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            "export(tokenizer=...)",
            expected="a tokenizer of transformers",
            found=type(tokenizer).__name__,
            fix="Pass AutoTokenizer.from_pretrained(...).",
        )
    tokenizer.save_pretrained(staging)
    for path in staging.iterdir():  # further chat templates: nobody reads them there
        if path.is_dir():
            shutil.rmtree(path)
    if hasattr(tokenizer, "apply_chat_template"):
        write_chat(tokenizer, staging)
