"""``torch_pi2.export(model, folder)``: an optimised model as a folder that ExecuTorch runs (docs/BUNDLE.md)."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torch_pi2.base.arguments import checked
from torch_pi2.base.files import atomic_write, replacing_folder
from torch_pi2.base.version import __version__
from torch_pi2.decode.budget import wanted_neurons
from torch_pi2.decode.executorch import EXECUTORCH, check_executorch
from torch_pi2.errors import ArtifactError, CalibrationError, ConfigError
from torch_pi2.export.calibrate import inputs_of
from torch_pi2.export.chat import write_chat
from torch_pi2.export.check import check_traced
from torch_pi2.export.contents import describe_program
from torch_pi2.export.decoder import Lanes, decoder_methods
from torch_pi2.export.failures import named_failures
from torch_pi2.export.hot import CHUNK, chunks_per_batch, hot_chunks
from torch_pi2.export.linears import LINEARS, linears_of, prepare_rest
from torch_pi2.export.manifest import (
    CONTEXT_METHOD,
    MANIFEST_FILE,
    PROGRAM_FILE,
    STORE_FILE,
    FileEntry,
    Manifest,
    Model,
    describe_files,
)
from torch_pi2.export.manifest import Method as MethodEntry
from torch_pi2.export.markers import registered
from torch_pi2.export.memory import fixed_bytes
from torch_pi2.export.standins import delegated_copy, exported_layers, split_hot_cold
from torch_pi2.export.store import StoreFacts, blob_of, kind_of, write_store
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.rewrite.handle import Optimized, parts_of
from torch_pi2.spec.config import Config
from torch_pi2.store.storefile import StoreReader

if TYPE_CHECKING:
    from torch_pi2.export.lower import Method


#: What was traced, by the names of methods; and what sees that it is right.
Programs = Mapping[str, torch.export.ExportedProgram]
Check = Callable[[Programs], None]
#: Precision, outliers and weight sharing of :class:`torch_pi2.export.qnn.Settings`.
_NPU_DEFAULTS = ("w4a16", 64, True)


@dataclass(frozen=True)
class _Request:
    """What :func:`export` was asked for."""

    target: str
    max_tokens: int
    max_prompt: int
    batches: tuple[int, ...]
    linears: str
    hot: Mapping[int, int] | None
    precision: str
    outliers: int
    weight_sharing: bool
    progress: bool

    @property
    def soc(self) -> str | None:
        return self.target.partition(":")[2] or None

    @property
    def splits(self) -> bool:
        """Whether layers have a hot part for an accelerator."""
        return self.soc is not None or self.hot is not None


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
    hot: Mapping[int, int] | None = None,
    precision: str = "w4a16",
    outliers: int = 64,
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
            decoder gets the methods ``prefill``, ``decode_bN`` for each of ``batches``, and ``fork``, all over one KV
            cache; any other module the method ``forward``, traced with ``args``, ``kwargs`` and ``dynamic_shapes``
            as ``torch.export.export`` takes them.
        target: ``xnnpack`` (CPU) or ``qnn:SM8650`` (also SM8550, SM8750): hot neurons on Qualcomm's NPU.
        tokenizer: written to the bundle.
        max_tokens: of a sequence, prompt and answer together. max_prompt: that one call of ``prefill`` takes; memory is
            planned for as many, and longer prompts go in pieces.
        linears: layers outside feed-forward ones in a float model: ``float32``, ``int8`` or ``int4`` (lossy; XNNPACK's
            8-bit activations). Those of a model with int4 or int8 weights stay as they are.
        hot: batch size -> chunks of 512 neurons that the accelerator computes in each layer. Default: from the
            statistics. With ``xnnpack`` XNNPACK stands in for the accelerator (default: there is none).
        precision, outliers, weight_sharing: of the NPU's part, see :class:`torch_pi2.export.qnn.Settings`.
        calibration: text (with ``tokenizer``), ids or batches, as for :func:`torch_pi2.optimize`: inputs of hot parts
            are seen on it. Needed by ``qnn`` unless ``precision`` is ``fp16``.
        progress: progress bars on standard error (terminals only).

    Raises:
        ConfigError: a dense model, a setting that makes no sense, or more ``max_tokens`` than what is traced is right
            for (the message has the most). UnsupportedModelError: experts, a sliding window, or something that torch,
            transformers or ExecuTorch cannot export; the message has the reason. LibraryMissingError:
            executorch is not installed, or for ``qnn`` Qualcomm's libraries are not. ArtifactError: the folder holds
            other files, or cannot be written. CalibrationError: see ``calibration``.
    """
    request = _Request(
        target, max_tokens, max_prompt, _sorted(batches), linears, hot, precision, outliers, weight_sharing, progress
    )
    _check(request)
    folder = Path(folder).resolve()
    check_bundle_folder(folder)
    parts, layers = parts_of(model), exported_layers(model)
    traced = args is not None or kwargs is not None
    decoder = not traced and hasattr(model, "config") and hasattr(model, "generate")
    if dynamic_shapes is not None and not traced:
        raise ConfigError(
            f"export of {type(model).__name__} with dynamic_shapes",
            expected="the example inputs that they are of (args=... or kwargs=...)",
            found="none",
            fix="Leave it out for a Hugging Face decoder, whose methods have shapes of their own.",
        )
    if not decoder and not traced:
        raise ConfigError(
            f"export of {type(model).__name__}",
            expected="example inputs (args=...), as it is no Hugging Face decoder",
            found="none",
            fix="Pass what torch.export.export takes.",
        )
    if request.splits and not decoder:
        raise ConfigError(
            f"export of {type(model).__name__} with hot parts",
            expected="a Hugging Face decoder, whose batch sizes are known",
            found="another module",
            fix="Export it with target='xnnpack' and without hot.",
        )
    with ExitStack() as stack:
        staging = stack.enter_context(replacing_folder(folder))
        name = stack.enter_context(registered(layers))
        _save_small(model, tokenizer, staging)
        facts = write_store(staging / STORE_FILE, layers, parts.plan, progress=progress)
        rest = linears_of(model, request.linears)
        chunks: dict[str, list[int]] = {}
        check: Check = lambda _: None  # noqa: E731
        with named_failures(f"export of {type(model).__name__}", "a model that torch can copy and run with a cache"):
            private = delegated_copy(model, layers, name)
            prepare_rest(private, request.linears)
            if decoder:
                methods, chunks, check = _decoder(
                    model, private, layers, parts, request, rest, staging, tokenizer, calibration
                )
            else:
                methods = _module(private, args, kwargs, dynamic_shapes)
        preload_from = [min(of_layer) * CHUNK for of_layer in zip(*chunks.values())] or [0] * len(layers)
        blob = partial(_blob, facts, layers, preload_from)
        constants = {CONTEXT_METHOD: request.max_tokens} if decoder else {}
        planned = _write_program(
            staging / PROGRAM_FILE, methods, check, constants, name, blob, type(model).__name__, progress
        )
        files = describe_files(staging)
        manifest = _manifest(
            model, layers, parts, request, facts, staging, files, chunks, rest, planned, decoder, tokenizer
        )
        manifest.save(staging)
        manifest.verify(staging)
    return folder


def _sorted(batches: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(sorted({*batches}))
    except TypeError:
        return ()  # refused by name


def check_bundle_folder(folder: Path) -> None:
    """Raises ArtifactError if ``folder`` holds anything but an earlier bundle: it is replaced as a whole."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    ours = {MANIFEST_FILE}
    if (folder / MANIFEST_FILE).is_file():
        with suppress(ArtifactError):  # somebody else's manifest.json
            ours |= Manifest.load(folder, verify=False).files.keys()
    if not folder.is_dir() or ours == {MANIFEST_FILE} or {path.name for path in folder.iterdir()} - ours:
        raise ArtifactError(
            str(folder),
            expected="a new or empty folder, or an earlier bundle",
            found="other files" if folder.is_dir() else "a file",
            fix="Choose another folder.",
        )


def _check(request: _Request) -> None:
    """What can be refused before anything is done."""
    whole = [type(n) is int for n in (request.max_tokens, request.max_prompt, *request.batches)]
    npu = (request.precision, request.outliers, request.weight_sharing)
    for name, good, expected in (
        ("max_tokens", all(whole) and request.max_tokens >= 3, "a whole number, 3 or more"),
        ("max_prompt", all(whole) and request.max_prompt >= 2, "a whole number, 2 or more"),
        ("batches", all(whole) and bool(request.batches) and min(request.batches) >= 1, "batch sizes of 1 or more"),
        ("linears", request.linears in LINEARS, ", ".join(LINEARS)),
        (
            "precision",
            request.soc is not None or npu == _NPU_DEFAULTS,
            "it, outliers and weight_sharing left out where target is not an NPU's",
        ),
        ("hot", request.hot is None or not {*request.hot} - {*request.batches}, "chunks for sizes of batches alone"),
    ):
        if not good:
            found = repr(getattr(request, name))
            raise ConfigError(f"export({name}=...)", expected=expected, found=found, fix="Leave it out.")
    kind, _, soc = request.target.partition(":")
    if request.target != "xnnpack" and (kind != "qnn" or not soc):
        raise ConfigError(
            "export(target=...)",
            expected="'xnnpack', or 'qnn:' and an SoC such as 'qnn:SM8650'",
            found=repr(request.target),
            fix="Choose one of them.",
        )
    check_executorch()
    if request.soc is not None:
        from torch_pi2.export import qnn

        qnn.check(_qnn_settings(request))


def _qnn_settings(request: _Request) -> Any:
    from torch_pi2.export import qnn

    assert request.soc is not None
    return qnn.Settings(
        request.soc, request.precision, outliers=request.outliers, weight_sharing=request.weight_sharing
    )


def _decoder(
    model: nn.Module,
    private: nn.Module,
    layers: Sequence[SparseFFN],
    parts: Optimized,
    request: _Request,
    rest: str,
    staging: Path,
    tokenizer: Any,
    calibration: Any,
) -> tuple[dict[str, Method], dict[str, list[int]], Check]:
    """Methods of a Hugging Face decoder, chunks of each layer by method, and what has to be seen of traced methods."""
    from torch.export import Dim

    from torch_pi2.export.lower import Method

    chunks: dict[str, list[int]] = {}
    prepare: dict[str, Callable[[], None]] = {}
    if request.splits:
        frequency = parts.plan.made_by.get("config", {}).get("hot_frequency", Config().hot_frequency)
        found = chunks_per_batch(
            layers, request.batches, parts.stats, request.hot, hot_frequency=frequency, hardware=parts.plan.hardware
        )
        chunks = {f"decode_b{batch}": found[batch] for batch in request.batches}
        prepare = _split(model, private, layers, chunks, request, staging, tokenizer, calibration)
    if "prefill" in prepare:
        prepare["prefill"]()
    lanes = Lanes(private, max(request.batches), request.max_tokens)
    longest = min(request.max_prompt, request.max_tokens - 1)
    length = Dim.DYNAMIC(min=1, max=longest)
    example = min(8, longest)
    tokens = torch.zeros((1, example), dtype=torch.int64)
    prompt = (tokens, torch.arange(example)[None], torch.zeros(1, dtype=torch.int64))
    methods: dict[str, Method] = {}
    for name, module in decoder_methods(lanes, request.batches).items():
        if name == "prefill":
            methods[name] = Method(module, prompt, None, ({1: length}, {1: length}, None), prepare.get(name))
        elif name == "fork":
            methods[name] = Method(module, (torch.zeros(lanes.lanes, dtype=torch.int64),))
        else:
            step = torch.zeros((int(name.removeprefix("decode_b")), 1), dtype=torch.int64)
            methods[name] = Method(module, (step, step.clone()), prepare=prepare.get(name))

    def check(programs: Programs) -> None:
        prepare.get("prefill", lambda: None)()
        rough = any(f.has_predictor or f.threshold > 0 or f.int8_activations for f in layers)
        smooth = rest == "float32" and not rough
        # hot parts may be compiled, and have neurons that predictors leave out
        check_traced(lanes, programs, max_prompt=longest, smooth=smooth, decode=not request.splits)

    return methods, chunks, check


def _split(
    model: nn.Module,
    private: nn.Module,
    layers: Sequence[SparseFFN],
    chunks: Mapping[str, list[int]],
    request: _Request,
    staging: Path,
    tokenizer: Any,
    calibration: Any,
) -> dict[str, Callable[[], None]]:
    """Give the layers of ``private`` their hot parts; what is to be done before each method is traced."""
    split = split_hot_cold(private)
    most = [max(of_layer) for of_layer in zip(*chunks.values())]
    hot: list[Any] = [hot_chunks(ffn, most[i]) for i, ffn in enumerate(layers)]
    compiled: Mapping[str, Sequence[nn.Module | None]] = {}
    if request.soc is not None:
        from torch_pi2.export import qnn

        samples = _samples(model, layers, request, calibration, tokenizer)
        graphs = {
            name: qnn.Graph((int(name.removeprefix("decode_b")), 1), of_layers) for name, of_layers in chunks.items()
        }
        lowered = qnn.lower_hot(hot, samples, graphs, _qnn_settings(request))
        atomic_write(staging / "qnn.json", json.dumps(lowered.report, indent=1) + "\n")
        compiled = lowered.modules
        hot.clear()  # what was compiled has the weights

    def whole() -> None:
        for module in split:
            module.hot = None

    def step(name: str) -> None:
        for i, module in enumerate(split):
            module.first = min(chunks[name][i] * CHUNK, layers[i].site.intermediate)
            module.hot = compiled[name][i] if compiled else hot[i]
            if not compiled:
                hot[i].chunks = chunks[name][i]

    return {"prefill": whole} | {name: partial(step, name) for name in chunks}


def _samples(
    model: nn.Module, layers: Sequence[SparseFFN], request: _Request, calibration: Any, tokenizer: Any
) -> Sequence[torch.Tensor | None]:
    if request.precision == "fp16":
        return [None] * len(layers)
    if calibration is None:
        raise CalibrationError(
            f"export(target='{request.target}', precision='{request.precision}')",
            expected="calibration data, on which the inputs of hot parts are seen",
            found="none",
            fix="Pass calibration=text (and tokenizer=...), or precision='fp16'.",
        )
    return inputs_of(model, layers, calibration, tokenizer)


def _module(
    private: nn.Module, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> dict[str, Method]:
    from torch_pi2.export.lower import Method

    def plain(value: Any) -> Any:
        """Inputs of 16-bit models: everything outside of feed-forward layers is float32."""
        sixteen = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if sixteen else value

    args, kwargs = tree_map(plain, (tuple(args or ()), dict(kwargs or {})))
    return {"forward": Method(private, tuple(args or ()), kwargs, dynamic_shapes)}


def _blob(
    facts: StoreFacts,
    layers: Sequence[SparseFFN],
    preload_from: Sequence[int],
    layer: int,
    role: int,
    first: int,
    queue: int,
) -> bytes:
    """The blob of a delegate operator. ``preload_from``: of each layer, the first neuron that decoding wants."""
    wanted = min(preload_from[layer], layers[layer].site.intermediate)
    return blob_of(facts, layers, layer, role, first, queue, wanted).pack()


def _write_program(
    path: Path,
    methods: Mapping[str, Method],
    check: Check,
    constants: Mapping[str, int],
    name: str,
    blob: Callable[[int, int, int, int], bytes],
    model: str,
    progress: bool,
) -> tuple[int, int]:
    """Trace, ``check``, lower and write ``methods``; bytes of ExecuTorch's memory for them, and of XNNPACK's."""
    from torch_pi2.export.lower import lower, trace
    from torch_pi2.export.partitioner import blobs

    with blobs(name, blob):
        programs = trace(methods, model, progress=progress)
        check(programs)
        program = lower(programs, model, constants=constants, progress=progress)
    atomic_write(path, program.data)
    return program.arena_bytes, program.workspace_bytes


def _save_small(model: nn.Module, tokenizer: Any, staging: Path) -> None:
    config = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.to_json_file(staging / "config.json", use_diff=False)  # type: ignore[union-attr]
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.to_json_file(staging / "generation_config.json")
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


def _manifest(
    model: nn.Module,
    layers: Sequence[SparseFFN],
    parts: Optimized,
    request: _Request,
    facts: StoreFacts,
    staging: Path,
    files: Mapping[str, FileEntry],
    chunks: Mapping[str, list[int]],
    rest: str,
    planned: tuple[int, int],
    decoder: bool,
    tokenizer: Any,
) -> Manifest:
    config: Any = getattr(model, "config", None)
    methods = {"forward": MethodEntry("forward", 1, 1)}
    if decoder:
        methods = {"prefill": MethodEntry("prefill", 1, min(request.max_prompt, request.max_tokens - 1))}
        for batch in request.batches:
            name = f"decode_b{batch}"
            methods[name] = MethodEntry("decode", batch, 1, tuple(chunks.get(name, ())))
        if max(request.batches) > 1:
            methods["fork"] = MethodEntry("fork", 1, 1)
    pte = files[PROGRAM_FILE].bytes
    with StoreReader(staging / STORE_FILE) as store:
        entries = store.entries
    tokenizer_file = files.get("tokenizer.json")
    return Manifest(
        kind="decoder" if decoder else "module",
        target=request.target,
        made_by=_made_by(decoder, request),
        files=files,
        model=Model(
            class_name=type(model).__name__,
            model_type=getattr(config, "model_type", None),
            model_hash=parts.plan.model_hash,
            weights=kind_of(layers[0]),
            linears=rest,
            layers=len(layers),
            hidden=layers[0].site.hidden,
            vocab=config.get_text_config(decoder=True).vocab_size if decoder else None,
        ),
        methods=methods,
        max_tokens=request.max_tokens if decoder else 1,
        lanes=max(request.batches) if decoder else 1,
        eos=_eos(model) if decoder else (),
        bos=_bos(model, tokenizer) if decoder else None,
        lossy=tuple(_lossy(parts, layers, request, rest)),
        pte_bytes=pte,
        store_bytes=facts.file_bytes,
        ffn_bytes=facts.bundle_bytes,
        fixed_bytes=fixed_bytes(
            pte,
            describe_program(staging / PROGRAM_FILE)["bytes"]["named"],
            1 if rest == "float32" else sum(m.kind != "fork" for m in methods.values()),  # see pi2_et_share_weights
            *planned,
            facts.predictor_bytes,
            entries,
            request.max_tokens,
            tokenizer_file.bytes if tokenizer_file else 0,
        ),
        token_bytes=sum(wanted_neurons(layer) * size for layer, size in zip(parts.plan.layers, facts.neuron_bytes)),
    )


def _made_by(decoder: bool, request: _Request) -> dict[str, str]:
    found = {"torch_pi2": __version__, "torch": torch.__version__, "executorch": EXECUTORCH}
    if decoder:
        found["transformers"] = importlib.metadata.version("transformers")
    if request.linears != "float32":
        found["torchao"] = importlib.metadata.version("torchao")
    return found | {"python": ".".join(map(str, sys.version_info[:3]))}


def _eos(model: nn.Module) -> tuple[int, ...]:
    found: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)


def _bos(model: nn.Module, tokenizer: Any) -> int | None:
    found: Any = getattr(tokenizer, "bos_token_id", None)
    return getattr(model.config, "bos_token_id", None) if found is None else found


def _lossy(parts: Optimized, layers: Sequence[SparseFFN], request: _Request, rest: str) -> list[str]:
    found = []
    methods = sorted({layer.method for layer in parts.plan.layers} & {"threshold", "lowrank", "signbit"})
    if methods:
        found.append(f"cold neurons chosen by {' and '.join(methods)}")
    if kind_of(layers[0]) in ("int4", "int8"):
        found.append(f"neurons in {kind_of(layers[0])}")
    if rest != "float32":
        found.append(f"linear layers in {rest}")
    if layers[0].int8_activations:
        found.append("inputs of layers in int8")
    if request.soc is not None:
        found.append(
            f"hot neurons in {request.precision} on {request.soc} when decoding (chunks of {CHUNK}); prompts by the CPU"
        )
    return found
