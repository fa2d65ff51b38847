"""Parts of a decoder outside feed-forward layers for the NPU: quantised as a whole, with graphs of several shapes.

A part comes as a program whose sizes are open (:func:`open_program`), is quantised once, and becomes static for each
graph, so that all graphs have the same weights and scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torch_pi2.export.qnn.quantize import errors_of, held_back, pt2e
from torch_pi2.export.qnn.settings import Settings

Inputs = tuple[torch.Tensor, ...]
#: Of each input its sizes and its dtype.
Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class PartInputs:
    """Inputs of a part.

    Attributes:
        samples: calibration inputs; empty: it is not quantised (fp16). graphs: shapes in each graph. open: of each
            input the dimensions that differ between calls. block: 0: weights have 8 bits; else 4, so many of
            a row with a scale together. gptq: such weights are chosen on the samples; else rounded to nearest.
    """

    samples: Sequence[Inputs]
    graphs: Mapping[str, Shapes]
    open: Sequence[Sequence[int]]
    block: int = 0
    gptq: bool = False


def zeros(shapes: Shapes) -> Inputs:
    return tuple(torch.zeros(sizes, dtype=dtype) for sizes, dtype in shapes)


def open_program(module: nn.Module, example: Inputs, open: Sequence[Sequence[int]]) -> torch.export.ExportedProgram:
    """``module`` as a program. The open sizes of ``example`` are 2 or more, and different where they may differ."""
    auto = torch.export.Dim.AUTO(min=1, max=1 << 16)
    shapes = tuple(dict.fromkeys(dims, auto) for dims in open)
    with torch.no_grad():
        return torch.export.export(_Open(module), example, dynamic_shapes={"inputs": shapes}, strict=False)


class _Open(nn.Module):
    """A module with its inputs under one name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(self.module(*inputs))


def quantize_part(
    program: torch.export.ExportedProgram, inputs: PartInputs, settings: Settings
) -> tuple[torch.export.ExportedProgram, list[float]]:
    """``program`` with its weights quantised, unless they are float16; of each output the error on the last quarter of
    the samples, on which no weights were chosen, relative to float32 (L2)."""
    if not inputs.samples:
        return program, []
    with torch.no_grad():
        right: Any = program.module(check_guards=False)
        precision = replace(settings, precision="w4a16" if inputs.block else "w8a16")
        first, last = held_back(inputs.samples)
        chosen_on = first if inputs.gptq else ()
        quantized = pt2e(program.module(check_guards=False), inputs.samples, precision, inputs.block, chosen_on)
        example: Any = program.example_inputs[0]
        return open_program(quantized, example, inputs.open), errors_of(right, quantized, last)


def part_program(
    program: torch.export.ExportedProgram, shapes: Shapes, order: tuple[Sequence[int], Sequence[int]] | None = None
) -> torch.export.ExportedProgram:
    """The static program for inputs of ``shapes``; ``order``: with these of them as arguments, and so that output i is
    result ``order[1][i]``."""
    module: nn.Module = program.module(check_guards=False)
    inputs = zeros(shapes)
    if order is not None:
        module, inputs = _Ordered(module, *order), tuple(inputs[i] for i in order[0])
    with torch.no_grad():
        return torch.export.export(module, inputs, strict=False)


class _Ordered(nn.Module):
    """A part as its compiled graph is called."""

    def __init__(self, module: nn.Module, arguments: Sequence[int], results: Sequence[int]) -> None:
        super().__init__()
        self.module, self.arguments, self.results = module, arguments, results

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        inputs = [given[self.arguments.index(i)] for i in range(len(given))]
        outputs = self.module(*inputs)
        return tuple(outputs[self.results.index(i)] for i in range(len(outputs)))
