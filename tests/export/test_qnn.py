"""Real context binaries by Qualcomm's compiler, run on Qualcomm's x86 emulator of the NPU: ``make test-qnn``.

Needs the extra ``qnn``. Nothing here is skipped: without the libraries the tests fail.
Tolerances are relative (L2), against PyTorch in the same precision. The HTP looks smooth activations up in tables when
it computes in float16, so that SiLU and GELU are 3e-3 to 7e-3 off there; ReLU is not.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exported import decoder_methods
from torch import nn

import torch_pi2
from benchmarks.qnn import measure
from torch_pi2.errors import CompileError
from torch_pi2.export import hot_attention as parts_of_attention
from torch_pi2.export import qnn
from torch_pi2.export.calibrate import inputs_of
from torch_pi2.export.decoder import Lanes
from torch_pi2.export.delegated import delegated_copy, exported_layers, registered
from torch_pi2.export.describe import describe_program
from torch_pi2.export.hot import HotChunks, hot_chunks
from torch_pi2.export.hot_attention import attention_calls
from torch_pi2.export.methods import Accelerated
from torch_pi2.export.qnn import sdk
from torch_pi2.export.qnn.quantize import hot_part as part_of
from torch_pi2.export.qnn.quantize import quantize_part
from torch_pi2.export.run import Bundle
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.profiling.text import stdlib_text

pytestmark = pytest.mark.qnn

TOLERANCE = 2e-3
SMOOTH_FP16 = 1e-2


def hot_part(activation: str, hidden: int, neurons: int, chunk: int, *, gated: bool = True) -> HotChunks:
    torch.manual_seed(0)
    site = SimpleNamespace(activation=activation, activation_on_up=False, gated=gated)
    rows = [torch.randn(neurons, hidden) / hidden**0.5 for _ in range(3 if gated else 2)]
    return HotChunks(site, rows, torch.randn(neurons) / 4 if gated else None, torch.randn(neurons) / 4, chunk)


class Block(nn.Module):
    """A hot part between two linear layers, as in a decoder."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.before, self.after = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)
        self.hot: nn.Module = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.hot(self.before(x)))


def lower(programs: dict[str, torch.export.ExportedProgram]) -> tuple[bytes, dict[str, list[str]]]:
    """The ``.pte``, and of each method the backends in their order."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    config = EdgeCompileConfig(_check_ir_validity=False, _skip_dim_order=True)
    edge = to_edge_transform_and_lower(programs, partitioner=[XnnpackPartitioner()], compile_config=config)
    backends = {}
    for name in programs:
        graph = edge.exported_program(name).graph_module
        calls = [n for n in graph.graph.nodes if "executorch_call_delegate" in str(n.target)]
        backends[name] = [getattr(graph, call.args[0].target).backend_id for call in calls]
    return bytes(edge.to_executorch().buffer), backends


def relative(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got - right).norm() / right.norm())


@pytest.mark.parametrize(
    ("soc", "precision", "activation", "blocks"),
    [
        *((soc, *case, 0) for soc in ("SM8650", "SM8850") for case in (("w8a16", "silu"), ("fp16", "relu"))),
        ("SM8650", "w4a16", "relu", 0),
        *((soc, "w4a16", "relu", 16) for soc in qnn.SOCS),
        *(("SM8650", "w4a16", activation, size) for activation, size in (("relu", 32), ("silu", 64))),
    ],
)
def test_a_block_on_the_emulator(soc: str, precision: str, activation: str, blocks: int, tmp_path: Path) -> None:
    hidden, block = 320, Block(320).eval()
    hot = hot_part(activation, hidden, 256, 128)
    graphs = {"decode_b1": qnn.Graph((1, 1), [2]), "decode_b2": qnn.Graph((2, 1), [1])}
    torch.manual_seed(2)
    inputs = {name: torch.randn(*graph.shape, hidden) for name, graph in graphs.items()}
    with torch.no_grad():
        samples = block.before(torch.cat([torch.randn(12, hidden), *(x.reshape(-1, hidden) for x in inputs.values())]))
    settings = qnn.Settings(soc, precision, blocks=blocks, weight_sharing=False, timeout_s=300)
    lowered = qnn.lower_hot([hot], [samples], graphs, settings)
    assert lowered.about["qnn"].startswith("v2.49.40")
    layer = lowered.report["layer0"]
    assert layer["block"] == blocks
    programs, right = {}, {}
    for name, x in inputs.items():
        block.hot = lowered.modules[name]["layer0"]
        programs[name], right[name] = torch.export.export(block, (x,)), block(x).detach()
        block.hot = hot.first(graphs[name].chunks[0])
        assert (
            relative(right[name], block(x).detach())
            < {"w4a16": 0.2 if blocks else 0.3, "w8a16": 0.02, "fp16": 1e-6}[precision]
        )
    program, backends = lower(programs)
    assert backends == {name: ["XnnpackBackend", "QnnBackend", "XnnpackBackend"] for name in graphs}
    (tmp_path / "model.pte").write_bytes(program)
    sdk.load(sdk.find())
    from executorch.runtime import Runtime

    loaded = Runtime.get().load_program(tmp_path / "model.pte")
    for name, x in inputs.items():
        (got,) = loaded.load_method(name).execute([x])
        assert relative(got, right[name]) < (TOLERANCE if blocks or precision != "w4a16" else 2 * TOLERANCE)


def run_on_emulator(module: nn.Module, x: torch.Tensor, folder: Path) -> list[torch.Tensor]:
    from executorch.runtime import Runtime

    (folder / "model.pte").write_bytes(lower({"forward": torch.export.export(module, (x,))})[0])
    sdk.load(sdk.find())
    method = Runtime.get().load_program(folder / "model.pte").load_method("forward")
    return list(method.execute([x]))


def test_nine_graphs_share_one_copy_of_the_weights() -> None:
    """1, 2 and 4 chunks by 1, 2 and 4 sequences, as exported by default."""
    found = measure("SM8650", 2048, "w4a16", blocks=16)
    layer = found["layers"][0]
    assert 1 <= found["context_over_unique"] <= 1.3
    assert len(layer["graphs"]) == 9
    for name, graph in layer["graphs"].items():
        weights = found["unique_bytes"] // 4 * int(name[3])
        assert graph["spill_bytes"] == 0
        assert weights < graph["read_bytes"] < 1.3 * weights  # what a call reads is its own chunks, not all


def test_groups_and_gptq_have_a_smaller_true_error_in_a_trained_layer(tmp_path: Path) -> None:
    """On the emulator, against float32, on text that no choice was made on."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    dense = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = torch_pi2.optimize(dense)
    ffn = exported_layers(model)[1]
    train, heldout = (
        inputs_of(model, [ffn], stdlib_text(split, max_bytes=1 << 16), tokenizer)[0] for split in ("train", "heldout")
    )
    hot, x = hot_chunks(ffn, 2), heldout[:64]
    right, errors = hot(x), {}
    for blocks, how in ((0, "rtn"), (16, "rtn"), (16, "gptq")):
        settings = qnn.Settings("SM8650", "w4a16", blocks, False, timeout_s=300, quantization=how)
        lowered = qnn.lower_hot([hot], [train], {"forward": qnn.Graph((64,), [2])}, settings)
        module = lowered.modules["forward"]["layer0"]
        (got,) = run_on_emulator(module, x, tmp_path)
        assert relative(got, module(x)) < 5e-3
        errors[blocks, how] = relative(got, right)
    assert errors[16, "rtn"] < 0.9 * errors[0, "rtn"]
    assert errors[16, "gptq"] < 0.95 * errors[16, "rtn"]


def test_scales_of_groups_are_what_the_encoder_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ExecuTorch rounds them to sixteenths of the largest of a row: to themselves."""
    monkeypatch.setenv("QNN_SDK_ROOT", "")
    settings = qnn.Settings("SM8550", blocks=32)
    quantized = quantize_part(*part_of(hot_part("relu", 128, 64, 64), torch.randn(64, 128), settings, {}), settings)
    found = 0
    for node in quantized.program.graph.nodes:
        if "dequantize_affine" in str(node.target):
            scales = quantized.program.state_dict | quantized.program.constants
            spec = {s.arg.name: s.target for s in quantized.program.graph_signature.input_specs}
            scale = scales[spec[node.args[2].name]].reshape(-1, scales[spec[node.args[2].name]].shape[1])
            step = scale.amax(1, keepdim=True) / 16
            torch.testing.assert_close((scale / step).round() * step, scale, rtol=1e-6, atol=0)
            found += 1
    assert found == 3


_RUN = """
import sys, torch
from torch_pi2.export.qnn import sdk
sdk.load(sdk.find())
from executorch.runtime import Runtime
method = Runtime.get().load_program(sys.argv[1]).load_method("forward")
(y,) = method.execute([torch.load(sys.argv[2])])
torch.save(y, sys.argv[3])
"""


def test_damage_of_the_context_binary_changes_the_result(tmp_path: Path) -> None:
    """The control of all the others: numbers come from the binary, and not from something else."""
    hot, x = hot_part("relu", 256, 128, 128, gated=False), torch.randn(1, 256)
    graphs = {"forward": qnn.Graph((1,), [1])}
    lowered = qnn.lower_hot([hot], [None], graphs, qnn.Settings("SM8650", "fp16", weight_sharing=False))
    module = lowered.modules["forward"]["layer0"]
    program, _ = lower({"forward": torch.export.export(module, (x,))})
    size = lowered.report["layer0"]["context_bytes"]
    start = program.index(module.get_submodule("part.delegate").processed_bytes)
    damaged = bytearray(program)
    for i in range(start + size // 2, start + size // 2 + 2000):
        damaged[i] ^= 0x55
    torch.save(x, tmp_path / "x.pt")
    for name, content in (("whole", program), ("damaged", bytes(damaged))):
        (tmp_path / f"{name}.pte").write_bytes(content)
        command = [sys.executable, "-c", _RUN, *(str(tmp_path / n) for n in (f"{name}.pte", "x.pt", f"{name}.pt"))]
        done = subprocess.run(command, capture_output=True, text=True)
        if name == "whole":
            assert done.returncode == 0, done.stderr
            assert relative(torch.load(tmp_path / "whole.pt"), module(x).detach()) < TOLERANCE
        elif done.returncode == 0:
            assert not relative(torch.load(tmp_path / "damaged.pt"), module(x).detach()) < 0.1


def _child_with(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``code`` runs at the start of the process that compiles."""
    (tmp_path / "sitecustomize.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


def test_an_operator_that_the_npu_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACTIVATIONS, "relu", torch.digamma)
    with pytest.raises(
        CompileError, match=r"hot neurons of layer 0, graph forward: expected operators.*of SM8650 .*digamma"
    ):
        qnn.lower_hot(
            [hot_part("relu", 64, 64, 64)],
            [None],
            {"forward": qnn.Graph((1,), [1])},
            qnn.Settings("SM8650", "fp16", timeout_s=300),
        )


def test_the_check_compiles_and_stays_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    seen = tmp_path / "seen"
    code = (
        "import os, sys\n"
        "def deny(event, arguments):\n"
        "    if event.startswith(('socket.connect', 'socket.getaddrinfo', 'urllib.')):\n"
        f"        open({str(seen)!r}, 'a').write(event)\n"
        "        os._exit(7)\n"
        "sys.addaudithook(deny)\n"
    )
    _child_with(code, tmp_path, monkeypatch)
    assert qnn.problems("SM8750", compile=True) == []
    assert not seen.exists()


@pytest.mark.parametrize(
    ("precision", "hot_attention", "block"),
    [("fp16", "prompts", 0), ("w4a16", "prompts", 0), ("w4a16", "prompts", 32), ("w4a16", "none", 0)],
)
def test_a_decoder_with_hot_neurons_on_the_npu_and_cold_ones_in_our_delegate(
    precision: str, hot_attention: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bundle as users export it: hot neurons on QNN, cold ones over the store, attention of prompts on QNN or, as the
    rest, on XNNPACK.

    Against PyTorch with what is on QNN in the precision that was compiled.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=512,
        hidden_act="relu",
        max_position_embeddings=64,
    )
    model = LlamaForCausalLM(config).eval()
    text = torch.randint(0, 512, (8, 40))
    model = torch_pi2.optimize(model, [text], torch_pi2.Config(method="exact"))
    if block:  # as where 8 bits do not fit
        monkeypatch.setattr(parts_of_attention, "_block", lambda *_: block)
    compiled: list[Any] = []
    lower_hot, lower_parts = qnn.lower_hot, qnn.lower_parts
    monkeypatch.setattr(qnn, "lower_hot", lambda *a, **k: compiled.append(lower_hot(*a, **k)) or compiled[-1])
    monkeypatch.setattr(qnn, "lower_parts", lambda *a, **k: compiled.append(lower_parts(*a, **k)) or compiled[-1])
    monkeypatch.delenv("QNN_SDK_ROOT", raising=False)
    folder = torch_pi2.export(
        model,
        tmp_path / "bundle",
        target="qnn:SM8650",
        precision=precision,
        weight_sharing=False,
        max_tokens=32,
        batches=(1, 2),
        hot={1: 1, 2: 1},
        hot_prompts=(8,),
        hot_attention=hot_attention,
        calibration=text,
    )
    sdk.load(sdk.find())
    from executorch.runtime import Runtime

    from torch_pi2.export.executorch import load_library, set_options, stats

    methods = describe_program(folder / "model.pte")["methods"]
    for name in ("decode_b1", "decode_b2"):  # of each of two layers one hot part, between submit and collect
        delegates = methods[name]["delegates"]
        assert (delegates["QnnBackend"], delegates["Pi2Backend"]) == (2, 4)
        assert delegates["XnnpackBackend"] > 0
    assert "QnnBackend" not in methods["forward"]["delegates"]
    assert methods["prefill_8"]["delegates"]["QnnBackend"] == (2 if hot_attention == "none" else 4)
    report = json.loads((folder / "qnn.json").read_text())
    assert report.get("attention", "none") == hot_attention
    assert {part["block"] for part in report.get("parts", {}).values()} <= {block}
    assert {*report.get("parts", {})} == ({"attention0", "attention1"} if hot_attention == "prompts" else set())
    load_library()
    set_options({"store_path": str(folder / "model.pi2")})
    program = Runtime.get().load_program(folder / "model.pte")
    ids = torch.randint(0, 512, (1, 9))
    forward, decode = program.load_method("forward"), program.load_method("decode_b1")
    forward.execute([ids[:, :8], torch.zeros(1, dtype=torch.int64)])
    stats(reset=True)
    (got,) = decode.execute([ids[:, 8:], torch.full((1, 1), 8)])
    layers, of_layers = exported_layers(model), compiled[-1]
    with registered(layers) as key, torch.no_grad():
        lanes = Lanes(delegated_copy(model, layers, key), 2, 32)
        neurons = {"decode_b1": 512, "prefill_8": 768}
        hot = {name: [(m, count) for m in of_layers.modules[name].values()] for name, count in neurons.items()}
        attention: tuple[Any, Any] = ((), {})
        if hot_attention == "prompts":
            attention = (attention_calls(lanes), compiled[0].modules)
        decoders = {name: Accelerated(hot, *attention).decoder(name, lanes) for name in hot}
        start = torch.zeros(1, dtype=torch.int64)
        decoder_methods(lanes, (1,))["forward"](ids[:, :8], start)
        step = decoder_methods(decoders["decode_b1"], (1,))["decode_b1"]
        right = step(ids[:, 8:], torch.full((1, 1), 8))[:, -1]
        whole = model(ids).logits[:, -1]
        prompt = decoder_methods(decoders["prefill_8"], (1,))["forward"](ids[:, :8], start)
        prompt_whole = model(ids[:, :8]).logits[:, -1]
    assert relative(got.reshape(right.shape), right) < TOLERANCE
    assert relative(got.reshape(right.shape), whole) < (TOLERANCE if precision == "fp16" else 0.3)
    assert 0 < stats(reset=True)["stores"][0]["wanted"] <= 2 * (768 - 512)  # cold parts of two layers, no hot neuron
    (read,) = program.load_method("prefill_8").execute([ids[:, :8], torch.tensor([0]), torch.tensor([7])])
    assert relative(read.reshape(prompt.shape), prompt) < TOLERANCE
    assert relative(read.reshape(prompt.shape)[:, -1], prompt_whole) < (TOLERANCE if precision == "fp16" else 0.3)
    assert stats()["stores"][0]["wanted"] == 0  # all of both layers is there
    with Bundle(folder) as bundle:
        first = [bundle.generate(ids[0, :n].tolist(), 4).sequences[0].ids for n in (8, 7)]
    assert all(len(answer) == 4 for answer in first)
