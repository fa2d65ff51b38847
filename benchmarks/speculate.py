"""Speculative decoding beside plain decoding of the same model, in alternation.

A real model continues held-out source text, with guesses by prompt lookup: the text that is there, fed whatever the
model says (``given``), and its own greedy text (``own``), which repeats itself more than people do. A synthetic model
says nothing worth looking up: it is fed with tokens that recur as neurons of real ones do, and guesses are right with
probabilities that are stated (``--right``).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import add_source, list_of
from benchmarks.figures import alternate, at_least, label, medians, spread
from benchmarks.subject import WORK, Subject, check_one
from torch_pi2.base import process as machine
from torch_pi2.cli import common
from torch_pi2.decode.decode import Decoder
from torch_pi2.decode.generate import pick
from torch_pi2.decode.growing import Growing
from torch_pi2.decode.speculate import MOST_DRAFTED, Drafts, Pace, PromptLookup, Source, speculate
from torch_pi2.errors import ConfigError
from torch_pi2.eval.token_source import tokens_of
from torch_pi2.formats import ACTIVATIONS, QUANTIZED
from torch_pi2.ops import load as load_library
from torch_pi2.store.folder import PI2_FOLDER

PLAIN, SPECULATIVE = "plain", "speculative"
#: The trained model of this repository.
TRAINED = Path(__file__).parents[1] / "examples" / "models" / "drelu-stdlib-5m"
#: Of the guesses that a synthetic model gets.
RIGHT = (0.9, 0.7, 0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "real model, optimised here if it is not (default: the trained one of this repository)", "none")
    add("--weights", choices=("float", *QUANTIZED), default="int4", help="of what is made or optimised here")
    add("--activations", choices=ACTIVATIONS, default="int8", help="float with float weights")
    add("--right", type=list_of(float), metavar="P,...", help="guesses are right with these probabilities")
    add("--guesses", type=common.positive, default=4, metavar="K", help=f"at a time, at most ({MOST_DRAFTED} or less)")
    add("--prompt", type=common.positive, default=256, metavar="T", help="tokens of the prompt")
    add("--tokens", type=common.positive, default=128, metavar="N", help="tokens of the answer")
    add("--rounds", type=common.positive, default=5, metavar="N", help="of each, in alternation, each of another text")
    add("--eager", dest="compiled", action="store_false", help="do not compile steps and passes")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")
    add("--seed", type=common.seed, default=0)


def run(
    shape: str | None = None,
    folder: str | Path | None = None,
    *,
    weights: str = "int4",
    activations: str = "int8",
    right: Sequence[float] | None = None,
    guesses: int = 4,
    prompt: int = 256,
    tokens: int = 128,
    rounds: int = 5,
    compiled: bool = True,
    trust_remote_code: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Load or make a model and time it with and without guesses, on torch's current number of threads.

    Args: the options of the same names.

    Returns:
        ``cases``: for each kind of guesses ``tokens_per_s`` (medians over rounds, plain and speculative), ``spread``,
        ``ratio`` (median of those within a round) and ``ratio_spread``, and of all rounds together ``drafted``,
        ``accepted``, ``passes``, the rounds at whose end guessing was ``switched_off``, and whether the text was the
        same (``same_text``; None where it is given). What was run, machine and versions.

    Raises:
        ConfigError: a setting makes no sense. Pi2Error: what making and loading models raise.
    """
    load_library()
    at_least(1, prompt=prompt, rounds=rounds)
    at_least(2, tokens=tokens)
    _check(right, guesses)
    model, made = _model(shape, folder, weights, activations, trust_remote_code, seed)
    subject = Subject.of(model, made)
    drawn = tokens_of(model, made, "heldout", 1, seed + 10, trust_remote_code)
    texts = [drawn.draw(prompt + tokens) for _ in range(rounds + 1)]
    probabilities = right or (RIGHT if subject.synthetic else ())
    # those of one model share a decoder, and what it has compiled
    decoder = Decoder(model, max_tokens=prompt + tokens, compiled=compiled, logits=True)
    bench = _Bench(decoder, guesses, prompt, texts, seed)
    cases = [bench.case(f"{share:.0%} right, given text", given=True, share=share) for share in probabilities]
    if not probabilities:
        cases = [bench.case("prompt lookup, given text", given=True), bench.case("prompt lookup, own text")]
    return {
        "what": "speculate",
        "shape": subject.shape,
        "weights": subject.weights,
        "activations": activations if subject.weights != "float" else "float",
        "synthetic": subject.synthetic,
        "threads": torch.get_num_threads(),
        "compiled": compiled,
        "guesses": guesses,
        "prompt": prompt,
        "tokens": tokens,
        "rounds": rounds,
        "text": drawn.about,
        "cases": cases,
        "seed": seed,
        **machine.describe(),
    }


def _check(right: Sequence[float] | None, guesses: int) -> None:
    if guesses > MOST_DRAFTED:
        raise ConfigError(
            "guesses", expected=f"1 to {MOST_DRAFTED}", found=str(guesses), fix="More are not verified in one pass."
        )
    for share in right or ():
        if not 0 <= share <= 1:
            raise ConfigError("right", expected="0 to 1", found=f"{share:g}", fix="It is a probability.")


def _model(
    shape: str | None, folder: str | Path | None, weights: str, activations: str, trust: bool, seed: int
) -> tuple[Any, Path]:
    import torch_pi2

    check_one(folder, shape)
    if shape is not None:
        made = WORK / f"{shape}-{weights}-0.1"
        if not (made / PI2_FOLDER).is_dir():
            torch_pi2.synthetic(made, shape, weights=weights, seed=seed)
        return torch_pi2.load(made, activations=activations), made
    made = TRAINED if folder is None else Path(folder)
    if (made / PI2_FOLDER).is_dir():
        return torch_pi2.load(made, activations=activations, trust_remote_code=trust), made
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        made, dtype=torch.float32, trust_remote_code=trust or folder is None, local_files_only=True
    )
    rounded = "float" if weights == "float" else activations
    return torch_pi2.optimize(model.eval(), weights=weights, activations=rounded), made


class Knowing:
    """Guesses what ``text`` (prompt and answer) says, each token with a probability, and another token otherwise."""

    def __init__(self, text: Sequence[int], share: float, vocabulary: int, seed: int = 0) -> None:
        self._text, self._share, self._vocabulary = text, share, vocabulary
        self._random = random.Random(seed)

    def read(self, prompt_1T: torch.Tensor) -> None:
        """It knows."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens; behind the end of the text those that are wrong."""
        said = [*self._text[len(tokens) : len(tokens) + count], *([0] * count)][:count]
        return [t if self._random.random() < self._share else (t + 1) % self._vocabulary for t in said]


class _Bench:
    """Rounds of one model. The first text of ``texts``, int64 ``[1, prompt + tokens]`` each, warms up."""

    def __init__(self, decoder: Decoder, guesses: int, prompt: int, texts: Sequence[torch.Tensor], seed: int) -> None:
        self._decoder, self._guesses, self._prompt, self._texts, self._seed = decoder, guesses, prompt, texts, seed
        self._tokens = texts[0].shape[1] - prompt
        model: nn.Module = decoder.model
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]

    def case(self, name: str, *, given: bool = False, share: float | None = None) -> dict[str, Any]:
        """Plain and speculative decoding; ``share`` of guesses that are right, None: prompt lookup."""
        said: dict[tuple[str, int], list[int]] = {}
        drafts: list[Drafts] = []

        def once(kind: str, index: int) -> float:
            answer, drafted, seconds = self._round(kind, self._texts[index], given, share)
            said[kind, index] = answer
            if drafted is not None and index > 0:
                drafts.append(drafted)
            return (self._tokens - 1) / seconds

        rates = {kind: found[1:] for kind, found in alternate((PLAIN, SPECULATIVE), len(self._texts), once).items()}
        ratios = [fast / slow for fast, slow in zip(rates[SPECULATIVE], rates[PLAIN], strict=True)]
        return {
            "guesses": name,
            "tokens_per_s": medians(rates),
            "spread": {kind: spread(values) for kind, values in rates.items()},
            "ratio": round(statistics.median(ratios), 4),
            "ratio_spread": spread(ratios, 4),
            "drafted": sum(d.drafted for d in drafts),
            "accepted": sum(d.accepted for d in drafts),
            "passes": sum(d.passes for d in drafts),
            "switched_off": sum(d.switched_off for d in drafts),
            "same_text": None
            if given
            else all(said[PLAIN, i] == said[SPECULATIVE, i] for i in range(len(self._texts))),
        }

    def _round(
        self, kind: str, text_1T: torch.Tensor, given: bool, share: float | None
    ) -> tuple[list[int], Drafts | None, float]:
        """The answer, what became of guesses, and the seconds of all forwards after the prompt's."""
        decoder, text, ids_1T = self._decoder, text_1T[0].tolist(), text_1T[:, : self._prompt]
        logits_V = decoder.prompt(ids_1T)[0]
        sequence = Growing(0, 0, self._tokens, ())
        choose = _choice(sequence, text[self._prompt :] if given else None)
        if kind == PLAIN:
            started = time.perf_counter()
            _plain(decoder, sequence, logits_V, choose)
            return sequence.tokens, None, time.perf_counter() - started
        source: Source = PromptLookup()
        if share is not None:
            source = Knowing(text, share, self._vocabulary, self._seed)
        source.read(ids_1T)
        decoder.compile_passes(self._guesses + 1)
        counts = [self._guesses] if decoder.compiled else range(1, self._guesses + 1)
        prompt = text[: self._prompt]
        started = time.perf_counter()
        drafts, _ = speculate(decoder, sequence, prompt, logits_V, choose, source, Pace(counts), self._tokens)
        return sequence.tokens, drafts, time.perf_counter() - started


def _choice(sequence: Growing, given: Sequence[int] | None) -> Callable[[torch.Tensor], int]:
    """The most likely token, which is looked for in any case; or the next of ``given`` ones."""

    def choose(logits_V: torch.Tensor) -> int:
        likely = pick(logits_V, None)
        return likely if given is None else given[len(sequence.tokens)]

    return choose


def _plain(decoder: Decoder, sequence: Growing, logits_V: torch.Tensor, choose: Callable[[torch.Tensor], int]) -> None:
    """As :func:`speculate` does it, without guesses."""
    sequence.take(choose(logits_V))
    while sequence.ended is None:
        ids_11 = torch.tensor([sequence.tokens[-1:]], dtype=torch.int64, device="cpu")
        sequence.take(choose(decoder.step(ids_11)[0]))


def render(result: dict[str, Any]) -> str:
    rows = [
        (
            case["guesses"],
            f"{case['tokens_per_s'][PLAIN]:.2f}",
            f"{case['tokens_per_s'][SPECULATIVE]:.2f}",
            f"{case['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*case["ratio_spread"]),
            common.percent(case["accepted"] / case["drafted"]) if case["drafted"] else "",
            f"{case['drafted'] / case['passes']:.2f}" if case["passes"] else "",
            case["passes"],
            f"{case['switched_off']} of {result['rounds']}",
            {None: "given", True: "the same", False: "other"}[case["same_text"]],
        )
        for case in result["cases"]
    ]
    header = (*("guesses", PLAIN, SPECULATIVE, "ratio", "range", "right", "a pass", "passes", "switched off", "text"),)
    lines = [
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{'compiled' if result['compiled'] else 'eager'}, {result['machine']['cpu']}",
        common.table(header, rows),
        f"tokens/s after a prompt of {result['prompt']}, medians of {result['rounds']} rounds of {result['tokens']} "
        f"tokens; up to {result['guesses']} guesses a pass",
        f"text: {result['text']}",
    ]
    return "\n".join([*lines, label(result)])
