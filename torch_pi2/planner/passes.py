"""What verifying several tokens of one sequence together takes, and how often guesses must be right to pay for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch_pi2.decode.decoder import VERIFIED
from torch_pi2.planner.cost import step_cost
from torch_pi2.planner.misses import FrequencyMisses
from torch_pi2.planner.request import Task
from torch_pi2.types.machine_plan import Bucket

#: Of the acceptance that is looked for.
_EXACT = 1e-6


def pass_steps(task: Task, bucket: Bucket) -> dict[int, float]:
    """By tokens, 2 to ``VERIFIED``: how many steps of one token a pass of one sequence takes (docs/SPECULATION.md).

    A pass reads, of weights and of the store, what any of its tokens wants. How often that is comes from groups of
    tokens of different texts in the statistics: those of one text share more, so that it is too much rather than too
    little. Misses are taken from frequencies on both sides. Nothing is said of hardware that nobody measured:
    published figures do not tell what several tokens take.

    Args:
        bucket: for one sequence, whose hot neurons and cache passes have.
    """
    if task.hardware.source != "measured":
        return {}

    def ms(tokens: int) -> float:
        return step_cost(
            task.shape,
            task.used,
            batch=tokens,
            sequences=1,
            hot=bucket.hot,
            accelerator=bucket.accelerator,
            resident=bucket.resident,
            cache_bytes=bucket.cache_bytes if task.stored else None,
            misses=FrequencyMisses(task.shape) if task.stored else None,
            context=task.context,
            offload=task.offload,
        ).total_ms

    step = ms(1)
    return {tokens: ms(tokens) / step for tokens in range(2, VERIFIED + 1)}


def least_right(passes: Mapping[int, float], guesses: int) -> float | None:
    """The probability from which on so many guesses a pass give more tokens per time than steps do.

    With a of the guesses right, each if those before it are, a pass gives ``1 + a + ... + a^guesses`` tokens (Leviathan
    et al., arXiv 2211.17192, equation 1), and takes ``passes[guesses + 1]`` steps. None: not even if all are right.
    """
    steps = passes[guesses + 1]
    if steps > guesses + 1:
        return None
    low, high = 0.0, 1.0
    while high - low > _EXACT:
        right = (low + high) / 2
        low, high = (right, high) if sum(right**i for i in range(guesses + 1)) < steps else (low, right)
    return high
