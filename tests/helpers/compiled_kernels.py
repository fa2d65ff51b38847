"""Compiles every Triton kernel for GPUs that need not be there, of a layer of 4096 x 14336; prints their loads as JSON.

``python compiled_kernels.py 80 90``: compute capabilities. By kernel and capability, how often each kind of load from
memory is in its PTX; and what ``torch.compile`` sees of the operator.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from typing import Any

import torch
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from torch_pi2.formats import FORMATS
from torch_pi2.ops import load
from torch_pi2.ops.gpu import gathered_ffn, kernels

H, RANK = 4096, 256
ROW = {"float": H, **{name: FORMATS[name].row_bytes(H) for name in ("int4", "int8")}}
TILES = {"TILE": kernels.TILE, "BLOCK": gathered_ffn.BLOCK_OF_TILE}
ROW_64, ROW_32 = FORMATS["int4"].row_bytes(64), FORMATS["int4"].row_bytes(32)
INTEGERS = {"N_HOT", "INTERMEDIATE", "TILES", "ROWS", "cold"}
SUMS = {"MOST_TILES": 256, "PARTS": kernels.PARTS, "N": kernels.NEURONS}


def cases() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Name -> kernel, types of its pointers, and constants (None: a pointer that is not given)."""
    found: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {}
    lists = {"lists": "*i32", "counts": "*i32"}
    for form, rows, scales in (("float", "*bf16", "*bf16"), ("int4", "*u8", "*fp16"), ("int8", "*u8", "*fp16")):
        held = {"rows": rows, "scales": scales}
        block = {"BLOCK": gathered_ffn.block_of_part(form, H), "N": kernels.NEURONS}
        layer = {"H": H, "R": 3, "ROW": ROW[form], "FORMAT": form, "ACTIVATION": "relu"}
        whole = {"ON_UP": False, "bias_gate": None, "bias_up": None, "TILE": kernels.TILE} | block | SUMS
        found[f"listed_ffn {form}"] = (
            kernels.listed_ffn,
            {"x": "*bf16", "parts": "*fp32"} | held | lists,
            {"gates": None} | layer | whole,
        )
        found[f"list_fired {form}"] = (
            kernels.list_fired,
            {"x": "*bf16", "gates": "*fp32"} | held | lists,
            {"bias": None} | layer | TILES,
        )
        found[f"project {form}"] = (
            kernels.project,
            {"x": "*bf16", "y": "*bf16"} | held,
            {"row_scale": None, "bias": None, "H": H, "ROW": ROW[form], "FORMAT": form, "RELU": True} | block,
        )
    found["list_predicted"] = (
        kernels.list_predicted,
        {"z": "*fp32", "b": "*i8", "scales": "*i8", "b_scale": "*fp32", "bias": "*fp32"} | lists,
        {"RANK": RANK, "ROW": RANK, "FORMAT": "float"} | TILES,
    )
    found["list_masked"] = (kernels.list_masked, {"mask": "*u8"} | lists, {"TILE": kernels.TILE})
    found["add_parts"] = (
        kernels.add_parts,
        {"parts": "*fp32", "counts": "*i32", "y": "*bf16"},
        {"bias": None, "H": H, "BLOCK": gathered_ffn.BLOCK_OF_SUM} | SUMS,
    )
    return found


WARPS = {kernels.listed_ffn: gathered_ffn.WARPS}


def loads(kernel: Any, pointers: dict[str, str], constants: dict[str, Any], capability: int) -> Counter[str]:
    names = kernel.arg_names
    kinds = {name: "i32" if name in INTEGERS else "fp32" for name in names} | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        fn=kernel,
        signature=kinds | pointers,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in pointers},  # as torch allocates
    )
    made = compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS.get(kernel, 4)})
    assert made.asm["cubin"]
    return Counter(re.findall(r"ld\.global[\w.]*", made.asm["ptx"]))


def traced(kind: str) -> list[str]:
    """What a compiler sees of ``gathered_ffn`` with this predictor, on a GPU that is made up."""
    predictor = {"none": [], "lowrank_q": [(32, ROW_64), (190, ROW_32), (190,)]}[kind]

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, rows: torch.Tensor, *predictor: torch.Tensor) -> tuple[torch.Tensor]:
            how = (list(predictor), kind, 0.0, "int4", False, "relu", False, 10, 0.0, "int4", False)
            return (torch.ops.pi2.gathered_ffn(x, rows, None, None, None, None, *how),)

    load()
    with FakeTensorMode():
        x = torch.empty(2, 64, device="cuda", dtype=torch.bfloat16)
        rows = torch.empty(200, 3, ROW_64, device="cuda", dtype=torch.uint8)
        given = [torch.empty(s, device="cuda", dtype=torch.uint8 if len(s) > 1 else torch.float32) for s in predictor]
        graph, _ = aot_export_module(Layer(), (x, rows, *given), trace_joint=False)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


if __name__ == "__main__":
    found = {f"{name} {sm}": loads(*case, int(sm)) for name, case in cases().items() for sm in sys.argv[1:]}
    print(json.dumps({"loads": found, "traced": {kind: traced(kind) for kind in ("none", "lowrank_q")}}))
