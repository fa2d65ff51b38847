"""The greedy answers of PyTorch, and of every runtime for bundles."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.phone.models import PROMPTS, QUESTIONS, Case
from torch_pi2.export.executorch import load_library, set_options
from torch_pi2.export.run import Bundle

BUILD = Path(__file__).parents[2] / "build"
ARM = BUILD / "runner-arm" / "pi2"
#: Under qemu every instruction takes many.
ARM_TOKENS = 12

Message = dict[str, str]


@dataclass(frozen=True)
class Answers:
    """The answers of one runtime: token ids, or texts if it shows no ids.

    Attributes:
        alone: to each prompt, one after another. together: to all prompts at once; None: it cannot.
        talk: to each question of a chat. known_tokens: cached tokens at the last of these; None: it reads all again.
        logits: after the first prompt, ``[V]``; None: it shows none. most: tokens per answer, if fewer than PyTorch's.
    """

    alone: Sequence[list[int] | str]
    together: Sequence[list[int]] | None
    talk: Sequence[list[int] | str]
    known_tokens: int | None = None
    logits: torch.Tensor | None = None
    most: int | None = None


@dataclass(frozen=True)
class Expected:
    """PyTorch's answers, each to its prompt alone, and in a chat to all earlier messages.

    Attributes:
        alone, talk, logits: as of :class:`Answers`. messages: of the chat. read: tokens of the chat up to and with each
            question. margin: the smallest difference of a step's two best logits, relative to their largest magnitude.
    """

    alone: list[list[int]]
    talk: list[list[int]]
    logits: torch.Tensor
    messages: list[Message]
    read: list[list[int]]
    margin: float


def pytorch(model: Any, tokenizer: Any, case: Case) -> Expected:
    margins: list[float] = []
    first: list[torch.Tensor] = []

    def say(ids: list[int], tokens: int) -> list[int]:
        how = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
        ids_1T = torch.tensor([ids])
        made = model.generate(ids_1T, attention_mask=torch.ones_like(ids_1T), max_new_tokens=tokens, **how)
        for logits_1V in made.logits:
            best = logits_1V[0].topk(2).values
            margins.append(float((best[0] - best[1]) / logits_1V.abs().max()))
        first.append(made.logits[0][0].float())
        said: list[int] = made.sequences[0, len(ids) :].tolist()
        return said

    alone = [say(tokenizer(prompt).input_ids, case.tokens) for prompt in PROMPTS]
    messages: list[Message] = []
    read, talk = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        read.append(tokenizer.apply_chat_template(messages, return_dict=False))
        talk.append(say(read[-1], case.talk_tokens))
        messages.append({"role": "assistant", "content": tokenizer.decode(talk[-1])})
    return Expected(alone, talk, first[0], messages, read, min(margins))


def python(bundle: Path, expected: Expected, case: Case) -> Answers:
    """ExecuTorch's runtime for Python."""
    with Bundle(bundle) as opened:
        ids = opened.tokenizer(PROMPTS[0]).input_ids
        logits = opened.logits(ids, len(ids))[-1]
        alone = [opened.generate(prompt, case.tokens) for prompt in PROMPTS]
        talk = [opened.generate(said, case.talk_tokens) for said in _turns(expected)]
    return Answers(_ids(alone), None, _ids(talk), None, logits)


def _ids(made: Sequence[Any]) -> list[list[int]]:
    return [one.sequences[0].ids for one in made]


def stock(tokenizer: Any, bundle: Path, expected: Expected, case: Case) -> Answers:
    """ExecuTorch's own LLM runner. Without ``reset`` it keeps its cache: all but the last token of its answer."""
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    def say(prompt: str, tokens: int) -> str:
        pieces: list[str] = []
        # "warming": without printing
        settings = GenerationConfig(max_new_tokens=tokens, temperature=0.0, echo=False, warming=True)
        its.generate(prompt, settings, pieces.append, None)
        return "".join(pieces)

    load_library()
    set_options({"store_path": str(bundle)})
    try:
        its = TextLLMRunner(str(bundle / "model.pte"), str(bundle / "tokenizer.json"))
        alone = []
        for prompt in PROMPTS:
            its.reset()
            alone.append(say(prompt, case.tokens))
        its.reset()
        talk, known = [], 0
        for ids in expected.read:
            talk.append(say(tokenizer.decode(ids[known:]), case.talk_tokens))
            known = len(ids) + case.talk_tokens - 1
    finally:
        set_options({"store_path": ""})
    return Answers(alone, None, talk, len(expected.read[0]) + case.talk_tokens - 1)


def runner(command: Sequence[str], most: int | None, bundle: Path, expected: Expected, case: Case) -> Answers:
    """The C++ runner; answers of at most ``most`` tokens."""
    tokens, talk_tokens = (min(n, most or n) for n in (case.tokens, case.talk_tokens))
    with tempfile.TemporaryDirectory() as folder:
        logits = Path(folder) / "logits.npy"
        _run(
            [*command, str(bundle), "--prompt", PROMPTS[0], "--max-new-tokens", "1", "--json", "--logits", str(logits)]
        )
        shown = torch.from_numpy(np.load(logits)[0, 0])
    requests: list[dict[str, Any]] = [{"prompt": prompt, "max_new_tokens": tokens} for prompt in PROMPTS]
    requests.append({"prompts": PROMPTS, "max_new_tokens": tokens})
    requests += [{"messages": said, "max_new_tokens": talk_tokens} for said in _turns(expected)]
    made = _run([*command, str(bundle), "--requests", "-"], "".join(json.dumps(one) + "\n" for one in requests))
    ids = [[sequence["ids"] for sequence in report["sequences"]] for report in made]
    alone, together, talk = ids[: len(PROMPTS)], ids[len(PROMPTS)], ids[len(PROMPTS) + 1 :]
    return Answers([i for (i,) in alone], together, [i for (i,) in talk], made[-1]["known_tokens"], shown, most)


def jvm(bundle: Path, expected: Expected, case: Case) -> Answers:
    """What Bundle.kt answers over the library of ``export/android``. Requests of Kotlin have one prompt."""
    libraries, classes = BUILD / "runner" / "pi2", (BUILD / "jni", BUILD / "deps" / "kotlin" / "kotlin.jar")
    java = ["java", f"-Djava.library.path={libraries}", "-cp", ":".join(map(str, classes)), "org.torchpi2.jvm.MainKt"]
    alone = [_run([*java, str(bundle), prompt, str(case.tokens)])[0] for prompt in PROMPTS]
    _, *talk = _run([*java, str(bundle), PROMPTS[0], str(case.talk_tokens), *QUESTIONS])
    ids = [[report["sequences"][0]["ids"] for report in reports] for reports in (alone, talk)]
    return Answers(ids[0], None, ids[1], talk[-1]["known_tokens"])


def available(arm: bool, java: bool, tokenizer: Any) -> dict[str, Callable[[Path, Expected, Case], Answers]]:
    """By name: the runtimes on this machine. ``arm``, ``java``: fail without the runner for aarch64, or a JVM.

    Raises:
        SystemExit: one of them is missing.
    """
    runtimes: dict[str, Callable[[Path, Expected, Case], Answers]] = {
        "ExecuTorch, Python": python,
        "ExecuTorch's LLM runner": partial(stock, tokenizer),
        "C++ runner, x86-64": partial(runner, [str(BUILD / "runner" / "pi2" / "pi2_runner")], None),
    }
    if (ARM / "pi2_runner").exists() and shutil.which("qemu-aarch64-static"):
        # The packed runner by its own loader, as its ``run`` script starts it.
        packed = [str(ARM / "ld-linux-aarch64.so.1"), "--library-path", str(ARM), str(ARM / "pi2_runner")]
        # SME takes eight times as long to emulate; make test-arm does it.
        for cpu in ("max,sme=off", "cortex-a53"):
            command = ["qemu-aarch64-static", "-cpu", cpu, *packed]
            runtimes[f"C++ runner, aarch64 ({cpu}, qemu)"] = partial(runner, command, ARM_TOKENS)
    elif arm:
        raise SystemExit("phone: no runner for aarch64, or no qemu: make runner-arm, and qemu-user-static")
    else:
        print("not run: aarch64 (make runner-arm, and qemu-user-static)")
    if (BUILD / "jni" / ".built").exists() and shutil.which("java"):
        runtimes["JNI under a JVM"] = jvm
    elif java:
        raise SystemExit("phone: no JVM, or nothing for it: make jni")
    else:
        print("not run: a JVM (make jni)")
    return runtimes


def _turns(expected: Expected) -> list[list[Message]]:
    """The messages up to and with each question."""
    return [expected.messages[: 2 * turn + 1] for turn in range(len(QUESTIONS))]


def _run(command: list[str], said: str | None = None) -> list[dict[str, Any]]:
    """The lines of JSON that a program prints."""
    done = subprocess.run(command, input=said, capture_output=True, text=True, timeout=900)
    if done.returncode:
        raise SystemExit(f"{command[0]} failed: {(done.stderr.strip().splitlines() or ['no words'])[-1]}")
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    for line in lines:
        if "error" in line:
            raise SystemExit(f"{command[0]} failed: {line['error']}")
    return lines
