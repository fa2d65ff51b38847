"""Speculative decoding beside plain decoding of the same model, in alternation.

A real model continues held-out source text with guesses by prompt lookup: once the text is given whatever the model
predicts, and once it is the model's own greedy text, which repeats itself more. A synthetic model produces nothing
worth looking up: its text is drawn, and guesses are right with stated probabilities (``--right``).

Over a store (``--ffn-in-memory``) both kinds of decoding have a model of their own, and so a cache: with one cache
each would profit from what the other has just read.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.arguments import TRAINED, add_lengths, add_source, list_of
from benchmarks.figures import alternate, medians, of_store, ratios, spread
from benchmarks.subject import Rooms, Subject, synthetic_folder, synthetic_store
from benchmarks.tables import Result, Table, at, ranged
from torch_pi2.cli import common
from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.sequence import GeneratedSequence, pick
from torch_pi2.decode.speculate import MOST_DRAFTED, Drafts, Pace, PromptLookup, Source, Speculator
from torch_pi2.errors import ConfigError
from torch_pi2.eval.verdict import text_or_random
from torch_pi2.formats import ACTIVATIONS, QUANTIZED
from torch_pi2.machine.device import find_device
from torch_pi2.ops import load as load_library
from torch_pi2.rewrite.state import store_of
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.store.storefile import STORE_FILE
from torch_pi2.types.offload import OffloadConfig

PLAIN, SPECULATIVE = "plain", "speculative"
#: Of the guesses that a synthetic model gets.
RIGHT = (0.9, 0.7, 0.3)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_source(parser, "real model, optimised here if it is not (default: the trained one of this repository)", "none")
    add("--weights", choices=("float", *QUANTIZED), default="int4", help="of what is made or optimised here")
    add("--activations", choices=ACTIVATIONS, default="int8", help="float with float weights")
    add("--right", type=list_of(float), metavar="P,...", help="guesses are right with these probabilities")
    add(
        "--guesses",
        type=list_of(common.count),
        default=[4],
        metavar="K,...",
        help=f"at a time, at most ({MOST_DRAFTED} or less; default: 4)",
    )
    add("--always", action="store_true", help="never stop guessing: the cost of guesses that do not pay")
    add("--ffn-in-memory", type=float, default=1.0, metavar="SHARE", help="of the neurons' bytes; 1: no store")
    add("--device", metavar="NAME", help="simulate reads of ufs-4.0 or a JSON file (docs/DEVICES.md)")
    add_lengths(parser, 256, 128, 5)
    add("--eager", dest="compiled", action="store_false", help="do not compile steps and passes")
    add("--trust-remote-code", action="store_true", help="run modelling code in the folder")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Load or make a model and time it with and without guesses, on torch's current number of threads.

    Returns:
        ``cases``: for each kind of guesses and number of them (``at_a_time``) ``tokens_per_s`` (medians over rounds,
        plain and speculative), ``spread``, ``ratio`` (median of those within a round) and ``ratio_spread``,
        ``pass_steps`` (how many plain steps a pass with that many guesses took, median; None without one), and of all
        rounds together ``drafted``, ``accepted``, ``passes``, the rounds at whose end guessing was ``switched_off``,
        and whether the text was the same (``same_text``; None where it is given). ``store``, by kind: what
        :func:`benchmarks.figures.of_store` has, a token of the answer; None in memory. What was run, machine and
        versions.

    Raises:
        ConfigError: ``--device`` without a store. Pi2Error: what making and loading models raise.
    """
    load_library()
    shape, folder, weights, activations = args.shape, args.folder, args.weights, args.activations
    prompt, tokens, guesses, device, seed = args.prompt, args.tokens, args.guesses, args.device, args.seed
    if device is not None:
        find_device(device)
        if args.ffn_in_memory == 1:
            found, fix = "everything in memory, which reads nothing", "Pass both."
            raise ConfigError(f"--device {device}", expected="--ffn-in-memory below 1 beside it", found=found, fix=fix)
    trust = args.trust_remote_code or (shape is None and folder is None)  # our own model brings its code
    if args.ffn_in_memory < 1:
        made, config = _store(shape, folder, weights, seed), OffloadConfig(device=device)
        models, room = _over_store(made, args.ffn_in_memory, prompt + tokens, config, activations, trust)
    else:
        model, made = _model(shape, folder, weights, activations, trust, seed)
        models, room = dict.fromkeys((PLAIN, SPECULATIVE), model), None
    plain: Any = models[PLAIN]
    subject, store = Subject.of(plain, made), store_of(plain)
    about_text, draw = text_or_random(plain, made, seed + 10, trust)
    texts = [draw(prompt + tokens) for _ in range(args.rounds + 1)]
    probabilities = args.right or (RIGHT if subject.synthetic else ())
    decoders = _decoders(models, prompt + tokens, args.compiled)
    bench = _Bench(decoders, args.always, prompt, texts, seed)
    cases = [
        bench.case(f"{share:.0%} right, given text", k, given=True, share=share)
        for share in probabilities
        for k in guesses
    ]
    if not probabilities:
        for k in guesses:
            cases += [bench.case("prompt lookup, given text", k, given=True), bench.case("prompt lookup, own text", k)]
    return {
        **subject.label(),
        "activations": activations if subject.weights != "float" else "float",
        "budget_bytes": room,
        "simulated": device or False,
        "reads": None if store is None else store.describe(),
        "text": about_text,
        "cases": cases,
    }


def _model(
    shape: str | None, folder: str | Path | None, weights: str, activations: str, trust: bool, seed: int
) -> tuple[Any, Path]:
    import torch_pi2

    if shape is not None:
        made = synthetic_folder(shape, weights, seed)
        return torch_pi2.load(made, activations=activations), made
    made = TRAINED if folder is None else Path(folder)
    if (made / PI2_FOLDER).is_dir():
        return torch_pi2.load(made, activations=activations, trust_remote_code=trust), made
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        made, dtype=torch.float32, trust_remote_code=trust, local_files_only=True
    )
    rounded = "float" if weights == "float" else activations
    return torch_pi2.optimize(model.eval(), weights=weights, activations=rounded), made


def _store(shape: str | None, folder: str | Path | None, weights: str, seed: int) -> Path:
    """A folder with a store. Raises ConfigError."""
    if shape is not None and weights == "int4":
        return synthetic_store(shape, seed)
    if folder is None or not (Path(folder) / PI2_FOLDER / STORE_FILE).is_file():
        raise ConfigError(
            "--ffn-in-memory",
            expected="--shape of a synthetic store, which has int4 weights, or a --folder with a store",
            found=f"{weights} weights of {shape}" if shape else str(folder or TRAINED),
            fix="Make a store: torch-pi2 optimize and pack.",
        )
    return Path(folder)


def _over_store(
    folder: Path, share: float, context: int, config: OffloadConfig, activations: str, trust: bool
) -> tuple[dict[str, Any], int]:
    """A model for each kind of decoding, and the bytes that each has."""
    import torch_pi2

    room = Rooms(folder, context, trust_remote_code=trust).budget(config, share)
    how: dict[str, Any] = {"activations": activations, "budget": room, "offload": config, "context": context}
    return {k: torch_pi2.load(folder, trust_remote_code=trust, **how) for k in (PLAIN, SPECULATIVE)}, room


def _decoders(models: Mapping[str, nn.Module], tokens: int, compiled: bool) -> dict[str, Decoder]:
    """A decoder by kind; kinds with the same model share one."""
    made = {id(model): Decoder(model, max_tokens=tokens, compiled=compiled, logits=True) for model in models.values()}
    return {kind: made[id(model)] for kind, model in models.items()}


class Knowing:
    """Guesses the next token of ``text`` (prompt and answer) with a probability, and another token otherwise."""

    took_longer = False

    def __init__(self, text: Sequence[int], share: float, vocabulary: int, seed: int = 0) -> None:
        self._text, self._share, self._vocabulary = text, share, vocabulary
        self._random = random.Random(seed)

    def begin(self, prompt: Sequence[int]) -> None:
        """The text is known already."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """``count`` tokens; behind the end of the text those that are wrong."""
        said = [*self._text[len(tokens) : len(tokens) + count], *([0] * count)][:count]
        return [t if self._random.random() < self._share else (t + 1) % self._vocabulary for t in said]

    def release(self) -> None:
        """It holds nothing."""


class _Timed(Pace):
    """Records the times of passes; ``always``: guess as many tokens as fit, whatever the cost.

    Attributes:
        full_ms: milliseconds of each pass with the most guesses.
    """

    def __init__(self, counts: Sequence[int], always: bool) -> None:
        super().__init__(counts)
        self._most, self._always = counts[-1], always
        self.full_ms: list[float] = []

    @property
    def off(self) -> bool:
        """Whether guesses rest."""
        return not self._always and super().off

    def count(self, most: int) -> int:
        return min(self._most, most) * (most >= self.counts[0]) if self._always else super().count(most)

    def passed(self, ms: float, guesses: int, right: int) -> None:
        if not self._always:
            super().passed(ms, guesses, right)
        if guesses == self._most:
            self.full_ms.append(ms)


@dataclass(frozen=True)
class _Round:
    """``seconds`` of all forwards after the prompt's, and what the store did meanwhile; see :class:`_Timed`."""

    tokens: list[int]
    seconds: float
    stats: dict[str, int] | None
    drafts: Drafts | None = None
    full_ms: Sequence[float] = ()


class _Bench:
    """Rounds of one model. The first text of ``texts``, int64 ``[1, prompt + tokens]`` each, warms up."""

    def __init__(
        self, decoders: Mapping[str, Decoder], always: bool, prompt: int, texts: Sequence[torch.Tensor], seed: int
    ) -> None:
        self._decoders, self._always, self._prompt, self._texts, self._seed = decoders, always, prompt, texts, seed
        self._tokens = texts[0].shape[1] - prompt
        model: nn.Module = decoders[PLAIN].model
        self._vocabulary: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]

    def case(self, name: str, guesses: int, *, given: bool = False, share: float | None = None) -> dict[str, Any]:
        """Plain and speculative decoding; ``share`` of guesses that are right, None: prompt lookup."""

        def once(kind: str, index: int) -> _Round:
            return self._round(kind, guesses, self._texts[index], given, share)

        every = alternate((PLAIN, SPECULATIVE), len(self._texts), once)
        rounds = {kind: found[1:] for kind, found in every.items()}
        steps = self._tokens - 1
        rates = {kind: [steps / r.seconds for r in found] for kind, found in rounds.items()}
        times = ratios(rates[SPECULATIVE], rates[PLAIN])
        drafts = [r.drafts for r in rounds[SPECULATIVE] if r.drafts is not None]
        passes = [
            statistics.mean(guessed.full_ms) / 1e3 * rate
            for guessed, rate in zip(rounds[SPECULATIVE], rates[PLAIN], strict=True)
            if guessed.full_ms
        ]
        texts = [(a.tokens, b.tokens) for a, b in zip(every[PLAIN], every[SPECULATIVE], strict=True)]
        return {
            "guesses": name,
            "at_a_time": guesses,
            "tokens_per_s": medians(rates),
            "spread": {kind: spread(values) for kind, values in rates.items()},
            "ratio": round(statistics.median(times), 4),
            "ratio_spread": spread(times, 4),
            "pass_steps": round(statistics.median(passes), 3) if passes else None,
            "drafted": sum(d.drafted for d in drafts),
            "accepted": sum(d.accepted for d in drafts),
            "passes": sum(d.passes for d in drafts),
            "switched_off": sum(d.switched_off for d in drafts),
            "same_text": None if given else all(a == b for a, b in texts),
            "store": self._of_store(rounds),
        }

    def _of_store(self, rounds: Mapping[str, Sequence[_Round]]) -> dict[str, Any] | None:
        found = {kind: [r.stats for r in of if r.stats is not None] for kind, of in rounds.items()}
        if not found[PLAIN]:
            return None
        threads, tokens = torch.get_num_threads(), self._tokens - 1
        return {
            kind: of_store(stats, tokens * len(stats), sum(r.seconds for r in rounds[kind]), threads)
            for kind, stats in found.items()
        }

    def _round(self, kind: str, guesses: int, text_1T: torch.Tensor, given: bool, share: float | None) -> _Round:
        decoder, text, ids_1T = self._decoders[kind], text_1T[0].tolist(), text_1T[:, : self._prompt]
        prompt = text[: self._prompt]
        source: Source = PromptLookup() if share is None else Knowing(text, share, self._vocabulary, self._seed)
        source.begin(prompt)
        logits_V = decoder.prompt(ids_1T)[0]
        if kind == SPECULATIVE:
            decoder.compile_passes(guesses + 1)
        sequence = GeneratedSequence(0, 0, self._tokens, ())
        choose = _choice(sequence, text[self._prompt :] if given else None)
        pace = _Timed([guesses], self._always)
        drafts, store = None, store_of(decoder.model)
        if store is not None:
            store.stats(reset=True)
        started = time.perf_counter()
        if kind == PLAIN:
            _plain(decoder, sequence, logits_V, choose)
        else:
            speculator = Speculator(source, pace)
            sequence.append(choose(logits_V))
            while sequence.ended is None:
                speculator.forward(decoder, prompt, sequence, lambda logits_V: sequence.append(choose(logits_V)))
            drafts = speculator.drafts
        seconds = time.perf_counter() - started
        return _Round(sequence.tokens, seconds, None if store is None else store.stats(), drafts, pace.full_ms)


def _choice(sequence: GeneratedSequence, given: Sequence[int] | None) -> Callable[[torch.Tensor], int]:
    """The most likely token, or the next of ``given`` ones (the argmax is computed in both cases)."""

    def choose(logits_V: torch.Tensor) -> int:
        likely = pick(logits_V, None)
        return likely if given is None else given[len(sequence.tokens)]

    return choose


def _plain(
    decoder: Decoder, sequence: GeneratedSequence, logits_V: torch.Tensor, choose: Callable[[torch.Tensor], int]
) -> None:
    """Decoding as in :class:`Speculator`, without guesses."""
    sequence.append(choose(logits_V))
    while sequence.ended is None:
        ids_11 = torch.tensor([sequence.tokens[-1:]], dtype=torch.int64, device="cpu")
        sequence.append(choose(decoder.step(ids_11)[0]))


def _rows(result: Result) -> list[dict[str, Any]]:
    """Cases, with shares of the guesses."""
    words = {None: "given", True: "the same", False: "other"}
    return [
        {
            **case,
            "plain": case["tokens_per_s"][PLAIN],
            "guessing": case["tokens_per_s"][SPECULATIVE],
            "spread": {"ratio": case["ratio_spread"]},
            "right": case["accepted"] / case["drafted"] if case["drafted"] else None,
            "a_pass": case["drafted"] / case["passes"] if case["passes"] else None,
            "off": f"{case['switched_off']} of {result['rounds']}",
            "text": words[case["same_text"]],
        }
        for case in result["cases"]
    ]


def _store_rows(result: Result) -> list[dict[str, Any]]:
    """What the store did by case, with and without guesses."""
    return [
        {"guesses": case["guesses"], "most": case["at_a_time"], "decoding": kind, **figures}
        for case in result["cases"]
        for kind, figures in (case.get("store") or {}).items()
    ]


TABLES = (
    Table(
        "Guessed tokens",
        _rows,
        {
            "guesses": at("guesses"),
            "at most": at("at_a_time"),
            "plain tokens/s": at("plain", ".2f"),
            "guessing": at("guessing", ".2f"),
            "ratio": ranged("ratio", ".3f"),
            "a full pass takes, in steps": at("pass_steps", ".2f"),
            "right": at("right", common.percent),
            "a pass": at("a_pass", ".2f"),
            "switched off": at("off"),
            "text": at("text"),
        },
        "Guessed next tokens that one pass verifies, against one token a step. *Right*: share of the guesses. *A "
        "pass*: guesses of one. They are *switched off* in rounds where they cost more than they bring. *Text*: "
        "whether both gave the same text, or were given it.",
    ),
    Table(
        "Guessed tokens over a store",
        _store_rows,
        {
            "guesses": at("guesses"),
            "at most": at("most"),
            "decoding": at("decoding"),
            "MB/token": at("bytes_read_per_token", ".2f", 1e-6),
            "reads/token": at("reads_per_token", ".0f"),
            "hits": at("hit_rate", common.percent),
            "waiting": at("io_critical_share", common.percent),
        },
    ),
)


def about(result: Result) -> str:
    share, device = result["ffn_in_memory"], result["simulated"]
    return (
        f"{result['shape']} {result['weights']}, {result['activations']} activations, {result['threads']} threads, "
        f"{'compiled' if result['compiled'] else 'eager'}, prompt {result['prompt']}, answer {result['tokens']}"
        + (f", {common.percent(share)} of the neurons in memory" if share < 1 else "")
        + (f", SIMULATED {device}" if device else "")
        + (", never resting" if result["always"] else "")
    )


def notes(result: Result) -> list[str]:
    return [f"text: {result['text']}"]
