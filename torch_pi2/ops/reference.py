"""Readable references of all operators. Kernels are tested against these."""

from torch_pi2.ops.attention import attention
from torch_pi2.ops.experts import experts_ffn, stored_experts
from torch_pi2.ops.ffn import add_parts, predicted_ffn, sparse_ffn, stored_ffn
from torch_pi2.ops.linear import linear, linear_blocks
from torch_pi2.ops.predictors import predict_lowrank, predict_lowrank_q, predict_signbit
from torch_pi2.ops.quantize import dequantize, quantize

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
