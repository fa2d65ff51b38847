"""Models on their way to a phone: exported, and run by everything that runs bundles, with the same text.

Exports the optimised model of ``make demo``, a small mixture of experts and a small model with a sliding window, and
lets PyTorch, ExecuTorch's Python runtime, its own LLM runner, the C++ runner on this machine, the C++ runner for 64-bit
ARM (under qemu, where there is one) and the Kotlin for Android (under a JVM, where ``make jni`` has built it) answer
greedily: four prompts one by one, all of them together, and two questions of a talk, of which the second does not read
again what the first one has. Their tokens must be those that PyTorch has for each alone (of ExecuTorch's runner, which
shows no tokens, the text), and their logits, where they show them, within 1e-4. ``make phone`` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

import torch_pi2
from examples.phone import runtimes
from examples.phone.models import CHAT_TEMPLATE, PROMPTS, Case, cases
from torch_pi2.base.files import atomic_write
from torch_pi2.cli.terminal import table
from torch_pi2.export.describe import describe_program

#: Logits of float32 models, everywhere; relative to the largest.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Verdict:
    """What one runtime answers as PyTorch does; None: it cannot do that."""

    alone: bool
    together: bool | None
    talk: bool
    logit_error: float | None

    @property
    def good(self) -> bool:
        return self.alone and self.together is not False and self.talk and (self.logit_error or 0) < TOLERANCE


def judge(answers: runtimes.Answers, expected: runtimes.Expected, tokenizer: Any) -> Verdict:
    def same(some: Sequence[list[int] | str], right: list[list[int]]) -> bool:
        shown = [
            tokenizer.decode(ids) if isinstance(one, str) else ids[: answers.most] for one, ids in zip(some, right)
        ]
        return len(some) == len(right) and list(some) == shown

    cached = len(expected.read[0]) + len(expected.talk[0]) - 1  # its last token was not read
    reused = answers.known_tokens in (None, cached)
    error, together = None, None
    if answers.logits is not None:
        error = float((answers.logits - expected.logits).abs().max() / expected.logits.abs().max())
    if answers.together is not None:
        together = same(answers.together, expected.alone)
    return Verdict(same(answers.alone, expected.alone), together, same(answers.talk, expected.talk) and reused, error)


def row(name: str, verdict: Verdict, seconds: float) -> tuple[str, ...]:
    words = {True: "same", False: "OTHER", None: "-"}
    error = "-" if verdict.logit_error is None else f"{verdict.logit_error:.1e}"
    return (name, *(words[found] for found in (verdict.alone, verdict.together, verdict.talk)), error, f"{seconds:.1f}")


def check(case: Case, expected: runtimes.Expected) -> None:
    """Raises SystemExit: the answers would not tell right from wrong."""
    first, second = expected.read
    if expected.margin < 2 * TOLERANCE:
        raise SystemExit(
            f"{case.name}: two tokens are as good as one another ({expected.margin:.1e}); choose other prompts"
        )
    if second[: len(first) + case.talk_tokens] != first + expected.talk[0]:
        raise SystemExit(f"{case.name}: its answer has other tokens when its text is read; choose other questions")
    if len({token for answer in expected.alone for token in answer}) < len(PROMPTS):
        raise SystemExit(f"{case.name}: it says the same whatever it is asked; choose other weights")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--demo", type=Path, default=Path("demo-out"), help="what make demo wrote (default %(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=48, help="tokens of the trained model's answers (default %(default)s)"
    )
    parser.add_argument("--arm", action="store_true", help="fail where the runner for aarch64 or qemu is not there")
    parser.add_argument("--jvm", action="store_true", help="fail where there is no JVM, or nothing for it (make jni)")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.demo / "model", trust_remote_code=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    all_runtimes = runtimes.available(args.arm, args.jvm, tokenizer)
    report: dict[str, Any] = {}
    shown: list[str] = []
    heads = ("runtime", f"{len(PROMPTS)} prompts", "together", "2 turns", "logits off by", "seconds")
    for case in cases(args.demo / "model", args.tokens):
        model = case.make(tokenizer)
        with torch.no_grad():
            expected = runtimes.pytorch(model, tokenizer, case)
        check(case, expected)
        bundle, started = args.demo / f"bundle-{case.name}", time.perf_counter()
        torch_pi2.export(model, bundle, tokenizer=tokenizer, max_tokens=256, batches=(1, len(PROMPTS)), progress=True)
        exported = time.perf_counter() - started
        rows, verdicts = [], {}
        for name, answers_of in all_runtimes.items():
            started = time.perf_counter()
            verdicts[name] = judge(answers_of(bundle, expected, case), expected, tokenizer)
            rows.append(row(name, verdicts[name], time.perf_counter() - started))
        about = f"{case.name}: exported in {exported:.0f} s; PyTorch's best two logits are {expected.margin:.1e} apart"
        shown += [about, table(heads, rows), ""]
        report[case.name] = {
            "export_seconds": exported,
            "program": describe_program(bundle / "model.pte"),
            "bytes": {path.name: path.stat().st_size for path in bundle.iterdir()},
            "text": [tokenizer.decode(ids) for ids in expected.alone],
            "margin": expected.margin,
            "runtimes": {name: vars(verdict) for name, verdict in verdicts.items()},
        }
    for prompt, text in zip(PROMPTS, report["trained"]["text"], strict=True):
        print(f"{prompt}{text}", end="\n\n")
    # ExecuTorch's own runner logs much between them.
    print("\n".join(shown))
    atomic_write(args.demo / "phone.json", json.dumps(report, indent=1) + "\n")
    print(f"bundles {args.demo / 'bundle-*'}; all numbers in {args.demo / 'phone.json'}")
    return 0 if all(Verdict(**verdict).good for case in report.values() for verdict in case["runtimes"].values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.exit(main())
