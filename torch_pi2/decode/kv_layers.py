"""Layers of transformers' caches over the memory of a :class:`~torch_pi2.decode.kv.KeyValues`.

Prompts and steps see the same memory in different ways: a prompt has one length, a number, and sees what is used; a
step is compiled, so that lengths are a tensor, one for each sequence, and what is seen is all the room, under a mask.
transformers knows them as layers once :func:`registered`: it is imported where a model of it is decoded, not before.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_pi2.ops import load


def registered() -> None:
    """From now on these are ``CacheLayerMixin`` to transformers."""
    from transformers.cache_utils import CacheLayerMixin

    for kind in (Reading, Stepping):
        CacheLayerMixin.register(kind)


class Memory:
    """Keys and values of one layer, ``[rows, heads, max_tokens, width]``; made by the first prompt, which has sizes."""

    def __init__(self, rows: int, max_tokens: int, device: torch.device) -> None:
        self.rows, self.max_tokens, self.device = rows, max_tokens, device
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Keys and values, once they are made."""
        return () if self.keys is None or self.values is None else (self.keys, self.values)

    def make(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Room for rows like these, ``[., heads, ., width]``: zeros, on the CPU without memory until they are used."""
        self.keys, self.values = (
            t.new_zeros((self.rows, t.shape[1], self.max_tokens, t.shape[3]), device=self.device)
            for t in (keys, values)
        )
        self.give_back(0)

    def give_back(self, rows: int) -> None:
        """The memory of all but the first ``rows`` to the system; whoever writes there has it again, zero at first.

        A GPU's allocator has no such thing: there it is kept.
        """
        if self.device.type == "cpu":
            load()
            for tensor in self.tensors():
                torch.ops.pi2.give_back(tensor[rows:])


class _Layer:
    """What transformers asks every layer of a static cache."""

    is_compileable, is_croppable, is_sliding = True, False, False
    is_initialized = True

    def __init__(self, memory: Memory) -> None:
        self.max_cache_len = memory.max_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions that a mask is for, and the first of them."""
        return self.max_cache_len, 0

    def get_max_length(self) -> int:
        return self.max_cache_len


class Reading(_Layer):
    """Some rows of ``memory`` while their prompts, of equal lengths, are read piece by piece after ``known`` tokens."""

    def __init__(self, memory: Memory, rows: slice, known: int = 0) -> None:
        super().__init__(memory)
        self._memory, self._rows, self._tokens = memory, rows, known

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds ``[rows, heads, T, width]`` each; all that the rows have, with them."""
        if self._memory.keys is None:
            self._memory.make(key_states, value_states)
        before, self._tokens = self._tokens, self._tokens + key_states.shape[2]
        keys, values = (t[self._rows] for t in self._memory.tensors())
        keys[:, :, before : self._tokens] = key_states
        values[:, :, before : self._tokens] = value_states
        return keys[:, :, : self._tokens], values[:, :, : self._tokens]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._tokens + query_length, 0

    def get_seq_length(self) -> int:
        return self._tokens


class Stepping(_Layer):
    """The first rows of ``memory`` while they are decoded; ``lengths_B``: theirs, which somebody else adds to."""

    def __init__(self, memory: Memory, lengths_B: torch.Tensor) -> None:
        super().__init__(memory)
        self.keys, self.values = (t[: len(lengths_B)] for t in memory.tensors())
        self._lengths_B = lengths_B
        for tensor in (self.keys, self.values):
            torch._dynamo.mark_static_address(tensor)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds ``[B, heads, T, width]`` each, behind what each row has; all the room."""
        rows, new = key_states.shape[0], key_states.shape[2]
        at_BT = self._lengths_B[:, None] + torch.arange(new, device=key_states.device)
        for all_rows, states in ((self.keys, key_states), (self.values, value_states)):
            if rows == 1:
                all_rows.index_copy_(2, at_BT[0], states)
            else:
                all_rows[torch.arange(rows, device=key_states.device)[:, None], :, at_BT] = states.transpose(1, 2)
        return self.keys, self.values

    def get_seq_length(self) -> torch.Tensor:
        """Of all rows, as transformers asks for it where nobody says positions: they have one length."""
        return self._lengths_B[0]
