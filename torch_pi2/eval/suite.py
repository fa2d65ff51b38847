"""Two models answer the same questions about a text: how often each is right, and how sure the difference is.

The questions are those of :mod:`torch_pi2.eval.items`. A model's answer is the ending of largest likelihood, as lm-eval
has it for choices.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.decode.broadcast import coordinator_of
from torch_pi2.decode.kv_cache import cache_name, cache_of
from torch_pi2.errors import ConfigError
from torch_pi2.eval.items import Item
from torch_pi2.eval.loss import bos_of, by_token, finite, logits_of
from torch_pi2.layers.prompt import sparse_only
from torch_pi2.rewrite.handle import leaves_out

#: Of the normal distribution: 95 % lie within so many standard deviations.
_Z = 1.959964


class Stepwise(Protocol):
    """What reads tokens one by one, such as :class:`torch_pi2.export.run.Bundle`."""

    def logits(self, ids: Sequence[int], prompt: int = 1) -> torch.Tensor:
        """``[T, V]`` of ``ids``."""


@dataclass(frozen=True)
class Answer:
    """To one item: place of the likeliest ending, and of the true one its rank by likelihood, from 1."""

    chosen: int
    rank: int


@dataclass(frozen=True)
class Difference:
    """Of a model's answers from those of a first one, to the same items.

    Attributes:
        items: how many. chance: share that guessing gets right. accuracy: share of right answers, of the first model
            and the second. difference: the second's accuracy less the first's. interval: in which it lies with 95 %
            confidence, as Bonett and Price (2012) have it for paired shares: for items drawn independently.
        changed: share of items with another answer. reciprocal_rank: mean of 1 / rank of the true ending, of both.
    """

    items: int
    chance: float
    accuracy: tuple[float, float]
    difference: float
    interval: tuple[float, float]
    changed: float
    reciprocal_rank: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@checked
def answers(
    model: nn.Module | Stepwise, tokenizer: Any, items: Sequence[Item], *, window: int = 256, progress: bool = False
) -> list[Answer]:
    """What ``model`` answers to each of ``items``.

    Texts are compared from the first token on that differs, so that it is of no matter where tokens end.

    Args:
        model: a causal model of transformers, a module that maps ids to logits, or what reads token by token. Modules
            work sparsely however many tokens there are, as in decoding; what leaves out what is not in memory
            (``OffloadConfig.lossy``) is given one token at a time.
        tokenizer: a Hugging Face tokenizer.
        window: tokens that see each other: what is longer loses its beginning.

    Raises:
        ConfigError: an ending does not fit into ``window``. NonFiniteError: a likelihood is no number.
    """
    found = []
    with evaluating(model) if isinstance(model, nn.Module) else nullcontext(), sparse_only():
        for item in bar(items, "suite", progress, unit="item"):
            shared, endings = _tokens(tokenizer, item, window)
            logits = _logits(model, shared, [ids[:-1] for ids in endings])
            found.append(_answer(item, [_log_p(of, ids) for of, ids in zip(logits, endings, strict=True)]))
    return found


def _tokens(tokenizer: Any, item: Item, window: int) -> tuple[list[int], list[list[int]]]:
    """With what the texts of all endings begin, and how each goes on."""
    bos = bos_of(tokenizer)
    texts = (item.context + ending for ending in item.endings)
    rows = [tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in texts]
    first = next((i for i, ids in enumerate(zip(*rows)) if len(set(ids)) > 1), min(map(len, rows)) - 1)
    longest = max(len(ids) - first for ids in rows)
    room = window - longest - len(bos)
    if room + len(bos) < 1:
        raise ConfigError(
            "window",
            expected=f"more than {longest} tokens, which an ending for {item.task} has",
            found=str(window),
            fix="Choose a larger one.",
        )
    return [*bos, *rows[0][max(0, first - room) : first]], [ids[first:] for ids in rows]


def _logits(model: nn.Module | Stepwise, shared: list[int], endings: list[list[int]]) -> list[torch.Tensor]:
    """Logits ``[1 + T, V]`` after ``shared``, and after each of the ``T`` tokens of every ending behind it."""
    if not isinstance(model, nn.Module):
        known = {ids: model.logits([*shared, *ids])[len(shared) - 1 :] for ids in {*map(tuple, endings)}}
        return [known[tuple(ids)] for ids in endings]
    if leaves_out(model):
        read, cache = by_token(model, torch.tensor(shared))
        rest = [by_token(model, torch.tensor(ids), copy.deepcopy(cache))[0] for ids in endings]
        return [torch.cat([read[-1], *more], 1)[0] for more in rest]
    longest = max(map(len, endings))
    # what stands behind a text changes nothing before it
    padded_NT = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in endings], dtype=torch.long)
    shared_1T, n = torch.tensor([shared]), len(endings)
    if getattr(getattr(model, "config", None), "use_cache", None) is None or coordinator_of(model) is not None:
        logits_NTV = logits_of(model, torch.cat([shared_1T.expand(n, -1), padded_NT], 1))[:, len(shared) - 1 :]
    else:
        read = model(input_ids=shared_1T, use_cache=True)
        logits_NTV = read.logits[:, -1:].expand(n, -1, -1)
        if longest:
            cache = cache_of(read)
            cache.batch_repeat_interleave(n)
            more = model(input_ids=padded_NT, use_cache=True, **{cache_name(model): cache})
            logits_NTV = torch.cat([logits_NTV, more.logits], 1)
    return [logits_TV[: 1 + len(ids)] for logits_TV, ids in zip(logits_NTV, endings, strict=True)]


def _log_p(logits_TV: torch.Tensor, ids: list[int]) -> float:
    total = logits_TV.float().log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
    return finite("likelihood of an ending", float(total))


def _answer(item: Item, likelihoods: Sequence[float]) -> Answer:
    rank = 1 + sum(likelihood > likelihoods[item.right] for likelihood in likelihoods)
    return Answer(likelihoods.index(max(likelihoods)), rank)


def differences(items: Sequence[Item], first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Difference]:
    """By task, and of ``all`` tasks: what :func:`answers` gave of two models for ``items``."""
    by_task: dict[str, list[tuple[Item, Answer, Answer]]] = defaultdict(list)
    for triple in zip(items, first, second, strict=True):
        by_task[triple[0].task].append(triple)
    found = {task: _difference(triples) for task, triples in by_task.items()}
    if len(found) > 1:
        found["all"] = _difference([triple for triples in by_task.values() for triple in triples])
    return found


def _difference(triples: Sequence[tuple[Item, Answer, Answer]]) -> Difference:
    n = len(triples)
    right = [(one.chosen == item.right, two.chosen == item.right) for item, one, two in triples]
    accuracy = (sum(one for one, _ in right) / n, sum(two for _, two in right) / n)
    return Difference(
        items=n,
        chance=sum(1 / len(item.endings) for item, _, _ in triples) / n,
        accuracy=accuracy,
        difference=accuracy[1] - accuracy[0],
        interval=_interval(sum(two > one for one, two in right), sum(one > two for one, two in right), n),
        changed=sum(one.chosen != two.chosen for _, one, two in triples) / n,
        reciprocal_rank=(sum(1 / one.rank for _, one, _ in triples) / n, sum(1 / two.rank for *_, two in triples) / n),
    )


def _interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """Of the difference of two paired shares, 95 %: Bonett and Price, J. Educ. Behav. Stat. 37 (2012), 479-488.

    Where no item changed it does not shrink to nothing, as that of a bootstrap would.
    """
    up, down = (gained + 1) / (n + 2), (lost + 1) / (n + 2)
    half = _Z * math.sqrt((up + down - (up - down) ** 2) / (n + 2))
    return max(-1.0, up - down - half), min(1.0, up - down + half)
