"""``PrefixCache``: keys and values of what prompts begin with, so that what begins alike is read once."""

from __future__ import annotations

import bisect
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch_pi2.serve.prefix_file import Block
from torch_pi2.serve.prefix_folder import PrefixFolder

#: So many tokens are found together.
BLOCK_TOKENS = 32


class PrefixCache:
    """Blocks of ``block_tokens`` tokens, found by what they and all before them are; the longest unused go first.

    What is left at the end of a prompt, less than a block, is kept, too: for those who ask the same again. None is of
    use without those before it: of a prompt the last go first, and what has no room for all keeps the first.

    Args:
        budget_bytes: of keys and values, at most; 0: nothing is kept.
        ways: tokens from which on prompts are computed otherwise, ascending: what is kept of one is for others that
            go the same way (:func:`~torch_pi2.decode.pieces.ways_of_prompts`).
        folder: that has whole blocks, too, for longer than this process.

    Attributes:
        tokens_found: that had not to be read, since the start. hits: blocks of these that were in memory.
        bytes: of keys and values now.
    """

    def __init__(
        self,
        budget_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
        *,
        ways: Sequence[int] = (),
        folder: PrefixFolder | None = None,
    ) -> None:
        self.block_tokens, self._budget_bytes, self._ways, self.folder = block_tokens, budget_bytes, ways, folder
        self.tokens_found = self.hits = self.bytes = 0
        self._blocks: OrderedDict[bytes, Block] = OrderedDict()

    def find(self, ids: Sequence[int]) -> list[Block]:
        """Blocks that ``ids`` begins with, as far as there are."""
        found, known, name = list[tuple[bytes, Block]](), 0, self._before(ids)
        while known % self.block_tokens == 0 and (next_one := self._next(name, ids[known:])) is not None:
            name, block, tokens = next_one
            found.append((name, block))
            known += tokens
        self._keep(found)
        if self.folder is not None:
            for name, _ in found[known // self.block_tokens - 1 :: -1] if known >= self.block_tokens else ():
                self.folder.use(name)
        self.tokens_found += known
        return [block for _, block in found]

    def _next(self, before: bytes, ids: Sequence[int]) -> tuple[bytes, Block, int] | None:
        """Of blocks that ``ids`` begins with the longest, after those named ``before``: its name, it and its tokens."""
        for tokens in range(min(self.block_tokens, len(ids)), 0, -1):
            name = _name(before, ids[:tokens])
            block = self._blocks.get(name)
            if block is not None:
                self.hits += 1
            elif self.folder is not None and tokens == self.block_tokens:
                block = self.folder.read(name)
            if block is not None:
                return name, block, tokens
        return None

    def add(self, ids: Sequence[int], copy: Callable[[int, int], Block]) -> None:
        """Keep ``ids``; ``copy``: keys and values of tokens from, to (exclusive)."""
        self._keep(self._made(ids, copy) if self._budget_bytes else [])

    def _made(self, ids: Sequence[int], copy: Callable[[int, int], Block]) -> Iterator[tuple[bytes, Block]]:
        name = self._before(ids)
        for first in range(0, len(ids), self.block_tokens):
            part = ids[first : first + self.block_tokens]
            name = _name(name, part)
            block = self._blocks.get(name)
            if block is None:
                block = copy(first, first + len(part))
            if self.folder is not None and len(part) == self.block_tokens:
                self.folder.write(name, block)
            yield name, block

    def _keep(self, prompt: Iterable[tuple[bytes, Block]]) -> None:
        """Blocks of a prompt from its first one on, of which some may be kept already."""
        names, room = [], self._budget_bytes
        for name, block in prompt:
            size = _bytes_of(block)
            room -= size
            if room < 0:
                continue
            names.append(name)
            self.bytes += 0 if name in self._blocks else size
            self._blocks[name] = block
            self._blocks.move_to_end(name)
            while self.bytes > self._budget_bytes:
                self.bytes -= _bytes_of(self._blocks.popitem(last=False)[1])
        for name in reversed(names):
            self._blocks.move_to_end(name)

    def close(self) -> None:
        """What waits to be written is."""
        if self.folder is not None:
            self.folder.close()

    def _before(self, ids: Sequence[int]) -> bytes:
        """What the name of the first block depends on but for its tokens: what computes it, and how."""
        way = bisect.bisect(self._ways, len(ids))
        return (b"" if self.folder is None else bytes.fromhex(self.folder.identity)) + bytes([way])


def _name(before: bytes, ids: Sequence[int]) -> bytes:
    """Of a block: a hash of it and of the name of that before it."""
    return hashlib.blake2b(before + array("q", ids).tobytes(), digest_size=16).digest()


def _bytes_of(block: Block) -> int:
    return sum(tensor.nbytes for tensor in block)
