"""What 4 bits cost a really trained model, by how weights are rounded: held-out bits per byte against its floats.

Told apart: neurons, linear layers of attention and the output layer alone (the others in floats), all of them, and what
int8 activations add. Calibration text and scored text are different files of Python's standard library.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import add_trained, names_of
from benchmarks.beside import floats
from benchmarks.tables import Result, Table, at
from torch_pi2.api import quantize_
from torch_pi2.cli import common
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.profiling.text import stdlib_text
from torch_pi2.types.config import QUANTIZATIONS

#: Tokens that are scored, of so many bytes of held-out text, and how many see each other.
_TOKENS, _TEXT_BYTES, _WINDOW = 16_384, 60_000, 256
_WORDS = {"rtn": "to nearest", "weighted": "to nearest, weighted by inputs", "gptq": "GPTQ"}
PARTS = ("neurons", "attention", "output layer", "all", "int8 activations too")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_trained(parser)
    add("--weights", default="int4", choices=("int4", "int8"))
    add(
        "--quantizations",
        type=names_of(QUANTIZATIONS),
        default=list(QUANTIZATIONS),
        metavar="HOW,...",
        help="as in Config",
    )
    add("--tokens", type=common.positive, default=_TOKENS, metavar="N", help="held-out tokens that are scored")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Quantise the model in ``folder`` in every way, and score it.

    Returns:
        ``bits_per_byte`` of the floats, and of each way in ``cases``: ``seconds`` and ``changes``, for each of
        :data:`PARTS` the relative change of the loss.

    Raises:
        Pi2Error: what loading and quantising models raise.
    """
    tokens, calibration_tokens = args.tokens, args.calibration_tokens
    make, tokenizer = floats(args)
    train = tokenizer(common.stdlib_sample("train", tokenizer, calibration_tokens), verbose=False)["input_ids"]
    calibration = torch.tensor(train[:calibration_tokens])
    heldout = stdlib_text("heldout", max_bytes=_TEXT_BYTES * -(-tokens // _TOKENS))

    def loss(model: nn.Module) -> float:
        return bits_per_byte(model, tokenizer, heldout, window=_WINDOW, max_tokens=tokens).bits_per_byte

    before, cases = loss(make()), []
    for how in args.quantizations:
        start = time.perf_counter()
        model = quantize_(make(), args.weights, None if how == "rtn" else calibration, quantization=how)
        seconds = time.perf_counter() - start
        changes = {part: loss(mixed) / before - 1 for part, mixed in _parts(model, make)}
        cases.append({"quantization": how, "seconds": seconds, "changes": changes})
    return {"model": args.folder.name, "bits_per_byte": before, "cases": cases}


def _parts(model: Any, make: Callable[[], nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The quantised ``model``, and a float one with some of its weights in their place."""
    neurons = tuple(f"{layer.site.key}." for layer in sparse_layers(model))
    linears = {f"{name}.weight": module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    outputs = {name for name, linear in linears.items() if linear is model.get_output_embeddings()}
    rounded: dict[str, torch.Tensor] = model.state_dict()
    wanted: dict[str, Callable[[str], bool]] = {
        "neurons": lambda name: name.startswith(neurons),
        "attention": lambda name: name in linears and name not in outputs,
        "output layer": lambda name: name in outputs,
    }
    for part, takes in wanted.items():
        mixed: Any = make()
        head = mixed.get_output_embeddings()
        head.weight = nn.Parameter(head.weight.detach().clone())  # it may be tied to the embedding, which stays
        mixed.load_state_dict({name: value for name, value in rounded.items() if takes(name)}, strict=False)
        yield part, mixed
    yield "all", model
    layer: Any
    for layer in (*sparse_layers(model), *linears.values()):
        layer.int8_activations = True
    yield "int8 activations too", model


TABLES = (
    Table(
        "What 4 bits cost",
        lambda result: result["cases"],
        {
            "weights": lambda case: _WORDS[case["quantization"]],
            **{part: at(f"changes.{part}", "+.2%") for part in PARTS},
            "s": at("seconds", ".0f"),
        },
        "Relative change of held-out bits per byte where these weights alone are quantised, the others in floats. "
        "Trained models; calibrated on other text than what is scored.",
    ),
)


def about(result: Result) -> str:
    return (
        f"{result['model']}, {result['weights']}: {result['bits_per_byte']:.4f} held-out bits per byte in floats "
        f"({result['tokens']} tokens; {result['calibration_tokens']} to calibrate)"
    )
