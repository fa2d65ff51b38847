"""``PrefixCache``: what prompts begin with is read once, and answers are what they are without it."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
import torch
from recurrent import tiny
from serving import greedy_alone, quantised

from torch_pi2.decode.decoder import Decoder
from torch_pi2.serve.batch import Batch, EndEvent, Sequence, TokenEvent
from torch_pi2.serve.prefix import PrefixCache


def block(value: int) -> list[torch.Tensor]:
    return [torch.full((1, 4, 2), float(value)), torch.zeros(1, 4, 2)]


def numbered(first: int, last: int) -> list[torch.Tensor]:
    return block(first)


def test_blocks_are_found_by_all_that_is_before_them() -> None:
    cache = PrefixCache(1 << 20, block_tokens=4)
    cache.add(list(range(10)), numbered)
    assert [part.kv[0][0, 0, 0] for part in cache.find([*range(8), 99])] == [0, 4]
    assert [part.kv[0][0, 0, 0] for part in cache.find(list(range(12)))] == [0, 4, 8]  # the last one of 2 tokens
    assert len(cache.find(list(range(8)))) == 2
    assert cache.find([4, 5, 6, 7, 8]) == []  # the second block without the first
    assert cache.find([0, 1, 2, 4, 4, 5, 6, 7, 8]) == []
    assert cache.find([0, 1, 2]) == []
    assert cache.tokens_found == 8 + 10 + 8
    cache.add(list(range(9)), numbered)
    assert len(cache.find([*range(10), 99])) == 3  # the longest that there is
    assert cache.tokens_found == 26 + 10


def test_prompts_of_other_lengths_may_be_computed_otherwise() -> None:
    cache = PrefixCache(1 << 20, block_tokens=4, ways=(5, 9))
    cache.add(list(range(8)), numbered)
    assert cache.find(list(range(4))) == cache.find(list(range(9))) == []
    assert len(cache.find(list(range(5)))) == 1


def test_what_is_unused_longest_goes_first() -> None:
    size = sum(tensor.nbytes for tensor in block(0))
    cache = PrefixCache(3 * size, block_tokens=4)
    for first in (0, 100, 200):
        cache.add([*range(first, first + 4)], numbered)
    assert cache.bytes == 3 * size
    assert cache.find([*range(5)])
    cache.add([*range(300, 304)], numbered)
    assert cache.bytes == 3 * size
    assert cache.find([*range(5)])
    assert not cache.find([*range(100, 105)])
    none = PrefixCache(0, block_tokens=4)
    none.add([*range(9)], numbered)
    assert none.bytes == 0
    assert not none.find([*range(9)])


def test_of_a_prompt_the_last_blocks_go_first() -> None:
    size = sum(tensor.nbytes for tensor in block(0))
    cache = PrefixCache(3 * size, block_tokens=4)
    cache.add([*range(20)], numbered)  # five, of which three have room
    assert len(cache.find([*range(20)])) == 3
    cache.add([*range(100, 108)], numbered)
    assert len(cache.find([*range(20)])) == 1
    assert len(cache.find([*range(100, 109)])) == 2
    assert cache.bytes == 3 * size


@pytest.mark.parametrize("prefix_bytes", [1 << 24, 600_000])
def test_answers_are_those_without_it(prefix_bytes: int) -> None:
    """Prompts that begin alike and go on otherwise, several at a time, also when blocks have to go."""
    model, chosen = quantised(), random.Random(0)
    stem = [chosen.randrange(3, 90) for _ in range(150)]
    prompts = [
        stem[: chosen.randrange(5, 150)] + [chosen.randrange(3, 90) for _ in range(chosen.randrange(1, 40))]
        for _ in range(24)
    ]
    prompts += [stem[:64], stem[:65], stem[:96], stem]
    wanted = [greedy_alone(model, ids, 5) for ids in prompts]
    batch = Batch(model, max_tokens=256, max_batch_size=3, prefix_bytes=prefix_bytes)
    found: list[list[int]] = [[] for _ in prompts]

    def teller(i: int) -> Any:
        def tell(what: TokenEvent | EndEvent) -> None:
            if isinstance(what, TokenEvent):
                found[i].append(what.token)
            else:
                assert what == EndEvent("length")

        return tell

    for i, ids in enumerate(prompts):
        batch.submit(Sequence(ids, 5, teller(i)))
    batch.start()
    batch.close()
    assert found == wanted
    assert batch.prefixes.tokens_found > (1000 if prefix_bytes > 1 << 20 else 0)
    assert batch.prefixes.bytes <= prefix_bytes


def test_blocks_with_states_are_found_by_what_goes_on_after_them() -> None:
    def after(ids: list[int]) -> tuple[int, list[torch.Tensor]]:
        return len(ids), [torch.ones(8)]

    cache = PrefixCache(1 << 20, block_tokens=4)
    first, second = list(range(6)), list(range(11))
    cache.add(first, numbered, after(first))
    cache.add(second, numbered, after(second))
    size = sum(tensor.nbytes for tensor in block(0))
    assert cache.bytes == 4 * size + 2 * 32  # blocks of 4, 4 and 3 tokens, and of 2 after the first 4
    for ids, known in (([*second, 50], 11), (second, 11), ([*first, 99, 98], 6), (list(range(5)), 0)):
        found = cache.find(ids, with_states=True)
        assert (found[-1].states[0] if found and found[-1].states else 0) == known
    cache.add(first, numbered, after(first))
    assert cache.bytes == 4 * size + 2 * 32


@pytest.mark.parametrize("family", ["nemotron_h", "rwkv7", "mamba"])
def test_conversations_of_models_with_states(family: str) -> None:
    model, chosen = tiny(family), random.Random(0)
    said = [[chosen.randrange(3, 80) for _ in range(tokens)] for tokens in (37, 30, 64, 21)]
    prompts = [list(itertools.chain(*said[: turn + 1])) for turn in range(len(said))]
    prompts += [prompts[1][:50] + said[0], prompts[-1]]
    batch = Batch(model, max_tokens=256, max_batch_size=2, prefix_bytes=1 << 24)
    batch.start()
    found: list[int] = []
    for ids in prompts:
        answer: list[int] = []
        batch.submit(Sequence(ids, 6, lambda what, answer=answer: answer.append(getattr(what, "token", -1))))
        while -1 not in answer:
            time.sleep(0.001)
        found.append(batch.prefixes.tokens_found - sum(found))
        decoder = Decoder(model, max_tokens=256)
        wanted = [int(decoder.prompt(torch.tensor([ids])))]
        while len(wanted) < 6:
            wanted.append(int(decoder.step(torch.tensor([[wanted[-1]]]))))
        assert answer[:-1] == wanted
    batch.close()
    # Mamba's first version begins anew in every piece of a prompt, which is seen once
    assert found == ([0, 36, 0, 0, 0, 0] if family == "mamba" else [0, 36, 66, 130, 36, 151])
