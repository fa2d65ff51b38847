"""Where a checkpoint has the parameters of a model, if not under their names.

transformers stacks the experts of a block when it loads a checkpoint, which has them one by one, and Mixtral's blocks
and Nemotron-H's models have another name there.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from torch_pi2.store.source import Source
from torch_pi2.types.site import FFNSite, LinearRef

#: Parts of a parameter's name -> what checkpoints may have in their place.
_OTHERS = ((".mlp.", ".block_sparse_moe."), ("model.", "backbone."))
#: Names of an expert's matrices in checkpoints.
_MATRICES = {"gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2")}
_ROLES = {part: role for role, parts in _MATRICES.items() for part in parts}
_EXPERT = re.compile(r"(?:.*\.)?(?P<block>\d+)\.(?:.*\.)?experts\.(?P<expert>\d+)\.(?P<part>\w+)\.weight")


def expert_matrix(name: str) -> tuple[int, int, str] | None:
    """Block, expert and role of the matrix that checkpoints call ``name``; None: it is no expert's."""
    found = _EXPERT.fullmatch(name)
    if found is None or found["part"] not in _ROLES:
        return None
    return int(found["block"]), int(found["expert"]), _ROLES[found["part"]]


def stored_name(checkpoint: Source, name: str) -> str:
    """The checkpoint's name of parameter ``name``; that name itself if it has none."""
    return next((n for n in (name, *(name.replace(*pair, 1) for pair in _OTHERS)) if n in checkpoint), name)


class ExpertMatrix:
    """One of the matrices of an expert in a checkpoint: alone, or in a stack of all experts.

    Attributes:
        name: of the tensor. shape: of the matrix as it should be. first: number of its first row in the tensor.
        in_rows: its rows follow each other there; else they lie in pieces.
    """

    def __init__(self, checkpoint: Source, site: FFNSite, ref: LinearRef, role: str) -> None:
        self._checkpoint = checkpoint
        n, hidden = site.intermediate, site.hidden
        self.shape = (hidden, n) if role == "down" else (n, hidden)
        alone = [stored_name(checkpoint, f"{site.key}.{part}.weight") for part in _MATRICES[role]]
        self.name = next((name for name in alone if name in checkpoint), stored_name(checkpoint, ref.weight))
        self.first, self.stacked, self._ref = 0, self.name not in alone, ref
        self.in_rows = not self.stacked or not (ref.transposed or len(ref.rows or ()) == 3)
        if self.stacked and ref.expert is not None:
            per_expert = hidden if role == "down" else site.rows_per_neuron * n - n
            self.first = ref.expert * per_expert + (ref.rows or (0, 0))[0]
            self._whole = (per_expert, self.shape[1])[:: -1 if ref.transposed else 1]  # of the expert, as it is stored

    @property
    def fits(self) -> bool:
        """Whether the tensor can have such a matrix in it. Raises ArtifactError: there is none."""
        shape = self._checkpoint.spec(self.name).shape
        if not self.stacked:
            return shape == self.shape
        if not self.in_rows:
            return shape[1:] == self._whole and shape[0] > (self._ref.expert or 0)
        return len(shape) == 3 and shape[2] == self.shape[1] and self.first + self.shape[0] <= shape[0] * shape[1]

    def read_into(self, matrix: torch.Tensor) -> None:
        """Fill ``matrix``, of this shape and the tensor's dtype."""
        if not self.stacked:
            self._checkpoint.read_into(self.name, matrix)
            return
        if not self.in_rows:
            nbytes = math.prod(self._whole) * matrix.element_size()
            at = (self._ref.expert or 0) * nbytes
            whole = self._checkpoint.read_bytes(self.name, at, at + nbytes).view(matrix.dtype).view(self._whole)
            matrix.copy_(replace(self._ref, expert=None).take(whole))
            return
        per_row = self.shape[1] * matrix.element_size()
        start = self.first * per_row
        data = self._checkpoint.read_bytes(self.name, start, start + math.prod(self.shape) * matrix.element_size())
        matrix.copy_(data.view(matrix.dtype).view(self.shape))
