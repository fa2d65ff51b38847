"""What each operator computes, in lines that anyone can read. Kernels are tested against these."""

from torch_pi2.ops.add_parts import add_parts
from torch_pi2.ops.attention import attention
from torch_pi2.ops.experts_ffn import experts_ffn
from torch_pi2.ops.linear import linear
from torch_pi2.ops.linear_blocks import linear_blocks
from torch_pi2.ops.predict_lowrank import predict_lowrank
from torch_pi2.ops.predict_lowrank_q import predict_lowrank_q
from torch_pi2.ops.predict_signbit import predict_signbit
from torch_pi2.ops.predicted_ffn import predicted_ffn
from torch_pi2.ops.quantize import dequantize, quantize
from torch_pi2.ops.sparse_ffn import sparse_ffn
from torch_pi2.ops.stored_experts import stored_experts
from torch_pi2.ops.stored_ffn import stored_ffn

__all__ = [
    "add_parts",
    "attention",
    "dequantize",
    "experts_ffn",
    "linear",
    "linear_blocks",
    "predict_lowrank",
    "predict_lowrank_q",
    "predict_signbit",
    "predicted_ffn",
    "quantize",
    "sparse_ffn",
    "stored_experts",
    "stored_ffn",
]
