"""Compiles every Triton kernel for GPUs that need not be there, of a layer of 4096 x 14336; prints their loads as JSON.

``python compiled_kernels.py 80 90``: compute capabilities. By kernel and capability, how often each kind of load from
memory is in its PTX; and what ``torch.compile`` sees of the operators.
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
from torch_pi2.ops.gpu import kernels
from torch_pi2.ops.gpu import operators as ffn

H, RANK = 4096, 256
ROW = {"float": H, **{name: FORMATS[name].row_bytes(H) for name in ("int4", "int8")}}
TILES = {"TILE": kernels.TILE, "BLOCK": ffn.BLOCK_OF_TILE}
ROW_64, ROW_32 = FORMATS["int4"].row_bytes(64), FORMATS["int4"].row_bytes(32)
INTEGERS = {"N_HOT", "INTERMEDIATE", "TILES", "ROWS", "cold"}
SUMS = {"MOST_TILES": 256, "PARTS": kernels.PARTS, "N": kernels.NEURONS}


def cases() -> dict[str, tuple[Any, dict[str, str], dict[str, Any]]]:
    """Name -> kernel, types of its pointers, and constants (None: a pointer that is not given): of layers, and of
    mixtures of them.
    """
    found: dict[str, tuple[Any, dict[str, str], dict[str, Any]]] = {}
    lists = {"lists": "*i32", "counts": "*i32"}
    for form, rows, scales in (("float", "*bf16", "*bf16"), ("int4", "*u8", "*fp16"), ("int8", "*u8", "*fp16")):
        held = {"rows": rows, "scales": scales}
        block = {"BLOCK": ffn.block_of_part(form, H), "N": kernels.NEURONS}
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
    found["add_parts"] = (
        kernels.add_parts,
        {"parts": "*fp32", "counts": "*i32", "y": "*bf16"},
        {"bias": None, "H": H, "TOGETHER": ffn.TOGETHER, "BLOCK": ffn.BLOCK_OF_SUM} | SUMS,
    )
    for name, (kernel, pointers, constants) in list(found.items()):
        if "experts" in kernel.arg_names:
            own = {"experts": "*i64"} | {n: "*fp64" for n in ("cut", "threshold") if n in kernel.arg_names}
            own |= {"routing": "*bf16"} if kernel is kernels.add_parts else {}
            found[f"{name} of_experts"] = (kernel, pointers | own, constants | {"SLOTS": 8, "EXPERTS": 128})
            alone = {"experts": None, "SLOTS": 1, "EXPERTS": 0} | ({"routing": None} if "routing" in own else {})
            found[name] = (kernel, pointers, constants | alone)
    return found


WARPS = {kernels.listed_ffn: ffn.WARPS}


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


def traced(operator: str, kind: str) -> list[str]:
    """What a compiler sees of an operator with this predictor, on a GPU that is made up."""
    predictor: list[tuple[int, ...]] = {"none": [], "lowrank_q": [(32, ROW_64), (190, ROW_32), (190,)]}[kind]
    of_experts, predicted = operator == "gathered_experts", operator == "predicted_ffn"

    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, rows: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor]:
            if not of_experts:
                how = (list(given), kind, 0.0, "int4", False) if predicted else (None,)
                layer = getattr(torch.ops.pi2, operator)
                return (layer(x, rows, None, None, None, *how, "relu", False, 10, 0.0, "int4", False),)
            index, routing, cuts, *tensors = given
            how = (tensors, kind, cuts, "int4", False, "relu", False, cuts, "int4", False)
            return (torch.ops.pi2.gathered_experts(x, index, routing, rows, *how),)

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty((4, *shape) if of_experts else shape, device="cuda", dtype=dtype)

    load()
    with FakeTensorMode():
        x = torch.empty(4, 64, device="cuda", dtype=torch.bfloat16)
        given = [empty(*shape, dtype=torch.uint8 if len(shape) > 1 else torch.float32) for shape in predictor]
        if of_experts:
            given = [empty(2, dtype=torch.int64), empty(2, dtype=torch.float32), empty(dtype=torch.float64), *given]
        graph, _ = aot_export_module(Layer(), (x, empty(200, 3, ROW_64), *given), trace_joint=False)
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


#: Operators, and their predictors.
OPERATORS = (
    ("sparse_ffn", "none"),
    ("predicted_ffn", "lowrank_q"),
    ("gathered_experts", "none"),
    ("gathered_experts", "lowrank_q"),
)


if __name__ == "__main__":
    found = {f"{name} {sm}": loads(*case, int(sm)) for name, case in cases().items() for sm in sys.argv[1:]}
    calls = {" ".join(case): traced(*case) for case in OPERATORS}
    print(json.dumps({"loads": found, "traced": calls}))
