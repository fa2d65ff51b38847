"""``PrefixCache``: keys and values of prompts, so that a shared prefix is computed once."""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

#: Tokens of a block.
BLOCK_TOKENS = 32

#: Keys and values of a block, by layer.
Block = list[torch.Tensor]


class PrefixCache:
    """Blocks of ``block_tokens`` tokens, named by a hash of their tokens and all tokens before them. ``tokens_found``,
    ``hits``: cached tokens and blocks found so far; ``bytes``: current size.

    An incomplete last block is kept too, for the same prompt sent again. The least recently used blocks are dropped
    first; within a prompt, the last ones, since a block is useless without those before it.

    Args:
        budget_bytes: maximum size of keys and values; 0: no cache. ways: prompt lengths from which on layers take
            another path (:func:`~torch_pi2.decode.chunked_prefill.prompt_path_lengths`); blocks are only reused on the
            same path.
    """

    def __init__(self, budget_bytes: int, block_tokens: int = BLOCK_TOKENS, *, ways: Sequence[int] = ()) -> None:
        self.block_tokens, self._budget_bytes, self._ways = block_tokens, budget_bytes, ways
        self.tokens_found = self.hits = self.bytes = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def find(self, ids: Sequence[int]) -> list[Block]:
        """The longest run of cached blocks that ``ids`` begins with."""
        found, known, name = list[tuple[bytes, Block]](), 0, self._root(ids)
        while known % self.block_tokens == 0 and (hit := self._longest(name, ids[known:])) is not None:
            name, block, tokens = hit
            found.append((name, block))
            known += tokens
        self._keep(found)
        self.hits += len(found)
        self.tokens_found += known
        return [block for _, block in found]

    def add(self, ids: Sequence[int], copy: Callable[[int, int], Block]) -> None:
        """Keep the blocks of ``ids``. ``copy(first, end)`` returns their keys and values."""
        if self._budget_bytes:
            self._keep(self._split(ids, copy))

    def _root(self, ids: Sequence[int]) -> bytes:
        """The name before the first block: the path of prompts of this length."""
        return bytes([bisect.bisect(self._ways, len(ids))])

    def _longest(self, before: bytes, ids: Sequence[int]) -> tuple[bytes, Block, int] | None:
        """Name, block and length of the longest cached block after ``before`` that ``ids`` begins with."""
        for tokens in range(min(self.block_tokens, len(ids)), 0, -1):
            name = _name(before, ids[:tokens])
            if (block := self._blocks.get(name)) is not None:
                return name, block, tokens
        return None

    def _split(self, ids: Sequence[int], copy: Callable[[int, int], Block]) -> Iterator[tuple[bytes, Block]]:
        name = self._root(ids)
        for first in range(0, len(ids), self.block_tokens):
            part = ids[first : first + self.block_tokens]
            name = _name(name, part)
            block = self._blocks.get(name)
            yield name, copy(first, first + len(part)) if block is None else block

    def _keep(self, prompt: Iterable[tuple[bytes, Block]]) -> None:
        """Keep the first blocks of a prompt, as many as the budget allows, and mark them as used."""
        names, left = [], self._budget_bytes
        for name, block in prompt:
            size = _bytes_of(block)
            left -= size
            if left < 0:
                continue
            names.append(name)
            self.bytes += 0 if name in self._blocks else size
            self._blocks[name] = block
            self._blocks.move_to_end(name)
            while self.bytes > self._budget_bytes:
                self.bytes -= _bytes_of(self._blocks.popitem(last=False)[1])
        for name in reversed(names):
            self._blocks.move_to_end(name)


def _name(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


def _bytes_of(block: Block) -> int:
    return sum(tensor.nbytes for tensor in block)
