"""The methods of a bundle: those of a decoder, with hot parts for an accelerator, or ``forward`` of another module.
Each has a module of its own; they share weights and KV cache, and differ in the parts that an accelerator computes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from torch_pi2.base.files import atomic_write
from torch_pi2.errors import CalibrationError, ConfigError
from torch_pi2.export import calibrate, qnn
from torch_pi2.export.decoder import Lanes, Programs, check_traced, method_names, method_spec, prompt_sizes, sizes_of
from torch_pi2.export.delegated import split_hot_cold
from torch_pi2.export.hot import chunks_per_batch, hot_chunks
from torch_pi2.export.hot_attention import AttentionCall, place_attention, with_parts
from torch_pi2.export.manifest import CHUNK
from torch_pi2.export.program import MethodSpec, trace
from torch_pi2.export.qnn.settings import MOST_BYTES, REPORT_FILE, REPORT_FORMAT, REPORT_VERSION
from torch_pi2.export.settings import ExportSettings
from torch_pi2.layers.experts import SparseExperts
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import SparseLayer
from torch_pi2.profiling.data import Batch
from torch_pi2.rewrite.state import SparseState
from torch_pi2.types.config import Config

#: Method -> chunks of hot neurons per layer on the accelerator.
Chunks = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Source:
    """The optimised model that is exported. ``layers``: sparse FFNs and mixtures of experts. ``parts``: their plan and
    statistics. ``linears``: format of other linear layers. ``calibration``: see :func:`torch_pi2.export`.
    """

    model: nn.Module
    layers: Sequence[SparseLayer]
    parts: SparseState
    linears: str
    decoder: bool
    tokenizer: Any
    calibration: Any

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def ffns(self) -> list[SparseFFN]:
        """The layers without experts, whose hot neurons an accelerator may compute."""
        return [layer for layer in self.layers if isinstance(layer, SparseFFN)]


@dataclass(frozen=True)
class Methods:
    """Methods to trace; ``hot_attention``: an accelerator's, for prompts; ``check``: raises if they are wrong."""

    specs: Mapping[str, MethodSpec]
    chunks: Chunks = field(default_factory=dict)
    hot_attention: bool = False
    check: Callable[[Programs], None] = lambda _: None


@dataclass(frozen=True)
class Accelerated:
    """Modules by method: of hot neurons, with their number, by layer; and of attention, see ``PlacedAttention``."""

    hot: Mapping[str, Sequence[tuple[nn.Module, int]]] = field(default_factory=dict)
    calls: Sequence[AttentionCall] = ()
    attention: Mapping[str, Mapping[str, nn.Module]] = field(default_factory=dict)

    def decoder(self, method: str, lanes: Lanes) -> Lanes:
        """The decoder of ``method``: ``lanes``, or a variant with the accelerator's modules in it."""
        if method not in self.hot:
            return lanes
        variant = with_parts(lanes, self.calls, self.attention.get(method, {}))
        split_hot_cold(variant.model, self.hot[method])
        return variant


def decoder_methods_of(
    source: Source, model: nn.Module, settings: ExportSettings, staging: Path, chunks: Chunks
) -> Methods:
    """The methods of a Hugging Face decoder; ``model``: a copy of ``source.model`` with delegated layers."""
    lanes = Lanes(model, max(settings.batches), settings.max_tokens, settings.kv)
    accelerated = _accelerated(source, lanes, settings, staging, chunks) if settings.splits else Accelerated()
    specs = {
        name: method_spec(name, accelerated.decoder(name, lanes), settings.forward_tokens)
        for name in method_names(settings.batches, prompt_sizes(chunks))
    }

    def check(programs: Programs) -> None:
        rough = any(isinstance(layer, SparseExperts) for layer in source.layers)  # routers choose
        rough = rough or any(f.has_predictor or f.threshold > 0 or f.int8_activations for f in source.ffns)
        checked = lanes
        if settings.kv != "float32":  # rounding would hide errors: check with a float32 cache
            batch = settings.batches[0]
            checked = Lanes(model, batch, settings.max_tokens)
            names = ("forward", f"decode_b{batch}")
            programs = trace({n: method_spec(n, checked, settings.forward_tokens) for n in names}, source.name)
        smooth = source.linears == "float32" and not rough
        # decoding with hot parts is not compared: parts may be compiled, and ignore predictors
        check_traced(checked, programs, max_prompt=settings.forward_tokens, smooth=smooth, decode=not settings.splits)

    return Methods(specs, chunks, bool(accelerated.attention), check)


def module_methods(model: nn.Module, args: Sequence | None, kwargs: Mapping | None, dynamic_shapes: Any) -> Methods:
    """``forward`` of another module, traced with example inputs."""

    def in_float32(value: Any) -> Any:
        """Inputs of 16-bit models: exported modules outside FFNs are float32."""
        sixteen = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
        return value.float() if sixteen else value

    given: tuple[Any, ...] = tuple(args or ())
    given, kwargs = tree_map(in_float32, (given, dict(kwargs or {})))
    return Methods({"forward": MethodSpec(model, given, kwargs, dynamic_shapes)})


def chunks_of(source: Source, settings: ExportSettings) -> dict[str, list[int]]:
    """The chunks of all methods; empty without an accelerator. Raises ConfigError: an NPU's memory is too small."""
    if not settings.splits:
        return {}
    prompts = hot_prompts(source.ffns, settings)
    plan = source.parts.plan
    cut = plan.made_by.get("config", {}).get("hot_frequency", Config().hot_frequency)
    asked = (source.ffns, settings.batches, source.parts.stats, settings.hot)
    per_batch = chunks_per_batch(*asked, hot_frequency=cut, hardware=plan.hardware)
    chunks = {f"decode_b{batch}": per_batch[batch] for batch in settings.batches}
    for method, counts in chunks.items():
        check_npu_memory(source.ffns, settings, method, counts)
    whole = [-(-ffn.site.intermediate // CHUNK) for ffn in source.ffns]
    return chunks | {f"prefill_{tokens}": whole for tokens in prompts}


def check_npu_memory(layers: Sequence[SparseFFN], settings: ExportSettings, method: str, chunks: Sequence[int]) -> None:
    """Raises ConfigError: the NPU's memory does not hold these chunks."""
    if (size := _ffn_bytes(layers, settings, chunks)) > MOST_BYTES:
        neurons = [min(count * CHUNK, ffn.site.intermediate) for count, ffn in zip(chunks, layers)]
        what = f"hot neurons of {len(layers)} layers, graph {method}, for {settings.soc}"
        expected = f"at most {MOST_BYTES >> 20} MiB of weights, which an NPU can have"
        found = f"{size >> 20} MiB in {settings.precision} ({min(neurons)} to {max(neurons)} neurons of a layer)"
        fix = "Pass fewer chunks (hot), no hot_prompts, or for fewer bits a weight precision='w4a16', blocks=32."
        raise ConfigError(what, expected=expected, found=found, fix=fix)


def hot_prompts(layers: Sequence[SparseFFN], settings: ExportSettings) -> tuple[int, ...]:
    """Token counts of ``prefill_N``, which need whole layers. Raises ConfigError: the NPU's memory is too small."""
    asked, whole = settings.hot_prompts, [-(-ffn.site.intermediate // CHUNK) for ffn in layers]
    if asked:
        check_npu_memory(layers, settings, f"prefill_{max(asked)}", whole)
        return tuple(asked)
    default = asked is None and settings.soc is not None and settings.max_tokens > 128
    return (128,) if default and _ffn_bytes(layers, settings, whole) <= MOST_BYTES else ()


def _ffn_bytes(layers: Sequence[SparseFFN], settings: ExportSettings, chunks: Sequence[int]) -> int:
    """Bytes of these chunks on the NPU; 0 without one."""
    if settings.soc is None:
        return 0
    sites = [ffn.site for ffn in layers]
    neurons = [min(site.intermediate, count * CHUNK) for site, count in zip(sites, chunks, strict=True)]
    weights = sum(n * site.rows_per_neuron * site.hidden for n, site in zip(neurons, sites))
    return round(weights * settings.qnn.bits / 8)


def _accelerated(source: Source, lanes: Lanes, settings: ExportSettings, staging: Path, chunks: Chunks) -> Accelerated:
    """The accelerator's modules of all methods; for an NPU they are compiled, with a report in ``staging``."""
    report: dict[str, Any] = {}
    calibration = _calibration(source, settings)
    most = [max(of_layer) for of_layer in zip(*chunks.values())]
    size = _ffn_bytes(source.ffns, settings, most)
    # attention first: too little memory is refused before FFNs are compiled
    attention = place_attention(source.model, lanes, [*chunks], settings, calibration, report, size)
    if settings.soc is None:
        whole = [*map(hot_chunks, source.ffns, most)]
        modules: Mapping[str, Sequence[nn.Module]] = {
            method: [module.first(count) for module, count in zip(whole, counts)] for method, counts in chunks.items()
        }
    else:
        modules = _compiled(source, settings, chunks, most, calibration, report)
    neurons = [ffn.site.intermediate for ffn in source.ffns]
    hot = {
        method: [(m, min(count * CHUNK, n)) for m, count, n in zip(of_layers, chunks[method], neurons, strict=True)]
        for method, of_layers in modules.items()
    }
    if report:
        atomic_write(staging / REPORT_FILE, json.dumps(report, indent=1) + "\n")
    return Accelerated(hot, *attention)


def _compiled(
    source: Source,
    settings: ExportSettings,
    chunks: Chunks,
    most: Sequence[int],
    calibration: Sequence[Batch],
    report: dict[str, Any],
) -> Mapping[str, Sequence[nn.Module]]:
    """Hot parts for the NPU: method -> module of each layer. Adds the compiler's facts and the loss to ``report``."""
    tokens = calibrate.before_scored(calibration, _calibration_tokens(source, settings))
    samples: Sequence[torch.Tensor | None] = [None] * len(source.ffns)
    if calibration:
        samples = calibrate.inputs_of(source.model, source.ffns, calibration, tokens=tokens)
    graphs = {name: qnn.Graph(sizes_of(name), of_layers) for name, of_layers in chunks.items()}
    one_by_one = map(hot_chunks, source.ffns, most)
    lowered = qnn.lower_hot(one_by_one, samples, graphs, settings.qnn, progress=settings.progress)
    report |= {"format": REPORT_FORMAT, "version": REPORT_VERSION, **asdict(settings.qnn), **lowered.about}
    report |= {"layers": [*lowered.report.values()], "loss": None}
    rows, after = calibrate.scored_rows(calibration, tokens)
    if rows:
        quantised_on = "the tokens that hot parts were quantised on"
        text = f"calibration data after {quantised_on}" if after else quantised_on
        loss = calibrate.loss_of(source.model, source.ffns, [*lowered.quantized.values()], chunks, rows)
        report["loss"] = {"measured_on": text} | loss
    return {method: [*of_layers.values()] for method, of_layers in lowered.modules.items()}


def _calibration(source: Source, settings: ExportSettings) -> Sequence[Batch]:
    """Calibration batches for hot parts; empty if they are not quantised."""
    if settings.soc is None or settings.precision == "fp16":
        return ()
    if source.calibration is None:
        what = f"export(target='{settings.target}', precision='{settings.precision}')"
        expected = "calibration data, on which the inputs of hot parts are observed"
        fix = "Pass calibration=text (and tokenizer=...), or precision='fp16'."
        raise CalibrationError(what, expected=expected, found="none", fix=fix)
    return calibrate.first_batches(source.calibration, source.tokenizer, _calibration_tokens(source, settings))


def _calibration_tokens(source: Source, settings: ExportSettings) -> int:
    return calibrate.tokens_for_weights(source.ffns) if settings.quantization == "gptq" else calibrate.TOKENS
