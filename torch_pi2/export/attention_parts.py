"""Attention and head of a decoder on the accelerator: in which methods, compiled of what, and placed before tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError, UnsupportedModelError
from torch_pi2.export.calibrate import calls_of
from torch_pi2.export.decoder import Lanes, sizes_of
from torch_pi2.export.hot_attention import (
    HEAD,
    AttentionPart,
    AttentionSwitch,
    Head,
    HeadPart,
    check_parts,
    float_parts,
    part_name,
    place,
    samples_of,
    states_of,
    switched,
)
from torch_pi2.export.request import Request, qnn_settings
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.profiling.data import Batch

Place = Callable[[str], None]


def place_attention(
    source: nn.Module,
    lanes: Lanes,
    methods: Sequence[str],
    request: Request,
    first: Sequence[Batch],
    report: dict[str, Any],
    ffn_bytes: int,
) -> tuple[str, Place | None]:
    """Where attention goes to the accelerator ("none", "prompts", "all"), and what places its parts before a method.

    Args:
        source: the model that ``lanes`` has a copy of. methods: those with hot parts. first: calibration data; empty:
            nothing is quantised. report: what is compiled is added to it. ffn_bytes: of feed-forward layers that an
            NPU has.

    Raises:
        ConfigError, UnsupportedModelError: what was asked for is not possible.
    """
    prompts = [name for name in methods if name.startswith("prefill_")]
    where = request.hot_attention or ("prompts" if request.soc and prompts and request.kv != "int8" else "none")
    if where == "none":
        return "none", None
    if where == "prompts" and not prompts:
        raise ConfigError(
            "export(hot_attention='prompts')",
            expected="methods that read prompts on the accelerator (hot_prompts)",
            found="none",
            fix="Pass hot_prompts, sizes below max_tokens, or hot_attention='all' to decode there.",
        )
    try:
        # what is quantised takes no numbers of 16 bit
        quantised = request.soc is not None and request.precision != "fp16"
        switches, head = switched(lanes, torch.float32 if quantised else None)
        check_parts(lanes, switches, head)
    except UnsupportedModelError as error:
        if request.hot_attention:
            raise
        report["attention"] = f"on the CPU: {error.found}"
        return "none", None
    if where == "prompts":
        methods, head = prompts, None
    if request.soc is None:
        return where, _placing(switches, head, dict.fromkeys(methods, float_parts(switches, head)))
    from torch_pi2.export import qnn

    settings = qnn_settings(request)
    heads = [] if head is None else [head.whole]
    parts = [switch.whole for switch in switches] + heads
    weights = sum(p.numel() for part in parts for p in part.parameters())
    sizes = {block: ffn_bytes + round(weights * settings.part_bits(block) / 8) for block in _blocks(parts, settings)}
    block = next((block for block, size in sizes.items() if size <= qnn.MOST_BYTES), None)
    if block is None:
        size = min(sizes.values())
        if request.hot_attention:
            raise ConfigError(
                f"export(hot_attention={where!r}) for {request.soc}",
                expected=f"at most {qnn.MOST_BYTES >> 20} MiB of weights, which an NPU can have",
                found=f"{size >> 20} MiB: attention of {len(switches)} layers{', last linear layer' if heads else ''} "
                f"{(size - ffn_bytes) >> 20} MiB, feed-forward layers {ffn_bytes >> 20} MiB in {request.precision}",
                fix="Leave it out (the CPU computes attention), or pass blocks=32 for smaller feed-forward layers.",
            )
        report["attention"] = f"on the CPU: with it an NPU would have {size >> 20} MiB"
        return "none", None
    parts_of = _compiled(source, switches, head, methods, block, settings.quantization == "gptq", first)
    lowered = qnn.lower_parts(parts_of, settings, progress=request.progress)
    report["attention"] = where
    report["parts"] = lowered.report
    return where, _placing(switches, head, lowered.modules)


def _blocks(parts: Sequence[nn.Module], settings: Any) -> tuple[int, ...]:
    """Sizes of groups of weights to try, the best first; 0: 8 bits, a scale per output channel."""
    from torch_pi2.export.qnn import PART_BLOCK

    widths = {m.in_features for part in parts for m in part.modules() if isinstance(m, nn.Linear | QuantLinear)}
    four = settings.precision == "w4a16" and not any(width % PART_BLOCK for width in widths)
    return (0, PART_BLOCK) if four else (0,)


def _placing(
    switches: Sequence[AttentionSwitch], head: Head | None, modules: Mapping[str, Mapping[str, nn.Module]]
) -> Place:
    return lambda method: place(switches, head, modules.get(method, {}))


def _compiled(
    source: nn.Module,
    switches: Sequence[AttentionSwitch],
    head: Head | None,
    methods: Sequence[str],
    block: int,
    gptq: bool,
    first: Sequence[Batch],
) -> Iterator[tuple[str, torch.export.ExportedProgram, Any]]:
    """Each part as what compiles it takes it: its name, its program, its inputs."""
    from torch_pi2.export.qnn import PartInputs, open_program, zeros

    attentions = [source.get_submodule(switch.call.name) for switch in switches]
    heads = [] if head is None else [source.get_output_embeddings()]  # type: ignore[operator]
    seen: list[Any] = [[]] * (len(attentions) + 1)
    if first:
        seen = calls_of(source, [*attentions, *heads], states_of, first)
    for i, switch in enumerate(switches):
        part = AttentionPart(switch.call)
        graphs = {name: switch.call.shapes(*sizes_of(name)) for name in methods}
        samples = samples_of(part, seen[i]) if first else []
        program = open_program(part, zeros(switch.call.shapes(2, 3)), switch.call.open)
        yield part_name(i), program, PartInputs(samples, graphs, switch.call.open, block, gptq)
    if head is not None:
        width = switches[0].call.widths[0]
        one = {name: [((sizes_of(name)[0], 1, width), torch.float32)] for name in methods}
        program = open_program(HeadPart(head.whole), (torch.zeros(2, 3, width),), [(0, 1)])
        yield HEAD, program, PartInputs([tuple(x) for x in seen[-1]], one, [(0, 1)], block)
