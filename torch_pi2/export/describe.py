"""The manifest of a new bundle with its memory needs, and the contents of a ``.pte``."""

import importlib.metadata
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.package import __version__, needed
from torch_pi2.decode.budget import engine_bytes, scratch_bytes, wanted_neurons
from torch_pi2.decode.sequence import end_tokens
from torch_pi2.errors import ArtifactError
from torch_pi2.export import manifest
from torch_pi2.export.decoder import prompt_sizes, sizes_of
from torch_pi2.export.executorch import EXECUTORCH
from torch_pi2.export.manifest import CHUNK
from torch_pi2.export.methods import Methods, Source
from torch_pi2.export.settings import ExportSettings
from torch_pi2.export.store import StoreFacts, kind_of, kinds_of
from torch_pi2.formats import FLOATS
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.method import LOSSY
from torch_pi2.types.offload import OffloadConfig

#: The runner with libraries, stacks and thread pool (11 MB on x86-64), and the 4 MiB buffer that fills the cache.
_PROCESS_BYTES = 20 << 20
#: Memory of a tokenizer in sizes of its file: while it is read, before all else, and afterwards (measured: 6, 2.6).
_TOKENIZER_READ, _TOKENIZER_KEPT = 8, 4


def manifest_of(
    source: Source, settings: ExportSettings, facts: StoreFacts, staging: Path, methods: Methods, planned: Any
) -> manifest.Manifest:
    """The manifest of the files in ``staging``; ``planned``: bytes of ExecuTorch's arena and XNNPACK's workspace."""
    model, layers, decoder, files = source.model, source.layers, source.decoder, manifest.describe_files(staging)
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if decoder or not layers else None
    fixed = {"forward": (1, settings.forward_tokens if decoder else 1), "fork": (1, 1)}
    entries = {}
    for name in methods.specs:
        chunks, sizes = tuple(methods.chunks.get(name, ())), fixed.get(name) or sizes_of(name)
        entries[name] = manifest.MethodEntry(name.partition("_")[0], *sizes, chunks)
    versions = {"torch_pi2": __version__, "torch": torch.__version__, "executorch": EXECUTORCH}
    for package, used in (("transformers", decoder), ("torchao", settings.linears != "float32")):
        versions |= {package: importlib.metadata.version(package)} if used else {}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    plan = source.parts.plan
    chosen = chosen_shares(config, [layer.site for layer in plan.layers])
    return manifest.Manifest(
        kind="decoder" if decoder else "module",
        target=settings.target,
        made_by=versions,
        files=files,
        model=manifest.Model(
            class_name=source.name,
            model_type=getattr(config, "model_type", None),
            model_hash=plan.model_hash,
            weights=kinds_of(layers),
            linears=source.linears,
            layers=len(facts.neuron_bytes),
            hidden=layers[0].site.hidden if layers else text.hidden_size,
            vocab=text.vocab_size if decoder else None,
        ),
        methods=entries,
        max_tokens=settings.max_tokens if decoder else 1,
        lanes=max(settings.batches) if decoder else 1,
        eos=tuple(sorted(end_tokens(model, None, source.tokenizer))) if decoder else (),
        bos=_bos(model, source.tokenizer) if decoder else None,
        lossy=tuple(_lossy(source, settings, methods)),
        pte_bytes=files[manifest.PROGRAM_FILE].bytes,
        store_bytes=facts.file_bytes,
        ffn_bytes=facts.ffn_bytes,
        fixed_bytes=_fixed_bytes(
            staging,
            # methods share float weights that XNNPACK has packed: pi2_et_share_weights
            1 if source.linears == "float32" else sum(m.kind != "fork" for m in entries.values()),
            planned,
            facts.predictor_bytes,
            settings.max_tokens,
        ),
        token_bytes=round(
            sum(
                wanted_neurons(layer) * chosen.get(layer.site.experts, 1.0) * size
                for layer, size in zip(plan.layers, facts.neuron_bytes)
            )
        ),
    )


def _fixed_bytes(folder: Path, packed_copies: int, planned: tuple[int, int], predictors: int, tokens: int) -> int:
    """Bound on a process's memory without the neuron cache, mapped files included (docs/BUNDLE.md). ``packed_copies``:
    of weights that XNNPACK repacks. ``predictors``: bytes, with biases. ``tokens``: most of one call.
    """
    tokenizer = (folder / "tokenizer.json").stat().st_size if (folder / "tokenizer.json").is_file() else 0
    packed = describe_program(folder / manifest.PROGRAM_FILE)["named_bytes"]
    size = (folder / manifest.PROGRAM_FILE).stat().st_size + (packed_copies - 1) * packed + sum(planned) + predictors
    if (folder / manifest.STORE_FILE).is_file():
        with StoreReader(folder / manifest.STORE_FILE) as store:
            entries = store.entries
        size += sum(engine_bytes(entries, OffloadConfig())) + max(scratch_bytes(e, tokens) for e in entries)
    return _PROCESS_BYTES + max(_TOKENIZER_KEPT * tokenizer + size, _TOKENIZER_READ * tokenizer)


def runner_constants(source: Source, settings: ExportSettings) -> dict[str, int | bool | list[int]]:
    """Constant methods that describe a decoder, under the names of ExecuTorch's LLM runner."""
    config: Any = source.model.config
    constants: dict[str, Any] = {manifest.CONTEXT_METHOD: settings.max_tokens}
    constants["get_max_seq_len"] = settings.forward_tokens  # of one call
    constants["get_vocab_size"] = config.get_text_config(decoder=True).vocab_size
    constants |= {"use_kv_cache": True, "enable_dynamic_shape": True}
    constants["get_eos_ids"] = sorted(end_tokens(source.model, None, source.tokenizer))
    constants["get_bos_id"] = _bos(source.model, source.tokenizer)
    return {name: value for name, value in constants.items() if value not in (None, [])}


def _bos(model: nn.Module, tokenizer: Any) -> int | None:
    bos: Any = getattr(tokenizer, "bos_token_id", None)
    return getattr(model.config, "bos_token_id", None) if bos is None else bos


def _lossy(source: Source, settings: ExportSettings, methods: Methods) -> Iterator[str]:
    """Differences from the model in floats, in words."""
    layers, soc = source.layers, settings.soc
    predicted = sorted({layer.method for layer in source.parts.plan.layers} & {*LOSSY})
    if predicted:
        yield f"cold neurons chosen by {' and '.join(predicted)}"
    if any(kind_of(layer) not in FLOATS for layer in layers):
        yield f"neurons in {kinds_of(layers)}"
    if source.linears != "float32":
        yield f"linear layers in {source.linears}"
    if source.decoder and settings.kv != "float32":
        yield f"keys and values in {settings.kv}"
    if any(m.int8_activations for m in (*layers, *(m for m in source.model.modules() if isinstance(m, QuantLinear)))):
        yield "inputs of layers in int8"
    if soc is not None:
        prompts = prompt_sizes(methods.specs)
        pieces = f"all neurons there in pieces of {' and '.join(map(str, prompts))}" if prompts else "by the CPU"
        yield f"hot neurons in {settings.precision} on {soc} when decoding (chunks of {CHUNK}); prompts {pieces}"
        if methods.hot_attention:
            kind = "in fp16" if settings.precision == "fp16" else "quantised (qnn.json)"
            yield f"attention {kind} on {soc} in those pieces"


#: Bytes of a file's head with an extended header, as in ExecuTorch's C++.
_HEAD = 64


def describe_program(path: str | Path) -> dict[str, Any]:
    """The contents of the program at ``path``, without reading its weights, by ExecuTorch's internal reader: it has no
    public one in Python.

    Returns:
        ``methods``: name -> ``delegates`` (backend -> calls) and ``operators`` (CPU kernel -> calls).
            ``named_bytes``: of the weights that delegates have by name.

    Raises:
        LibraryMissingError: ExecuTorch is not installed. ArtifactError: the file is missing, cut, or no program.
    """
    with needed("executorch", "export", "it, to read a .pte"):
        from executorch.exir._serialize import _program as reader
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
            header = reader._get_extended_header(head)
            size, whole = header.program_size if header else None, path.stat().st_size
            data = head + (file.read() if size is None else file.read(max(0, size - len(head))))
            if len(data) < 8 or data[4:6] != b"ET":
                raise ValueError("no program of ExecuTorch")
            end = len(data) if header is None else header.segment_base_offset + header.segment_data_size
            if whole < end or (size is not None and len(data) < size):
                raise ValueError(f"{whole} of {end} bytes")
            program = reader._flatbuffer_to_program(data)
        methods = {plan.name: _method(plan) for plan in program.execution_plan}
        named = {entry.segment_index for entry in program.named_data or ()}
        return {"methods": methods, "named_bytes": sum(program.segments[i].size for i in named)}
    except Exception as error:  # the reader raises many types for damage
        expected, fix = "a whole program of ExecuTorch", "Copy the bundle again, or export again."
        found = f"damage ({str(error) or type(error).__name__})"
        raise ArtifactError(str(path), expected=expected, found=found, fix=fix) from error


def _method(plan: Any) -> dict[str, dict[str, int]]:
    """Calls of delegates and operators in a method."""
    delegates: Counter[str] = Counter()
    operators: Counter[str] = Counter()
    for instruction in (i.instr_args for chain in plan.chains for i in chain.instructions):
        if hasattr(instruction, "delegate_index"):
            delegates[plan.delegates[instruction.delegate_index].id] += 1
        elif hasattr(instruction, "op_index"):
            found = plan.operators[instruction.op_index]
            operators[f"{found.name}.{found.overload}" if found.overload else found.name] += 1
    return {"delegates": dict(delegates.most_common()), "operators": dict(operators.most_common())}
