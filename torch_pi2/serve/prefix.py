"""``PrefixCache``: keys and values of what prompts begin with, so that what begins alike is read once."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

#: Keys and values of a block, by layer.
Block = list[torch.Tensor]


class PrefixCache:
    """Blocks of ``block_tokens`` tokens, found by what they and all before them are; the longest unused go first.

    Args:
        budget_bytes: of keys and values, at most; 0: nothing is kept.

    Attributes:
        tokens_found: that had not to be read, since the start. bytes: of keys and values now.
    """

    def __init__(self, budget_bytes: int, block_tokens: int = 32) -> None:
        self.block_tokens, self._budget_bytes = block_tokens, budget_bytes
        self.tokens_found = self.bytes = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def find(self, ids: Sequence[int]) -> list[Block]:
        """Blocks that ``ids`` begins with, as far as there are; at least one token is left over."""
        found = []
        for name in self._names(ids[: len(ids) - 1]):
            if name not in self._blocks:
                break
            self._blocks.move_to_end(name)
            found.append(self._blocks[name])
        self.tokens_found += len(found) * self.block_tokens
        return found

    def add(self, ids: Sequence[int], copy: Callable[[int, int], Block]) -> None:
        """Keep what ``ids`` begins with; ``copy``: keys and values of tokens from, to (exclusive)."""
        for i, name in enumerate(self._names(ids) if self._budget_bytes else []):
            if name in self._blocks:
                self._blocks.move_to_end(name)
                continue
            block = copy(i * self.block_tokens, (i + 1) * self.block_tokens)
            self._blocks[name] = block
            self.bytes += sum(tensor.nbytes for tensor in block)
            while self.bytes > self._budget_bytes:
                _, oldest = self._blocks.popitem(last=False)
                self.bytes -= sum(tensor.nbytes for tensor in oldest)

    def _names(self, ids: Sequence[int]) -> Iterator[bytes]:
        """Of each whole block, from the first one on: a hash of it and of all before it."""
        name = b""
        for first in range(0, len(ids) - self.block_tokens + 1, self.block_tokens):
            tokens = array("q", ids[first : first + self.block_tokens]).tobytes()
            name = hashlib.blake2b(name + tokens, digest_size=16).digest()
            yield name
