"""What the NPU's precisions cost a trained model: held-out bits per byte, and the error of each layer.

    python -m benchmarks.qnn_loss out.json --emulator SM8650

All neurons of every layer in the precision, as in prompts on the NPU: quantised as they are compiled, computed in
PyTorch. With ``--emulator`` layers are compiled, too, and run on Qualcomm's x86 emulator of the NPU against float32
(needs the extra ``qnn``). Ranges are set on other text than what is scored.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.files import atomic_write
from torch_pi2.machine.process import describe

MODEL = Path(__file__).resolve().parent.parent / "examples" / "models" / "drelu-stdlib-5m"

#: Precision and blocks.
FORMS: dict[str, tuple[str, int]] = {
    "w8a16": ("w8a16", 0),
    "w4a16, a scale per channel": ("w4a16", 0),
    "w4a16, groups of 32": ("w4a16", 32),
    "w4a16, groups of 16": ("w4a16", 16),
}
#: A form, and whether weights are chosen by GPTQ.
KINDS = {
    **{name: (form, False) for name, form in FORMS.items()},
    **{f"{name}, GPTQ": (form, True) for name, form in FORMS.items() if form[0] == "w4a16"},
}
#: Those that are compared on the emulator.
COMPILED = ("w4a16, groups of 32, GPTQ", "w4a16, groups of 16, GPTQ")


def measure(folder: Path, tokens: int, emulator: str | None, rows: int = 64) -> dict[str, Any]:
    """Bits per byte of the model in ``folder``, in floats and in each of :data:`KINDS`, and errors of its layers."""
    import transformers

    import torch_pi2
    from torch_pi2.cli.common import stdlib_sample
    from torch_pi2.eval.loss import bits_per_byte
    from torch_pi2.export import qnn
    from torch_pi2.export.calibrate import hot_on_npu, inputs_of, tokens_for_weights
    from torch_pi2.export.hot import hot_chunks
    from torch_pi2.export.manifest import CHUNK
    from torch_pi2.export.qnn.quantize import block_of, hot_part, quantize_part
    from torch_pi2.layers.of_model import sparse_layers

    dense = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    model, tokenizer = torch_pi2.optimize(dense.eval()), transformers.AutoTokenizer.from_pretrained(folder)
    layers: list[Any] = sparse_layers(model)
    chunks = [-(-ffn.site.intermediate // CHUNK) for ffn in layers]
    most = tokens_for_weights(layers)
    train, text = stdlib_sample("train", tokenizer, most), stdlib_sample("heldout", tokenizer, tokens)
    samples, heldout = (inputs_of(model, layers, data, tokenizer, most) for data in (train, text))
    hot = [hot_chunks(ffn, count) for ffn, count in zip(layers, chunks)]
    right = [part(x[:rows]) for part, x in zip(hot, heldout)]

    def loss() -> float:
        return bits_per_byte(model, tokenizer, text, window=256, max_tokens=tokens).bits_per_byte

    before, found = loss(), {}
    for name, ((precision, blocks), gptq) in KINDS.items():
        how = "gptq" if gptq else "rtn"
        settings = qnn.Settings(emulator or "SM8650", precision, blocks, False, quantization=how)
        parts = [quantize_part(*hot_part(part, x, settings, {}), settings) for part, x in zip(hot, samples)]
        modules = [part.program.module(check_guards=False) for part in parts]
        with hot_on_npu(layers, modules, chunks):
            after = loss()
        with hot_on_npu(layers, [*map(weights_alone, modules)], chunks):
            of_weights = loss()
        got = [module(x[:rows])[-1] for module, x in zip(modules, heldout)]
        found[name] = {
            "bits": settings.bits,
            "bits_per_byte": after,
            "change": after / before - 1,
            "change_by_weights": of_weights / before - 1,
            "blocks": [block_of(part, settings) for part in hot],
            "errors": [relative(*pair) for pair in zip(got, right)],
        }
        if emulator is not None and name in COMPILED:
            graph = {"forward": qnn.Graph((rows,), chunks)}
            lowered = qnn.lower_hot(hot, samples, graph, settings)
            ran = []
            for part, x in zip(lowered.modules["forward"].values(), heldout):
                ran += Emulated(part, (x[:rows],))(x[:rows])
            found[name]["emulator_errors"] = [relative(*pair) for pair in zip(ran, right)]
            found[name]["emulator_against_pytorch"] = [relative(*pair) for pair in zip(ran, got)]
            found[name]["context_bytes"] = sum(layer["context_bytes"] for layer in lowered.report.values())
        print(name, found[name], flush=True)
    return {
        "what": "qnn-loss",
        "machine": describe(),
        "model": folder.name,
        "heldout_tokens": tokens,
        "error_tokens": rows,
        "calibration_tokens": len(samples[0]),
        "emulator": emulator,
        "bits_per_byte": before,
        "kinds": found,
    }


class Emulated(nn.Module):
    """A compiled module as the emulator computes it, for inputs of the shapes of ``example``.

    It must be compiled without weight sharing: the emulator loads no other.
    """

    def __init__(self, module: nn.Module, example: tuple[torch.Tensor, ...]) -> None:
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower
        from executorch.runtime import Runtime

        from torch_pi2.export.qnn import sdk

        super().__init__()
        sdk.load(sdk.find())
        config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
        programs = {"forward": torch.export.export(module, example)}
        self._program = bytes(to_edge_transform_and_lower(programs, compile_config=config).to_executorch().buffer)
        self._method: Any = Runtime.get().load_program(self._program).load_method("forward")

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found: Sequence[torch.Tensor] = self._method.execute([x.contiguous() for x in inputs])
        return tuple(y.clone() for y in found)  # the next call writes into the same memory


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    """L2."""
    return float((got - right).norm() / right.norm())


def weights_alone(quantized: nn.Module) -> nn.Module:
    """A copy of ``quantized`` with its weights, and activations in float32."""
    made: Any = copy.deepcopy(quantized)
    for node in made.graph.nodes:
        if "dequantize_per_tensor" in str(node.target) and "quantize_per_tensor" in str(node.args[0].target):
            node.replace_all_uses_with(node.args[0].args[0])
    made.graph.eliminate_dead_code()
    made.recompile()
    return made


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="JSON file to write")
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a Hugging Face decoder in floats")
    parser.add_argument("--tokens", type=int, default=16384, help="held-out tokens that are scored")
    parser.add_argument("--emulator", metavar="SOC", help="also compile the layers for it, and run them")
    args = parser.parse_args(argv)
    os.environ.setdefault("QNN_SDK_ROOT", "")  # the quantiser would download an SDK, and needs none
    with torch.no_grad():
        found = measure(args.model, args.tokens, args.emulator)
    atomic_write(args.out, json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
