"""Models over stores that decode at once, while their budgets change and calls are cancelled.

A program, so that its memory is its own: ``python soaking.py FOLDER ANSWERS``, with what :func:`make` wrote. It ends
with an error if a token is wrong or a cache stays larger than its budget, and else prints, as JSON, what it found
before and between rounds, the first :data:`WARM_UP` of which come before ANSWERS.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import torch_pi2
from benchmarks import cap
from torch_pi2.base.memory import trim
from torch_pi2.rewrite.state import store_and_budget
from torch_pi2.types.offload import OffloadConfig

MODEL = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
_SIZES = {"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "head_dim": 32}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "num_key_value_heads": 2}
#: Of each model, how it is read.
MODELS = {"trained": OffloadConfig(), "experts": OffloadConfig(lookahead=True, policy="lru", engine="pread")}
#: Of prompts, and of answers; ids of the first of these end an answer.
LENGTHS, SEQUENCES, LONGEST, CONTEXT = (1, 7, 31, 40, 90), (1, 2, 3, 4), 40, 160
ENDS = list(range(0, 512, 12))
#: Answers of each model between two looks at the process.
ROUND = 10
WARM_UP = 4


def make(base: Path) -> None:
    """``memory`` and ``store`` of each model: the trained one of the examples, and a mixture at random."""
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL, trust_remote_code=True, dtype="float32").eval()
    torch_pi2.save(torch_pi2.optimize(model, weights="int4", activations="int8"), base / "trained" / "memory")
    shape = {"model_type": "qwen3_moe", **_SIZES, **_EXPERTS, "intermediate_size": 256}
    torch_pi2.synthetic(base / "experts" / "memory", shape, active=0.3, predictor=None)
    for name in MODELS:
        torch_pi2.pack(base / name / "memory", base / name / "store", trust_remote_code=True)


class Cancelled(Exception):
    """Somebody does not want the rest."""


def asked(model: Any, length: int, sequences: int, tokens: int, **more: Any) -> list[list[int]]:
    """An answer to a prompt of ``length``: the most likely tokens, or several that are drawn."""
    ids_1T = torch.arange(1, 1 + length)[None] * 7 % 512
    how = {"num_return_sequences": sequences, "do_sample": sequences > 1, "seed": length, "eos_token_id": ENDS}
    made: list[list[int]] = torch_pi2.generate(model, ids_1T, max_new_tokens=tokens, **how, **more).sequences
    return made


@dataclass
class Subject:
    """A model over a store, and what a model in memory answers."""

    name: str
    folder: Path
    seed: int
    wanted: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        inside = torch_pi2.load(self.folder / "memory", trust_remote_code=True, activations="int8")
        self.wanted = {(t, n): asked(inside, t, n, LONGEST) for t in LENGTHS for n in SEQUENCES}
        budget = torch_pi2.stats(self.load("1GiB", MODELS[self.name]))["budget"]
        self.least, self.most = budget.smallest, budget.smallest + budget.in_slots(int(0.7 * budget.neurons))

    def load(self, budget: int | str, config: OffloadConfig) -> Any:
        how: dict[str, Any] = {"trust_remote_code": True, "activations": "int8", "context": CONTEXT}
        return torch_pi2.load(self.folder / "store", budget=budget, offload=config, **how)

    def begin(self) -> None:
        self.model = self.load(self.most, MODELS[self.name])
        self._kinds: tuple[Callable[[], None], ...] = (*[self.whole, self.cancelled] * 3, self.fresh)

    def answers(self, count: int) -> None:
        for _ in range(count):
            kind = self._chance.choice(self._kinds)
            kind()
            self.done[kind.__name__] += 1

    def change_budgets(self, chance: random.Random, over: threading.Event) -> None:
        while not over.wait(chance.random() / 20):
            self.set_budget(chance.randint(self.least, self.most))

    def set_budget(self, budget: int) -> None:
        made = torch_pi2.set_budget(self.model, budget)
        assert made.total <= budget, (self.name, made.total, budget)
        end = time.monotonic() + 5
        while (has := torch_pi2.stats(self.model)["cache_bytes"]) > made.cache:
            assert time.monotonic() < end, (self.name, has, made.cache)
            time.sleep(0.001)
        self.done["budgets"] += 1

    def _prompt(self) -> tuple[int, int, int]:
        return self._chance.choice(LENGTHS), self._chance.choice(SEQUENCES), self._chance.randint(1, LONGEST)

    def _check(self, found: list[list[int]], length: int, sequences: int, tokens: int) -> None:
        wanted = [one[:tokens] for one in self.wanted[length, sequences]]
        assert found == wanted, (self.name, length, sequences, tokens, found, wanted)
        self.done["tokens"] += sum(map(len, found))

    def whole(self, model: Any = None) -> None:
        length, sequences, tokens = self._prompt()
        found = asked(self.model if model is None else model, length, sequences, tokens)
        self._check(found, length, sequences, tokens)

    def cancelled(self) -> None:
        length, sequences, _ = self._prompt()
        found: list[list[int]] = [[] for _ in range(sequences)]
        most = self._chance.randint(1, 20)

        def take(sequence: int, token: int) -> None:
            found[sequence].append(token)
            if sum(map(len, found)) == most:
                raise Cancelled

        try:
            asked(self.model, length, sequences, LONGEST, streamer=take)
        except Cancelled:
            self.done["ended early"] += 1
        for one, wanted in zip(found, self.wanted[length, sequences], strict=True):
            assert one == wanted[: len(one)], (self.name, length, sequences, one, wanted)
        self.done["tokens"] += sum(map(len, found))

    def fresh(self) -> None:
        """Another model over the same file."""
        chance = self._chance
        how: dict[str, Any] = {
            "engine": chance.choice(("auto", "pread", "mmap")),
            "policy": chance.choice(("lfu", "none")),
        }
        budget = chance.randint((self.least + self.most) // 2, self.most)  # other settings need a little more at least
        model = self.load(budget, OffloadConfig(**how, lookahead=chance.random() < 0.5))
        self.whole(model)


def files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


def rss_bytes() -> int:
    gc.collect()
    trim()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def soak(base: Path, answers: int) -> dict[str, Any]:
    torch.set_num_threads(2)
    subjects = [Subject(name, base / name, seed) for seed, name in enumerate(MODELS)]
    before, chances = rss_bytes(), [random.Random(100 + subject.seed) for subject in subjects]
    for subject in subjects:
        subject.begin()
    rounds = []
    with ThreadPoolExecutor(2 * len(subjects)) as pool:  # the same threads in every round
        for _ in range(WARM_UP + -(-answers // (ROUND * len(subjects)))):
            over = threading.Event()
            changing = [pool.submit(s.change_budgets, c, over) for s, c in zip(subjects, chances, strict=True)]
            cap.reset_peak()
            try:
                for told in [pool.submit(subject.answers, ROUND) for subject in subjects]:
                    told.result()
            finally:
                over.set()
            for told in changing:
                told.result()
            peak = cap.peak_rss_bytes()
            for subject in subjects:
                subject.set_budget((subject.least + subject.most) // 2)
            rounds.append({"rss": rss_bytes(), "peak": peak, "threads": threads(), "files": files()})
    budgets = [asdict(store_and_budget(subject.model)[1]) for subject in subjects]
    return {
        "before": before,
        "budgets": sum(budget["total"] for budget in budgets),
        "most": sum(subject.most for subject in subjects),
        "rounds": rounds,
        "done": {subject.name: subject.done for subject in subjects},
    }


if __name__ == "__main__":
    print(json.dumps(soak(Path(sys.argv[1]), int(sys.argv[2]))))
