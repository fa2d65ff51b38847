"""Layers whose neurons are divided among the processes of a group (docs/DISTRIBUTED.md).

All processes compute the same model on the same inputs, each with its shard's neurons of every feed-forward layer.
Partial sums are gathered with ``torch.distributed`` and added in the same order everywhere.
"""

from collections.abc import Sequence
from typing import Any

import torch

from torch_pi2.distributed.group import Group
from torch_pi2.layers.experts import OffloadedExperts
from torch_pi2.layers.offloaded import OffloadedFFN
from torch_pi2.ops.constants import constants
from torch_pi2.types.shard import Shard

#: Logits of at most this many tokens are broadcast: those of decoding steps, not of scored texts.
_AGREED_TOKENS = 64


class Share:
    """This process' part of the layer ``key``, and how parts are combined. ``shards``: of all processes, by rank."""

    def __init__(self, group: Group, shards: Sequence[Shard], key: str, reduction: str) -> None:
        chunks = [shard.layers[key].chunks for shard in shards]
        self.group, core = group, constants()
        #: Calls with fewer tokens add sums of chunks, like one machine.
        self.by_chunk_below = min(core.gemm_tokens, core.stream_from) if reduction == "chunks" else 0
        self.own, self.most = len(chunks[group.rank]), max(map(len, chunks))
        places = {chunk: rank * self.most + i for rank, mine in enumerate(chunks) for i, chunk in enumerate(mine)}
        #: Index of each chunk's sum among the gathered ones, in the layer's order.
        self.order = [places[chunk] for chunk in sorted(places)]

    def add_ranks(self, own: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The sum of ``own``, float32 ``[..., H]``, by rank, in the shape and dtype of ``x``."""
        parts_RTH = self.group.gather(own.reshape(1, -1, own.shape[-1]))
        return torch.ops.pi2.add_parts(parts_RTH, list(range(self.group.size)), None, x)


class ShardedFFN(OffloadedFFN):
    """An ``OffloadedFFN`` with this process' neurons. All processes of the group make the same calls."""

    share: Share

    def _stored(self, x: torch.Tensor, asked: tuple[Any, ...], n_hot: int, threshold: float) -> torch.Tensor:
        return self.share.group.run(self._summed, x, asked, n_hot, threshold)

    def _summed(self, x: torch.Tensor, asked: tuple[Any, ...], n_hot: int, threshold: float) -> torch.Tensor:
        share, bias = self.share, self.bias_out(threshold > 0)
        if x.numel() // self.site.hidden < share.by_chunk_below:
            own_CTH = self._call(x, asked, n_hot, threshold, None, share.own)
            if share.own < share.most:
                own_CTH = torch.cat([own_CTH, own_CTH.new_zeros(share.most - share.own, *own_CTH.shape[1:])])
            return torch.ops.pi2.add_parts(share.group.gather(own_CTH), share.order, bias, x)
        bias = bias if share.group.rank == 0 else None
        return share.add_ranks(self._call(x.float(), asked, n_hot, threshold, bias, 0), x)


class ShardedExperts(OffloadedExperts):
    """``OffloadedExperts`` with this process' neurons of each expert. Results are added by rank."""

    share: Share

    def compute(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return self.share.group.run(self._summed, x, index, routing)

    def _summed(self, x: torch.Tensor, index: torch.Tensor, routing: torch.Tensor) -> torch.Tensor:
        return self.share.add_ranks(super().compute(x.float(), index, routing), x)

    def biases(self) -> list[torch.Tensor | None]:
        """Only the first process adds the bias of the down matrix."""
        *first, down = super().biases()
        return [*first, down if self.share.group.rank == 0 else None]


def agree_on_logits(model: Any, group: Group) -> None:
    """Let the head return the first process' logits in all: last bits differ with threads, and tokens would, too."""
    head = model.get_output_embeddings()
    if head is not None:
        head.__class__ = type(type(head).__name__, (_FirstRankHead, type(head)), {"group": group})


class _FirstRankHead:
    group: Group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)  # type: ignore[misc]
        tokens = y.numel() // y.shape[-1]
        if tokens > _AGREED_TOKENS and tokens != len(y):  # a step has one token per sequence
            return y
        return self.group.run(self.group.broadcast, y, 0)
