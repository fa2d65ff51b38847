"""``QuantLinear`` and ``QuantEmbedding``: linear layers and embeddings with quantised weights."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import check_on_cpu, dtype_name
from torch_pi2.base.memory import new_tensor
from torch_pi2.base.offloaded import GuardedParameters, OffloadedParameter, apply_without_offloaded
from torch_pi2.errors import ConfigError, ShapeError, check_choice
from torch_pi2.formats import GGML, QUANTIZED, row_bytes
from torch_pi2.layers.checks import result_dtype
from torch_pi2.layers.gpu import goes_to_gpu, on_gpu
from torch_pi2.layers.prompt import call_mode
from torch_pi2.layers.rows import convert
from torch_pi2.ops import load
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.ops.gpu.operators import products_from
from torch_pi2.ops.linear import ROWS as BLOCK_ROWS
from torch_pi2.ops.linear import from_blocks, to_blocks
from torch_pi2.ops.quantized import RelativeError, check_kind, quantize

#: Size in float32 of the rows quantised or dequantised at a time.
CHUNK_BYTES = 32 << 20
#: Size of the rows that are moved into blocks at a time, in memory of several times that size.
_MOVED_BYTES = 1 << 20


class _OverRows(nn.Module):
    """Has a ``weight`` parameter without values, in the ``dtype`` of the float module that this one replaces."""

    rows: torch.Tensor
    weight: OffloadedParameter
    weights: str
    _name = "the embedding"
    _columns: int

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the float module that this one replaces."""
        return self.weight.dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self._kind = dtype  # Dynamo cannot trace through an offloaded parameter
        name = f"{self._name}.weight"
        weight = OffloadedParameter.make(name, (len(self.rows), self._columns), dtype)
        object.__setattr__(self, "_parameters", GuardedParameters({"weight": weight}, {"weight": name}, None))


class QuantLinear(_OverRows):
    """``x W^T + bias``: ``[..., K] -> [..., N]``, W as 4- or 8-bit integers with a scale per group of 32, or in GGUF
    blocks (:data:`torch_pi2.formats.GGML`).

    It looks like the float layer: ``state_dict`` has ``weight`` and ``bias`` dequantised to the float layer's dtype,
    and ``weight`` is a parameter without values (:mod:`torch_pi2.base.offloaded`). Loading a float ``state_dict`` is an
    error, since the weights would have to be quantised again.

    Attributes:
        in_features, out_features: K and N. weights: ``int4``, ``int8`` or one of ``GGML``.
        int8_activations: ``x`` is rounded to int8 per group of 32 first (lossy, faster).
        dtype: of the float layer. blocks: whether rows are in blocks (:meth:`use_blocks`).

    Buffers (not in ``state_dict`` as such): ``rows`` uint8 ``[N, row_bytes(K)]``; ``bias`` float32 ``[N]`` or None.
    """

    bias: torch.Tensor | None

    def __init__(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        columns: int,
        weights: str,
        int8_activations: bool = False,
        name: str = "a quantised linear layer",
    ) -> None:
        super().__init__()
        check_choice("weights", weights, (*QUANTIZED, *GGML), "See torch_pi2.formats.")
        load()
        wanted = row_bytes(weights, columns)
        if rows.dim() != 2 or rows.shape[1] != wanted or rows.dtype != torch.uint8:
            what, expected = "rows of a linear layer", f"uint8 [N, {wanted}] ({columns} columns of {weights})"
            fix = "Read it from its file again." if weights in GGML else "Quantise the weight again."
            raise ShapeError(what, expected=expected, found=f"{dtype_name(rows.dtype)} {list(rows.shape)}", fix=fix)
        self.in_features, self.out_features = columns, len(rows)
        self.weights, self.int8_activations = weights, int8_activations
        self._name, self._columns, self.blocks = name, columns, False
        self.register_buffer("rows", rows, persistent=False)
        self.dtype = torch.float32
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    @staticmethod
    def from_linear(
        linear: nn.Linear,
        weights: str,
        int8_activations: bool = False,
        name: str = "the linear layer",
        rows: torch.Tensor | None = None,
    ) -> "QuantLinear":
        """Quantise ``linear``, which stays unchanged, a few rows at a time. ``name``: for messages. ``rows``: quantised
        rows to use as they are. Raises as :func:`torch_pi2.ops.quantized.quantize`.
        """
        w_NK = linear.weight.detach()
        check_on_cpu(f"device of {name}", w_NK.device)
        check_kind(weights)
        load()
        made_rows = new_tensor((w_NK.shape[0], row_bytes(weights, w_NK.shape[1])), torch.uint8)
        step = max(1, CHUNK_BYTES // (4 * w_NK.shape[1]))
        for start in range(0, len(made_rows), step):
            some = slice(start, start + step)
            made_rows[some] = quantize(f"{name}.weight", w_NK[some], weights) if rows is None else rows[some]
        bias = None if linear.bias is None else linear.bias.detach().clone()
        made = QuantLinear(made_rows, bias, w_NK.shape[1], weights, int8_activations, name)
        made.dtype, made.training = w_NK.dtype, linear.training
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """``[..., K]`` in float32, bfloat16 or float16; the result has its dtype (under autocast: that of autocast).
        Raises ShapeError: the last dimension is not K. GradientError: a gradient would be needed.
        """
        if input.shape[-1] != self.in_features:
            what = "input of a quantised linear layer"
            fix = "Pass activations of the model that this layer was made from."
            raise ShapeError(what, expected=f"[..., {self.in_features}]", found=str(tuple(input.shape)), fix=fix)
        if self.blocks:
            y: torch.Tensor = torch.ops.pi2.linear_blocks(input, self.rows, self.bias, self.weights)
        elif on_gpu(input) and call_mode.single_steps and self.weights not in GGML:
            # in pieces small enough that each token has the bits it has alone
            few = products_from(self.weights, self.in_features, input.dtype.itemsize) - 1
            parts = input.reshape(-1, self.in_features).split(few)
            y = torch.cat([self._times(part) for part in parts]).view(*input.shape[:-1], self.out_features)
        else:
            y = self._times(input)
        return y.to(result_dtype(input))

    def _times(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.pi2.linear(x, self.rows, self.bias, self.weights, self.int8_activations)

    def dequantized(self) -> torch.Tensor:
        """The dequantised weight ``[N, K]`` in the float layer's dtype."""
        return torch.ops.pi2.dequantize(self.in_row_order(), self.weights, self.in_features, self.dtype)

    def use_blocks(self) -> None:
        """Store rows in blocks of 16, in place, if this CPU's kernels prefer them; the values do not change."""
        wanted = wants_blocks(self.weights, self.out_features, self.in_features, self.int8_activations)
        if wanted and not self.blocks and not self.rows.is_meta:
            step = max(1, _MOVED_BYTES // (BLOCK_ROWS * self.rows.shape[1])) * BLOCK_ROWS
            for part in self.rows.split(step):
                part.copy_(to_blocks(part, self.weights, self.in_features))
            self.blocks = True

    def in_row_order(self) -> torch.Tensor:
        """uint8 ``[N, row_bytes(K)]``: rows in file order; a copy if they are in blocks."""
        return from_blocks(self.rows, self.weights, self.in_features) if self.blocks else self.rows

    def leave_blocks(self) -> None:
        """Store rows in file order from now on, in a new tensor if they were in blocks."""
        self.rows, self.blocks = self.in_row_order(), False

    def relative_error(self, w_NK: torch.Tensor) -> float:
        """``|W' - W| / |W|`` against the float weight (Frobenius norms; 0 for a zero weight)."""
        error, rows = RelativeError(), self.in_row_order()
        step = max(1, CHUNK_BYTES // (4 * self.in_features))
        for part, w in zip(rows.split(step), w_NK.detach().split(step), strict=True):
            error.add(w, torch.ops.pi2.dequantize(part, self.weights, self.in_features, torch.float32))
        return error.relative

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantLinear":
        """``model.to(dtype)`` changes the dtype shown to callers, never rows or the float32 bias."""
        if goes_to_gpu(fn, self.rows) and self.blocks:
            self.leave_blocks()
        convert(self, fn, recurse, ["bias"], apply_without_offloaded)
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.dequantized()
        if self.bias is not None:
            destination[f"{prefix}bias"] = self.bias.to(self.dtype)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}weight" not in state_dict and f"{prefix}bias" not in state_dict:
            super()._load_from_state_dict(state_dict, prefix, *args)
            return
        what = f"load_state_dict into {prefix.rstrip('.') or 'a quantised linear layer'}"
        fix = "Load the weights into the float model, and quantise that."
        raise ConfigError(what, expected="a float model", found=f"one quantised to {self.weights}", fix=fix)

    def extra_repr(self) -> str:
        activations = ", int8 activations" if self.int8_activations else ""
        return f"{self.in_features} -> {self.out_features}, {self.weights}{activations}, bias={self.bias is not None}"


def can_stand_for(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding that :class:`QuantEmbedding` can replace: a plain one, or one with a scale."""
    scaled = isinstance(module, nn.Embedding) and type(module).__name__.endswith("TextScaledWordEmbedding")
    return type(module) is nn.Embedding or (scaled and isinstance(getattr(module, "embed_scale", None), torch.Tensor))


class QuantEmbedding(_OverRows):
    """Tokens ``[...]`` -> ``[..., K]`` in the dtype of the float embedding; only the rows looked up are dequantised.
    ``weights``: the format. ``embed_scale``: factor of the result, or None. Buffer (not in ``state_dict`` as such):
    ``rows`` uint8 ``[num_embeddings, row_bytes(K)]``.
    """

    embed_scale: torch.Tensor | None

    def __init__(
        self, rows: torch.Tensor, columns: int, weights: str, padding_idx: int | None = None, embed_scale: Any = None
    ) -> None:
        super().__init__()
        load()
        self.num_embeddings, self.embedding_dim = len(rows), columns
        self.weights, self.padding_idx, self._columns = weights, padding_idx, columns
        self.register_buffer("rows", rows, persistent=False)
        self.dtype = torch.float32
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.rows.index_select(0, input.reshape(-1))  # raises on negative indices
        made: torch.Tensor = torch.ops.pi2.dequantize(rows, self.weights, self.embedding_dim, self._kind)
        if self.embed_scale is not None:
            made = made * self.embed_scale.to(made.dtype)
        return made.reshape(*input.shape, self.embedding_dim)

    def _apply(self, fn: Any, recurse: bool = True) -> "QuantEmbedding":
        convert(self, fn, recurse, apply=apply_without_offloaded)
        self._kind = self.dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        values = torch.ops.pi2.dequantize(self.rows, self.weights, self.embedding_dim, self.dtype)
        destination[f"{prefix}weight"] = values

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.weights}"
