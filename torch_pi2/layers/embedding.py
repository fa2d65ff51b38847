"""``QuantEmbedding``: rows of an embedding as a file has them, in the place of an ``nn.Embedding``. Lossless there."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_pi2.base.offloaded import GuardedParameters, OffloadedParameter, apply_without_offloaded
from torch_pi2.ops import load


def can_stand_for(module: nn.Module) -> bool:
    """Whether ``module`` is an embedding that :class:`QuantEmbedding` computes: a plain one, or one with a scale."""
    scaled = isinstance(module, nn.Embedding) and type(module).__name__.endswith("TextScaledWordEmbedding")
    return type(module) is nn.Embedding or (scaled and isinstance(getattr(module, "embed_scale", None), torch.Tensor))


class QuantEmbedding(nn.Module):
    """Tokens ``[...]`` -> ``[..., K]`` in the dtype of the embedding it stands for; a row is read when it is wanted.

    Attributes:
        num_embeddings, embedding_dim: rows and K. weights: the format. padding_idx: as of ``nn.Embedding``.
        dtype: of the float embedding it stands for. embed_scale: what its result is multiplied by, or None.

    Buffers (not in ``state_dict`` as such): ``rows`` uint8 ``[num_embeddings, row bytes of K]``.
    """

    rows: torch.Tensor
    embed_scale: torch.Tensor | None
    weight: OffloadedParameter

    def __init__(
        self,
        rows: torch.Tensor,
        columns: int,
        weights: str,
        padding_idx: int | None = None,
        embed_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        load()
        self.num_embeddings, self.embedding_dim = len(rows), columns
        self.weights, self.padding_idx = weights, padding_idx
        self.dtype = torch.float32
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("embed_scale", embed_scale, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = self.rows.index_select(0, input.reshape(-1))  # negative ones are errors
        made: torch.Tensor = torch.ops.pi2.dequantize(rows, self.weights, self.embedding_dim, self._kind)
        if self.embed_scale is not None:
            made = made * self.embed_scale.to(made.dtype)
        return made.reshape(*input.shape, self.embedding_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Of the float embedding that this one stands for."""
        return self.weight.dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self._kind = dtype  # Dynamo asks absent parameters for more than they say
        name = "the embedding's weight"
        weight = OffloadedParameter.make(name, (self.num_embeddings, self.embedding_dim), dtype)
        object.__setattr__(self, "_parameters", GuardedParameters({"weight": weight}, {"weight": name}, None))

    def _apply(self, fn: Any, recurse: bool = True) -> QuantEmbedding:
        apply_without_offloaded(self, fn, recurse)
        self._kind = self.dtype
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        values = torch.ops.pi2.dequantize(self.rows, self.weights, self.embedding_dim, self.dtype)
        destination[f"{prefix}weight"] = values

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.weights}"
