"""The manifest of a bundle that was just written."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.version import __version__
from torch_pi2.decode.budget import wanted_neurons
from torch_pi2.decode.executorch import EXECUTORCH
from torch_pi2.export.contents import describe_program
from torch_pi2.export.decoder import sizes_of
from torch_pi2.export.hot import CHUNK
from torch_pi2.export.manifest import CONTEXT_METHOD, PROGRAM_FILE, STORE_FILE, Manifest, Method, Model, describe_files
from torch_pi2.export.memory import fixed_bytes
from torch_pi2.export.methods import Methods, Source
from torch_pi2.export.request import Request
from torch_pi2.export.store import StoreFacts, kind_of, kinds_of
from torch_pi2.formats import FLOATS
from torch_pi2.graph.routed import chosen_shares
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.store.storefile import StoreReader
from torch_pi2.store.superblock import LayerEntry
from torch_pi2.types.method import LOSSY


def manifest_of(
    source: Source,
    request: Request,
    facts: StoreFacts,
    staging: Path,
    made: Methods,
    planned: tuple[int, int],
) -> Manifest:
    """Of the files in ``staging``. ``planned``: bytes of ExecuTorch's memory for the methods, and of XNNPACK's."""
    model, layers, decoder, files = source.model, source.layers, source.decoder, describe_files(staging)
    config: Any = getattr(model, "config", None)
    methods = {"forward": Method("forward", 1, request.prompt_tokens if decoder else 1)}
    if decoder:
        for batch in request.batches:
            name = f"decode_b{batch}"
            methods[name] = Method("decode", batch, 1, tuple(made.chunks.get(name, ())))
        for name, of_layers in made.chunks.items():
            if name.startswith("prefill_"):
                methods[name] = Method("prefill", *sizes_of(name), tuple(of_layers))
        if max(request.batches) > 1:
            methods["fork"] = Method("fork", 1, 1)
    pte = files[PROGRAM_FILE].bytes
    entries: Sequence[LayerEntry] = ()
    if layers:
        with StoreReader(staging / STORE_FILE) as store:
            entries = store.entries
    tokenizer_file = files.get("tokenizer.json")
    chosen = chosen_shares(config, [layer.site for layer in source.parts.plan.layers])
    return Manifest(
        kind="decoder" if decoder else "module",
        target=request.target,
        made_by=_made_by(decoder, request),
        files=files,
        model=Model(
            class_name=source.name,
            model_type=getattr(config, "model_type", None),
            model_hash=source.parts.plan.model_hash,
            weights=kinds_of(layers),
            linears=source.rest,
            layers=len(facts.neuron_bytes),
            hidden=layers[0].site.hidden if layers else config.get_text_config(decoder=True).hidden_size,
            vocab=config.get_text_config(decoder=True).vocab_size if decoder else None,
        ),
        methods=methods,
        max_tokens=request.max_tokens if decoder else 1,
        lanes=max(request.batches) if decoder else 1,
        eos=_eos(model) if decoder else (),
        bos=_bos(model, source.tokenizer) if decoder else None,
        lossy=tuple(_lossy(source, request, methods, made.hot_attention)),
        pte_bytes=pte,
        store_bytes=facts.file_bytes,
        ffn_bytes=facts.ffn_bytes,
        fixed_bytes=fixed_bytes(
            pte,
            describe_program(staging / PROGRAM_FILE)["bytes"]["named"],
            1
            if source.rest == "float32"
            else sum(m.kind != "fork" for m in methods.values()),  # see pi2_et_share_weights
            *planned,
            facts.predictor_bytes,
            entries,
            request.max_tokens,
            tokenizer_file.bytes if tokenizer_file else 0,
        ),
        token_bytes=round(
            sum(
                wanted_neurons(layer) * chosen.get(layer.site.experts, 1.0) * size
                for layer, size in zip(source.parts.plan.layers, facts.neuron_bytes)
            )
        ),
    )


def _made_by(decoder: bool, request: Request) -> dict[str, str]:
    found = {"torch_pi2": __version__, "torch": torch.__version__, "executorch": EXECUTORCH}
    if decoder:
        found["transformers"] = importlib.metadata.version("transformers")
    if request.linears != "float32":
        found["torchao"] = importlib.metadata.version("torchao")
    return found | {"python": ".".join(map(str, sys.version_info[:3]))}


def runner_constants(source: Source, request: Request) -> dict[str, int | bool | list[int]]:
    """What a decoder's program says of itself: methods without inputs, under the names of ExecuTorch's LLM runner."""
    config: Any = source.model.config
    found: dict[str, Any] = {
        CONTEXT_METHOD: request.max_tokens,
        "get_max_seq_len": request.prompt_tokens,  # of one call
        "get_vocab_size": config.get_text_config(decoder=True).vocab_size,
        "use_kv_cache": True,
        "enable_dynamic_shape": True,
        "get_eos_ids": list(_eos(source.model)),
        "get_bos_id": _bos(source.model, source.tokenizer),
    }
    return {name: value for name, value in found.items() if value not in (None, [])}


def _eos(model: nn.Module) -> tuple[int, ...]:
    found: Any = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (int(found),)


def _bos(model: nn.Module, tokenizer: Any) -> int | None:
    found: Any = getattr(tokenizer, "bos_token_id", None)
    return getattr(model.config, "bos_token_id", None) if found is None else found


def _lossy(source: Source, request: Request, methods: Mapping[str, Method], hot_attention: str) -> list[str]:
    found, prompts = [], [method.max_tokens for method in methods.values() if method.kind == "prefill"]
    layers, rest = source.layers, source.rest
    lossy = sorted({layer.method for layer in source.parts.plan.layers} & {*LOSSY})
    if lossy:
        found.append(f"cold neurons chosen by {' and '.join(lossy)}")
    if any(kind_of(layer) not in FLOATS for layer in layers):
        found.append(f"neurons in {kinds_of(layers)}")
    if rest != "float32":
        found.append(f"linear layers in {rest}")
    if source.decoder and request.kv != "float32":
        found.append(f"keys and values in {request.kv}")
    if any(m.int8_activations for m in (*layers, *(m for m in source.model.modules() if isinstance(m, QuantLinear)))):
        found.append("inputs of layers in int8")
    if request.soc is not None:
        pieces = f"all neurons there in pieces of {' and '.join(map(str, prompts))}" if prompts else "by the CPU"
        hot = f"hot neurons in {request.precision} on {request.soc} when decoding (chunks of {CHUNK})"
        found.append(f"{hot}; prompts {pieces}")
        if hot_attention != "none":
            where = {"prompts": "in those pieces", "all": "there and when decoding, then with the last linear layer"}
            kind = "in fp16" if request.precision == "fp16" else "quantised (qnn.json)"
            found.append(f"attention {kind} on {request.soc} {where[hot_attention]}")
    return found
