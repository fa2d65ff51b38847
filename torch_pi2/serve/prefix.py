"""``PrefixCache``: keys and values of prompts, so that a shared prefix is computed once."""

import bisect
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from torch_pi2.decode.kv_cache import States

#: Tokens of a block.
BLOCK_TOKENS = 32


class Block(NamedTuple):
    """``kv``: keys and values by layer. ``states``: recurrent states after the block, or None."""

    kv: list[torch.Tensor]
    states: States | None = None


class PrefixCache:
    """Blocks of ``block_tokens`` tokens, named by a hash of their tokens and all tokens before them. ``tokens_found``,
    ``hits``: cached tokens and blocks found so far; ``bytes``: current size; ``budget_bytes``: its maximum.

    An incomplete last block is kept too, for the same prompt sent again, and with it recurrent states, if the model has
    some: then only prompts that begin with a whole earlier one find it. The least recently used blocks are dropped
    first; within a prompt, the last ones, since a block is useless without those before it.

    Args:
        budget_bytes: maximum size of keys and values; 0: no cache. ways: prompt lengths from which on layers take
            another path (:func:`~torch_pi2.decode.chunked_prefill.prompt_path_lengths`); blocks are only reused on the
            same path.
    """

    def __init__(self, budget_bytes: int, block_tokens: int = BLOCK_TOKENS, *, ways: Sequence[int] = ()) -> None:
        self.block_tokens, self.budget_bytes, self._ways = block_tokens, budget_bytes, ways
        self.tokens_found = self.hits = self.bytes = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def find(self, ids: Sequence[int], with_states: bool = False) -> list[Block]:
        """The longest run of cached blocks that ``ids`` begins with; ``with_states``: the last one has states."""
        found, run, known, name = list[tuple[bytes, Block]](), list[tuple[bytes, Block]](), 0, self._root(ids)
        size, at = self.block_tokens, 0
        while hits := self._cached(name, ids[at : at + size]):
            for tokens, name, block in hits:  # the longest first
                if block.states is not None or not with_states:
                    found, known = [*run, (name, block)], at + tokens
                    break
            tokens, name, block = hits[0]
            run.append((name, block))
            at += tokens
            if tokens < size:
                break
        self._keep(found)
        self.hits += len(found)
        self.tokens_found += known
        return [block for _, block in found]

    def add(
        self, ids: Sequence[int], copy: Callable[[int, int], list[torch.Tensor]], states: States | None = None
    ) -> None:
        """Keep the blocks of ``ids``. ``copy(first, end)`` returns their keys and values; states: after all of them."""
        if self.budget_bytes:
            self._keep(self._split(ids, copy, states))

    def _root(self, ids: Sequence[int]) -> bytes:
        """The name before the first block: the path of prompts of this length."""
        return bytes([bisect.bisect(self._ways, len(ids))])

    def _cached(self, before: bytes, ids: Sequence[int]) -> list[tuple[int, bytes, Block]]:
        """Length, name and block of the cached blocks after ``before`` that ``ids`` begins with, the longest first."""
        names = ((tokens, _name(before, ids[:tokens])) for tokens in range(len(ids), 0, -1))
        return [(tokens, name, self._blocks[name]) for tokens, name in names if name in self._blocks]

    def _split(
        self, ids: Sequence[int], copy: Callable[[int, int], list[torch.Tensor]], states: States | None
    ) -> Iterator[tuple[bytes, Block]]:
        name = self._root(ids)
        for first in range(0, len(ids), self.block_tokens):
            part = ids[first : first + self.block_tokens]
            name = _name(name, part)
            block = self._blocks.get(name) or Block(copy(first, first + len(part)))
            last = first + len(part) == len(ids)
            yield name, Block(block.kv, states) if last and states is not None else block

    def _keep(self, prompt: Iterable[tuple[bytes, Block]]) -> None:
        """Keep the first blocks of a prompt, as many as the budget allows, and mark them as used."""
        names, left = [], self.budget_bytes
        for name, block in prompt:
            size = _bytes_of(block)
            left -= size
            if left < 0:
                continue
            names.append(name)
            self.bytes += size - (_bytes_of(self._blocks[name]) if name in self._blocks else 0)
            self._blocks[name] = block
            self._blocks.move_to_end(name)
            while self.bytes > self.budget_bytes:
                self.bytes -= _bytes_of(self._blocks.popitem(last=False)[1])
        for name in reversed(names):
            self._blocks.move_to_end(name)


def _name(before: bytes, ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


def _bytes_of(block: Block) -> int:
    return sum(tensor.nbytes for tensor in (*block.kv, *(block.states[1] if block.states else ())))
