"""What of a model is traced: the methods of a decoder, with hot parts of an accelerator, or a module's ``forward``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torch_pi2.base.files import atomic_write
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.export.attention_parts import place_attention
from torch_pi2.export.calibrate import TOKENS, before_scored, first_batches, inputs_of, scored_rows, tokens_for_weights
from torch_pi2.export.check import check_traced
from torch_pi2.export.decoder import Lanes, decoder_methods, sizes_of
from torch_pi2.export.hot import CHUNK, chunks_per_batch, hot_chunks
from torch_pi2.export.request import Request, qnn_settings
from torch_pi2.export.standins import split_hot_cold
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.handle import Optimized
from torch_pi2.types.config import Config

if TYPE_CHECKING:
    from torch_pi2.export.lower import Method

#: What was traced, by the names of methods; and what sees that it is right.
Programs = Mapping[str, torch.export.ExportedProgram]
Check = Callable[[Programs], None]


@dataclass(frozen=True)
class Source:
    """An optimised model on its way out.

    Attributes:
        layers: its sparse FFNs and mixtures of experts. parts: their plan, statistics. rest: kind of the linear layers
            outside of them. decoder: whether it is a Hugging Face decoder. calibration: as :func:`torch_pi2.export`
            takes it.
    """

    model: nn.Module
    layers: Sequence[SparseLayer]
    parts: Optimized
    rest: str
    decoder: bool
    tokenizer: Any
    calibration: Any

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def plain(self) -> list[SparseFFN]:
        """The layers that are no mixtures: an accelerator may have hot neurons of them."""
        return [layer for layer in self.layers if isinstance(layer, SparseFFN)]


@dataclass(frozen=True)
class Methods:
    """By name: what is traced. chunks: of each layer, on an accelerator. hot_attention: where attention is there, too.
    check: sees that traced ones are right."""

    methods: Mapping[str, Method]
    chunks: Mapping[str, list[int]] = field(default_factory=dict)
    hot_attention: str = "none"
    check: Check = lambda _: None


def decoder_methods_of(
    source: Source, private: nn.Module, request: Request, staging: Path, chunks: Mapping[str, list[int]]
) -> Methods:
    """Of a Hugging Face decoder, of whose copy ``private`` the layers are delegated. chunks: :func:`chunks_of` it."""
    from torch.export import Dim

    from torch_pi2.export.lower import Method, trace

    report: dict[str, Any] = {}
    steps: list[Callable[[str], None]] = []  # what is to be done before a method is traced

    def prepare(method: str) -> None:
        for step in steps:
            step(method)

    lanes = Lanes(private, max(request.batches), request.max_tokens, request.kv)
    where = "none"
    if request.splits:
        first = _calibration(source, request)
        size = _ffn_bytes(source.plain, request, _most(chunks))
        # attention before feed-forward layers: what does not fit is refused before anything is compiled
        where, place = place_attention(source.model, lanes, [*chunks], request, first, report, size)
        steps += [_split(source, private, chunks, request, first, report), *([] if place is None else [place])]
    prepare("forward")
    if report:
        from torch_pi2.export.qnn.report import FILE

        atomic_write(staging / FILE, json.dumps(report, indent=1) + "\n")
    prompts = [sizes_of(name)[1] for name in chunks if name.startswith("prefill_")]
    longest = request.prompt_tokens
    length = Dim.DYNAMIC(min=1, max=longest)
    example = min(8, longest)
    tokens = torch.zeros((1, example), dtype=torch.int64)
    prompt = (tokens, torch.zeros(1, dtype=torch.int64))

    def methods_of(lanes: Lanes, batches: Sequence[int], prompts: Sequence[int] = ()) -> dict[str, Method]:
        methods: dict[str, Method] = {}
        for name, module in decoder_methods(lanes, batches, prompts).items():
            before = partial(prepare, name)
            if name == "forward":
                methods[name] = Method(module, prompt, None, ({1: length}, None), before)
            elif name == "fork":
                methods[name] = Method(module, (torch.zeros(lanes.lanes, dtype=torch.int64),))
            else:
                ids = torch.zeros(sizes_of(name), dtype=torch.int64)
                more = (prompt[1], prompt[1] + 1) if name.startswith("prefill_") else (ids.clone(),)
                methods[name] = Method(module, (ids, *more), prepare=before)
        return methods

    def check(programs: Programs) -> None:
        prepare("forward")
        rough = any(isinstance(layer, SparseExperts) for layer in source.layers)  # routers choose
        rough = rough or any(f.has_predictor or f.threshold > 0 or f.int8_activations for f in source.plain)
        smooth, checked = source.rest == "float32" and not rough, lanes
        if request.kv != "float32":  # what is wrong would not be told from rounding: the same, without
            batch = request.batches[0]
            checked = Lanes(private, batch, request.max_tokens)
            programs = trace(methods_of(checked, (batch,)), source.name)
            prepare("forward")
        # hot parts may be compiled, and have neurons that predictors leave out
        check_traced(checked, programs, max_prompt=longest, smooth=smooth, decode=not request.splits)

    return Methods(methods_of(lanes, request.batches, prompts), chunks, where, check)


def chunks_of(source: Source, request: Request) -> dict[str, list[int]]:
    """Method -> of each layer, as many chunks of hot neurons an accelerator computes in it.

    Raises:
        ConfigError: an NPU's memory does not hold them; or what :func:`~torch_pi2.export.hot.chunks_per_batch` raises.
    """
    if not request.splits:
        return {}
    prompts = _hot_prompts(source.plain, request)
    plan = source.parts.plan
    found = chunks_per_batch(
        source.plain,
        request.batches,
        source.parts.stats,
        request.hot,
        hot_frequency=plan.made_by.get("config", {}).get("hot_frequency", Config().hot_frequency),
        hardware=plan.hardware,
    )
    chunks = {f"decode_b{batch}": found[batch] for batch in request.batches}
    for method, counts in chunks.items():
        _check_memory(source.plain, request, method, counts)
    whole = [-(-ffn.site.intermediate // CHUNK) for ffn in source.plain]
    return chunks | {f"prefill_{tokens}": whole for tokens in prompts}


def _check_memory(layers: Sequence[SparseFFN], request: Request, method: str, chunks: Sequence[int]) -> None:
    """Raises ConfigError: an NPU has not the memory for so many chunks of each layer."""
    if request.soc is None:
        return
    from torch_pi2.export import qnn

    if (size := _ffn_bytes(layers, request, chunks)) > qnn.MOST_BYTES:
        neurons = [min(count * CHUNK, ffn.site.intermediate) for count, ffn in zip(chunks, layers)]
        raise ConfigError(
            f"hot neurons of {len(layers)} layers, graph {method}, for {request.soc}",
            expected=f"at most {qnn.MOST_BYTES >> 20} MiB of weights, which an NPU can have",
            found=f"{size >> 20} MiB in {request.precision} ({min(neurons)} to {max(neurons)} neurons of a layer)",
            fix="Pass fewer chunks (hot), or for fewer bits a weight precision='w4a16', blocks=32.",
        )


def _most(chunks: Mapping[str, Sequence[int]]) -> list[int]:
    """Of each layer the most chunks that a method has."""
    return [max(of_layer) for of_layer in zip(*chunks.values())]


def _hot_prompts(layers: Sequence[SparseFFN], request: Request) -> tuple[int, ...]:
    """Tokens of the methods that read prompts on the accelerator, which then has whole layers.

    Raises:
        ConfigError: an NPU's memory does not hold them.
    """
    prompts = request.hot_prompts
    if request.soc is None:
        return prompts or ()
    from torch_pi2.export import qnn

    size = _ffn_bytes(layers, request)
    if size <= qnn.MOST_BYTES:
        return tuple(n for n in (128,) if n < request.max_tokens) if prompts is None else prompts
    if prompts:
        raise ConfigError(
            f"export(hot_prompts={prompts}) for {request.soc}",
            expected=f"feed-forward layers of at most {qnn.MOST_BYTES >> 20} MiB, which an NPU can have",
            found=f"{len(layers)} with {size >> 20} MiB in {request.precision}",
            fix="Leave it out: prompts are read by the CPU, from the store.",
        )
    return ()


def _ffn_bytes(layers: Sequence[SparseFFN], request: Request, chunks: Sequence[int] | None = None) -> int:
    """Of the weights on an NPU: of whole layers, or of so many chunks of each."""
    if request.soc is None:
        return 0
    weights: int = 0
    for i, site in enumerate(ffn.site for ffn in layers):
        neurons = site.intermediate if chunks is None else min(site.intermediate, chunks[i] * CHUNK)
        weights += neurons * site.rows_per_neuron * site.hidden
    bits: float = qnn_settings(request).bits
    return round(weights * bits / 8)


def _split(
    source: Source,
    private: nn.Module,
    chunks: Mapping[str, list[int]],
    request: Request,
    first: Sequence[Batch],
    report: dict[str, Any],
) -> Callable[[str], None]:
    """Give the layers of ``private`` their hot parts; what places those of a method."""
    split, most = split_hot_cold(private), _most(chunks)
    hot: list[Any] = []
    compiled: Mapping[str, Sequence[nn.Module | None]] = {}
    if request.soc is not None:
        from torch_pi2.export import qnn

        tokens = before_scored(first, _tokens(source, request))
        samples: Sequence[torch.Tensor | None] = [None] * len(source.plain)
        if first:
            samples = inputs_of(source.model, source.plain, first, tokens=tokens)
        graphs = {name: qnn.Graph(sizes_of(name), of_layers) for name, of_layers in chunks.items()}
        one_by_one = map(hot_chunks, source.plain, most)
        lowered = qnn.lower_hot(one_by_one, samples, graphs, qnn_settings(request), progress=request.progress)
        report |= lowered.report | {"loss": _loss(source, lowered.quantized, chunks, first, tokens)}
        compiled = lowered.modules
    else:
        hot = [*map(hot_chunks, source.plain, most)]

    def place(method: str) -> None:
        for i, module in enumerate(split):
            count = chunks[method][i] if method in chunks else 0
            module.first = min(count * CHUNK, source.plain[i].site.intermediate)
            module.hot = None
            if count:
                module.hot = compiled[method][i] if compiled else hot[i]
            if count and not compiled:
                hot[i].chunks = count

    return place


def _calibration(source: Source, request: Request) -> Sequence[Batch]:
    """The first of the data on which hot parts are quantised; empty: they are not."""
    if request.soc is None or request.precision == "fp16":
        return ()
    if source.calibration is None:
        raise CalibrationError(
            f"export(target='{request.target}', precision='{request.precision}')",
            expected="calibration data, on which the inputs of hot parts are seen",
            found="none",
            fix="Pass calibration=text (and tokenizer=...), or precision='fp16'.",
        )
    return first_batches(source.calibration, source.tokenizer, _tokens(source, request))


def _tokens(source: Source, request: Request) -> int:
    """Of which inputs are kept, if there are so many."""
    return tokens_for_weights(source.plain) if request.quantization == "gptq" else TOKENS


def _loss(
    source: Source,
    quantized: Sequence[nn.Module | None],
    chunks: Mapping[str, list[int]],
    first: Sequence[Batch],
    tokens: int,
) -> dict[str, Any] | None:
    """What hot parts cost on data after the first ``tokens``; None: they are not quantised, or it is no rows of ids."""
    from torch_pi2.export.qnn.loss import loss_of

    rows, after = scored_rows(first, tokens)
    if not rows:
        return None
    quantised_on = "the tokens that hot parts were quantised on"
    text = f"calibration data after {quantised_on}" if after else quantised_on
    return {"measured_on": text} | loss_of(source.model, source.plain, quantized, chunks, rows)


def module_methods(
    private: nn.Module, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None, dynamic_shapes: Any
) -> Methods:
    """Of another module, traced with example inputs."""
    from torch_pi2.export.lower import Method

    def plain(value: Any) -> Any:
        """Inputs of 16-bit models: everything outside of feed-forward layers is float32."""
        sixteen = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if sixteen else value

    given: tuple[Any, ...] = tuple(args or ())
    given, kwargs = tree_map(plain, (given, dict(kwargs or {})))
    return Methods({"forward": Method(private, given, kwargs, dynamic_shapes)})
