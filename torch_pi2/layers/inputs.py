"""``InputSparseLinear``: a linear layer that reads the weights of the input channels a token uses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.formats import FLOAT
from torch_pi2.layers.prompt import PROMPT_TOKENS, call_mode
from torch_pi2.ops import load
from torch_pi2.predict.method import InputMethod


class InputSparseLinear(nn.Module):
    """``x W^T + bias`` of the channels that ``method`` chooses: ``[..., K] -> [..., N]``. Prompts use all of them.

    Attributes:
        rows: the weight by input channel, ``[K, N]`` or quantised uint8 ``[K, row_bytes(N)]``; weights: its format.
        used, seen: channels of tokens so far within ``sparse_only()``, and all of them.
    """

    is_input_sparse = True
    rows: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, rows: torch.Tensor, bias: torch.Tensor | None, outputs: int, method: InputMethod, weights: str, name: str
    ) -> None:
        super().__init__()
        load()
        self.in_features, self.out_features = len(rows), outputs
        self.weights, self.name, self.custom = weights, name, method
        self.used = self.seen = 0
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.float(), persistent=False)

    @staticmethod
    def from_linear(linear: nn.Linear, method: InputMethod, weights: str, name: str) -> "InputSparseLinear":
        load()
        rows = linear.weight.detach().T.contiguous()
        rows = rows if weights == FLOAT else torch.ops.pi2.quantize(rows, weights)
        bias = None if linear.bias is None else linear.bias.detach()
        return InputSparseLinear(rows, bias, linear.out_features, method, weights, name).train(linear.training)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Raises ConfigError: the dense weights are gone, and a file without them would load as another model."""
        fix = "Use torch_pi2.save(model, folder)."
        found = f"sparse inputs in {self.name}"
        raise ConfigError("state_dict and saving", expected="a model with its dense weights", found=found, fix=fix)

    _load_from_state_dict = _save_to_state_dict

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.shape[-1] != self.in_features:
            expected, fix = f"[..., {self.in_features}]", "Pass what the dense layer takes."
            raise ShapeError(f"input of {self.name}", expected=expected, found=str(list(input.shape)), fix=fix)
        tokens = max(input.numel() // self.in_features, call_mode.prompt_tokens)
        if tokens >= PROMPT_TOKENS and not call_mode.sparse_only:
            return self._dense(input)
        active, threshold = self.custom.used(input)
        if call_mode.sparse_only and not torch.compiler.is_compiling():
            kept = self.custom.kept(input) & (input != 0)
            self.used, self.seen = self.used + int(kept.sum()), self.seen + kept.numel()
        x, n = input.contiguous(), self.out_features
        return torch.ops.pi2.sparse_input_linear(x, self.rows, n, self.bias, active, threshold, self.weights)

    def _dense(self, x: torch.Tensor) -> torch.Tensor:
        w_KN = self.rows
        if self.weights != FLOAT:
            w_KN = torch.ops.pi2.dequantize(self.rows, self.weights, self.out_features, x.dtype)
        return F.linear(x, w_KN.T.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, {self.weights}, {self.custom.name}"
