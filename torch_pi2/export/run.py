"""``Bundle``: run a bundle on this machine, as the C++ runner does on a phone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch

from torch_pi2.base.fields import argument, checked
from torch_pi2.base.files import check_not_standard_output
from torch_pi2.base.units import parse_bytes
from torch_pi2.decode.sequence import GeneratedSequence, StopStrings, decode_loop
from torch_pi2.errors import ConfigError, NonFiniteError, ShapeError
from torch_pi2.export import executorch as backend
from torch_pi2.export.manifest import STORE_FILE, Manifest
from torch_pi2.export.runtime import Program
from torch_pi2.export.text import Detokenizer, SamplingKeywords, SamplingSettings, defaults_of, encode, load_tokenizer

_log = logging.getLogger("torch_pi2")

#: ``stream(sequence, token, text)``: number of the sequence, its new token, and the text that is certain since the last
#: call.
Stream = Callable[[int, int, str], None]
#: Text, token ids, or messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        ids: its tokens, with the one that ended it. text: theirs; empty without a tokenizer.
        ended: "eos", "stop" (one of the strings), "length" (``max_new_tokens``) or "room" (prompt and answer have
            ``max_tokens`` tokens).
    """

    ids: list[int]
    text: str
    ended: str


@dataclass(frozen=True)
class Generated:
    """What :meth:`Bundle.generate` returns.

    Attributes:
        prompt_ids: tokens of the prompt, of which ``known_tokens`` were not read again. sequences: the answers.
        prompt_seconds: until the first token. decode_seconds: all others. decode_steps: calls of decoding methods.
    """

    prompt_ids: list[int]
    sequences: list[Answer]
    prompt_seconds: float
    decode_seconds: float
    decode_steps: int
    known_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens of all sequences after the first of each; 0 if there are none."""
        count = sum(len(s.ids) - 1 for s in self.sequences)
        return count / self.decode_seconds if count else 0.0


class Bundle:
    """An open bundle. Methods are loaded when they are first needed, the neuron store with the first of them.

    One thread at a time: the methods share one KV cache. The settings below are lossless: they change no bit.

    Args:
        folder: written by ``torch_pi2.export``; every file must be there with its size.
        budget: bytes for all of it, or text such as "2.5GiB"; what ``manifest.memory.fixed_bytes`` leaves is for the
            neuron cache. Python and PyTorch themselves come on top. None: everything fits.
        store: the neuron store, or its folder, if it is not in ``folder`` (but on a faster disk, for instance).
        threads: the engine's, for what it computes beside an accelerator (default: as many as ExecuTorch's pool has).
        io_threads, engine, policy, direct, preload: as in :class:`torch_pi2.OffloadConfig`.
        trace: a file for a trace of all threads, for Perfetto, written when the bundle is closed.
        tokenizer: instead of the folder's.
        verify: which files are compared with their checksums first. None: all but the store, whose parts are compared
            when they are read. True: also all of the store. False: only sizes, and those parts.

    Attributes:
        manifest: of the bundle. store: path of the neuron store.

    Raises:
        ArtifactError: a file is missing, cut, changed or of another bundle, or ExecuTorch does not load the program.
        StaleArtifactError: the store is of other weights. ConfigError: the budget is too small, or an option is wrong.
        LibraryMissingError: ExecuTorch or our library for it is not installed. VersionError: it is of another version.
    """

    @checked
    def __init__(
        self,
        folder: str | Path,
        budget: float | str | None = None,
        store: str | Path | None = None,
        threads: int | None = None,
        io_threads: int | None = None,
        trace: str | Path | None = None,
        *,
        engine: str | None = None,
        policy: str | None = None,
        direct: bool | None = None,
        preload: bool | None = None,
        tokenizer: Any = None,
        verify: bool | None = None,
    ) -> None:
        if trace is not None:
            check_not_standard_output(trace, "Bundle(trace)")
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder, verify is not False)
        for name, given in (("store", store), ("trace", trace)):
            if given is not None and not self.manifest.model.layers:
                raise ConfigError(
                    f"Bundle({self.folder}, {name}=...)",
                    expected="a bundle with neurons",
                    found="one without, all of whose weights are in its program",
                    fix="Leave it out.",
                )
        place = Path(self.folder if store is None else store).absolute()
        self.store = place / STORE_FILE if place.is_dir() else place
        what: Any = "loaded" if verify is None else "all" if verify else "sizes"
        self.manifest.verify(self.folder, what, store=self.store)
        options: dict[str, str | int | bool | None] = {
            "store_path": str(self.store),
            "cache_bytes_kib": None if budget is None else _cache_kib(self.manifest, self.folder, parse_bytes(budget)),
            "threads": threads,
            "io_threads": io_threads,
            "engine": engine,
            "policy": policy,
            "direct": direct,
            "preload": preload,
            "trace": None if trace is None else str(Path(trace).absolute()),
        }
        self._tokenizer = tokenizer
        self._sampling = defaults_of(self.folder)
        self._in_first_lane: list[int] = []  # tokens whose keys and values are there
        self._lock = threading.RLock()
        self._busy = False
        self._program: Program | None = Program(self.folder, self.manifest, options)
        self._program.load("forward")  # opens the store, whose problems are reported now

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:  # else ``error`` is the one to report
                raise

    def close(self) -> None:
        """Release the program; the store is closed when no other bundle uses it. A closed bundle cannot be used.

        Raises:
            ConfigError: the trace cannot be written; or this is called within ``stream`` of an answer.
        """
        with self._alone("close"):
            program, self._program = self._program, None
            if program is not None:
                program.close()

    @property
    def load_seconds(self) -> float:
        """Time that loading methods took so far."""
        return self._open("load_seconds").load_seconds

    @property
    def tokenizer(self) -> Any:
        """The folder's, loaded when it is first needed. Raises ArtifactError: there is none, or it is damaged."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def __call__(self, *args: torch.Tensor | float) -> Any:
        """Run a bundle of kind "module": outputs for these inputs, one tensor or a tuple.

        Numbers of the example are inputs, too, and have to be the same.

        Raises:
            ConfigError: the bundle is a decoder. ShapeError, DtypeError: the inputs are not as when it was exported.
        """
        self._require("module", "bundle(...)")
        outputs = self._call("forward", *args)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt | torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        seed: int = 0,
        num_return_sequences: int = 1,
        reuse: bool = False,
        stream: Stream | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generated:
        """Continue a prompt.

        Greedy answers (``temperature=0``, the default) are the same bits each time. Sequence i of a sampled answer has
        its own generator, seeded ``seed + i``. The prompt is read once and its keys and values are copied to the other
        sequences. They end at their own times; as soon as a smaller batch holds the remaining ones, its method goes on.

        Args:
            prompt: text, token ids, or messages of a chat (``{"role": ..., "content": ...}``) for the tokenizer's
                template.
            max_new_tokens: most tokens of each sequence (default: as many as fit).
            num_return_sequences: at most ``manifest.lanes``.
            reuse: do not read again the tokens that prompt and last call (with one sequence) begin with, as in the
                next turn of a chat. Keys and values of the last answer come from decoding, and the rest is read as a
                short prompt: where neurons are predicted, both miss neurons that a long prompt read at once does not.
            stream: called for every token, in order of sequences within a step. An error that it raises ends the
                answer. It cannot call this bundle, whose KV cache is in use.
            sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``stop``: see
                :class:`torch_pi2.export.text.SamplingSettings`; None: the model's generation_config.json decides.

        Raises:
            ConfigError: the bundle is no decoder, an argument is wrong, or this is called within ``stream``.
            ShapeError: the prompt is too long.
            ArtifactError: a tokenizer is needed and there is none, or the store cannot be read.
            NonFiniteError: logits are not finite.
        """
        with self._alone("generate", "decoder"):
            self._check_count("num_return_sequences", num_return_sequences)
            argument(reuse, "reuse").flag()
            prompts = [prompt] * num_return_sequences
            answers, timing = self._answer(prompts, max_new_tokens, sampling, seed, stream, reuse)
        return Generated(answers[0].prompt, [answer.result() for answer in answers], *timing)

    @torch.no_grad()
    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int | None = None,
        *,
        seed: int = 0,
        stream: Stream | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> list[Generated]:
        """Continue several prompts at once, each in a lane of its own.

        A lossless bundle gives each the greedy answer of :meth:`generate` (up to the last bits of logits, as methods of
        other batch sizes add in another order).

        Args:
            prompts: at most ``manifest.lanes``. The others: as of :meth:`generate`; prompt i is sequence i.

        Returns:
            One sequence for each prompt; seconds and steps are those of all together.

        Raises:
            As :meth:`generate`.
        """
        with self._alone("generate_batch", "decoder"):
            if isinstance(prompts, str):
                argument(prompts, "prompts").wrong("a list of prompts")
            self._check_count("prompts", len(prompts))
            answers, timing = self._answer([*prompts], max_new_tokens, sampling, seed, stream, False)
        return [Generated(answer.prompt, [answer.result()], *timing) for answer in answers]

    @torch.no_grad()
    def logits(self, ids: Sequence[int] | torch.Tensor, prompt: int = 1) -> torch.Tensor:
        """Logits at every position from ``prompt - 1`` on, float32 ``[len(ids) - prompt + 1, V]``.

        The first ``prompt`` tokens are read at once (``forward``), the others one by one (``decode``).

        Raises:
            ConfigError: the bundle is no decoder, or this is called within ``stream``. ShapeError: too many tokens, or
                none.
        """
        with self._alone("logits", "decoder"):
            tokens = self._encode(ids)
            self._most_new_tokens(tokens[:-1])
            if not 1 <= prompt <= len(tokens):
                raise ShapeError("prompt", expected=f"1 to {len(tokens)} tokens", found=str(prompt), fix="Correct it.")
            self._in_first_lane = []
            rows = [self._read(tokens[:prompt])]
            for position in range(prompt, len(tokens)):
                rows.append(self._decode({0: (tokens[position], position)})[0])
        return torch.stack(rows)

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """What was read from the store since the last reset, summed over bundles that have it open.

        Returns:
            The fields of ``pi2_et_stats`` (``docs/BUNDLE.md``) of this store; ``hit_rate``: share of the
            neurons wanted that was in the cache; ``wait_share``: share of the time in layers spent waiting for reads.
            Both are None before anything was computed.
        """
        path = self.store.resolve()
        stores = [one for one in backend.stats(reset=reset)["stores"] if Path(one["path"]).resolve() == path]
        total = {**stores[0]} if stores else {}  # an entry for each combination of settings
        total |= {key: sum(one[key] for one in stores) for key, value in total.items() if isinstance(value, int)}
        wanted, busy = total.get("wanted", 0), total.get("busy_ns", 0)
        return {
            **total,
            "hit_rate": total["hits"] / wanted if wanted else None,
            "wait_share": total["wait_ns"] / busy if busy else None,
        }

    # --- one call at a time -------------------------------------------------------------------------------------------

    @contextmanager
    def _alone(self, what: str, kind: str | None = None) -> Iterator[None]:
        """Other threads wait; a call within ``stream`` of an answer is refused."""
        with self._lock:
            if self._busy:
                raise ConfigError(
                    f"{what} of {self.folder}",
                    expected="one call at a time: the KV cache holds an answer",
                    found="a call within the stream of an answer",
                    fix="Call it later, or open the bundle once more; to end the answer raise an error in stream.",
                )
            if kind is not None:
                self._require(kind, what)
            self._busy = True
            try:
                yield
            finally:
                self._busy = False

    def _open(self, what: str) -> Program:
        if self._program is None:
            raise ConfigError(
                f"{what} of {self.folder}", expected="an open bundle", found="a closed one", fix="Open it."
            )
        return self._program

    def _require(self, kind: str, what: str) -> None:
        self._open(what)
        if self.manifest.kind != kind:
            raise ConfigError(
                f"{what} of {self.folder}",
                expected=f"a bundle of kind {kind}",
                found=self.manifest.kind,
                fix="Call bundle(...) for modules, generate or logits for decoders.",
            )

    def _check_count(self, name: str, count: object) -> None:
        if type(count) is not int or not 1 <= count <= self.manifest.lanes:
            argument(count, name).wrong(f"1 to {self.manifest.lanes}, the lanes of the bundle")

    def _call(self, name: str, *args: torch.Tensor | float) -> Sequence[torch.Tensor]:
        with self._lock:
            return self._open(name).call(name, *args)

    # --- answers ------------------------------------------------------------------------------------------------------

    def _answer(
        self,
        prompts: list[Any],
        most: int | None,
        sampling: SamplingKeywords,
        seed: int,
        stream: Stream | None,
        reuse: bool,
    ) -> tuple[list[_Answering], tuple[float, float, int, int]]:
        """An answer to each of ``prompts``, of which identical ones are read once; and the numbers of Generated."""
        how = SamplingSettings(**sampling)
        if most is not None:
            argument(most, "max_new_tokens").whole(1)
        if stream is not None and not callable(stream):
            argument(stream, "stream").wrong("a function, or None")
        argument(seed, "seed").whole(most=1 << 62)
        texts = [argument(prompt, "prompt").text(empty=True) for prompt in prompts if isinstance(prompt, str)]
        names = ("tokenizer.json", "tokenizer_config.json")
        with_text = (
            self._tokenizer is not None or bool(texts or how.stop) or any((self.folder / n).is_file() for n in names)
        )
        tokenizer = self.tokenizer if with_text else None
        how = how.with_defaults(self._sampling)
        same = all(prompt is prompts[0] for prompt in prompts)
        ids = [self._encode(prompt) for prompt in prompts[: 1 if same else None]]
        answers = []
        for lane in range(len(prompts)):
            own = ids[0 if same else lane]
            fit = self._most_new_tokens(own)
            answers.append(_Answering(lane, seed, fit, most, self.manifest.eos, own, tokenizer, stream, how))
        self._load_decoding(len(answers))
        steps: list[float] = []  # when each began

        def step(going: list[_Answering]) -> list[tuple[_Answering, torch.Tensor]]:
            steps.append(time.perf_counter())
            if same and len(answers) > 1 and len(steps) == 1:
                self._call("fork", torch.zeros(self.manifest.lanes, dtype=torch.int64))
            logits_NV = self._step(going)
            return [(answer, logits_NV[answer.lane]) for answer in going]

        known = self._known_tokens(ids[0]) if reuse else 0
        self._in_first_lane = []
        started = time.perf_counter()
        read = [self._read(own, known, lane) for lane, own in enumerate(ids)]
        decode_loop(answers, read * len(answers) if same else read, step, _Answering.choose)
        done = time.perf_counter()
        if len(answers) == 1:
            self._in_first_lane = ids[0] + answers[0].tokens[:-1]
        first = steps[0] if steps else done
        return answers, (first - started, done - first, len(steps), known)

    def _encode(self, prompt: Any) -> list[int]:
        return encode(prompt, lambda: self.tokenizer, self.manifest.model.vocab or 0)

    def _known_tokens(self, ids: list[int]) -> int:
        """Tokens that ``ids``, but for the last, and the first lane begin with."""
        pairs = enumerate(zip(ids[:-1], self._in_first_lane))
        return next((i for i, (a, b) in pairs if a != b), min(len(ids) - 1, len(self._in_first_lane)))

    def _most_new_tokens(self, ids: list[int]) -> int:
        """Tokens that an answer to ``ids`` may have. Raises ShapeError: none."""
        most: int = self.manifest.max_tokens - len(ids)
        if most <= 0:
            raise ShapeError(
                "prompt",
                expected=f"at most {self.manifest.max_tokens - 1} tokens: the bundle has room for "
                f"{self.manifest.max_tokens}, answer included",
                found=str(len(ids)),
                fix="Shorten it, or export with a larger max_tokens.",
            )
        return most

    def _read(self, ids: list[int], known: int = 0, lane: int = 0) -> torch.Tensor:
        """Read ``ids`` into a lane that has the first ``known`` of them already; logits ``[V]`` after the last one."""
        offset = lane * self.manifest.max_tokens
        for name, start, count in self.manifest.pieces(known, len(ids)):
            piece, last = ids[start : start + count], []
            if name != "forward":  # what padding writes is overwritten before it is read
                piece += piece[-1:] * (self.manifest.methods[name].max_tokens - count)
                last = [torch.tensor([count - 1])]
            logits_11V = self._call(name, torch.tensor([piece]), torch.tensor([offset + start]), *last)[0]
        return _finite(logits_11V[0, -1])

    def _step(self, going: list[_Answering]) -> torch.Tensor:
        """Logits ``[N, V]`` by lane after one more token of each, moved to the first lanes if a smaller batch fits."""
        if max(a.lane for a in going) >= min(b for b in self.manifest.batches if b >= len(going)):
            lanes = [a.lane for a in going]
            self._call("fork", torch.tensor(lanes + lanes[:1] * (self.manifest.lanes - len(lanes))))
            for lane, answer in enumerate(going):
                answer.lane = lane
        return self._decode({a.lane: (a.tokens[-1], a.position) for a in going})

    def _decode(self, lanes: Mapping[int, tuple[int, int]]) -> torch.Tensor:
        """Logits ``[N, V]`` after (token, position) of each lane."""
        batch = min(b for b in self.manifest.batches if b > max(lanes))
        # Idle lanes get the token of a used one, which wants no other neurons. What they write is never read.
        idle = next(iter(lanes.values()))
        rows = [lanes.get(lane, idle) for lane in range(batch)]
        ids_N1, positions_N1 = torch.tensor(rows).split(1, dim=1)
        logits_N1V = self._call(f"decode_b{batch}", ids_N1.contiguous(), positions_N1.contiguous())[0]
        return _finite(logits_N1V[:, 0], list(lanes))

    def _load_decoding(self, count: int) -> None:
        """Load what ``count`` sequences may need, so that they do not wait for it later."""
        program = self._open("generate")
        most = min(b for b in self.manifest.batches if b >= count)
        batches = [b for b in self.manifest.batches if b == most or (count > 1 and b < most)]
        names = [*(f"prefill_{n}" for n in self.manifest.prefills), *(f"decode_b{b}" for b in batches)]
        for name in [*names, "fork"] if count > 1 else names:
            program.load(name)


class _Answering(GeneratedSequence):
    """An answer that is being generated in a lane of the KV cache, with its text.

    ``fit``: tokens that fit; ``most``: that the caller wants at most.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        fit: int,
        most: int | None,
        eos: tuple[int, ...],
        prompt: list[int],
        tokenizer: Any,
        stream: Stream | None,
        sampling: SamplingSettings,
    ) -> None:
        super().__init__(number, seed, fit if most is None else min(most, fit), eos)
        self.lane, self.text, self.prompt = number, "", prompt
        self._full = "room" if most is None or most >= fit else "length"
        self._stream, self._sampling = stream, sampling
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._stops, self._shown = StopStrings(sampling.stop or ()), ""

    @property
    def position(self) -> int:
        """That of the last token."""
        return len(self.prompt) + len(self.tokens) - 1

    def choose(self, logits_V: torch.Tensor) -> int:
        """The next token."""
        return self._sampling.choose(logits_V, self.prompt + self.tokens, self.random)

    def append(self, token: int) -> None:
        super().append(token)
        piece = ""
        if self._detokenizer is not None:
            piece = "" if self.ended == "eos" else self._detokenizer.add(token)
            piece = self._stops.add(piece + (self._detokenizer.rest() if self.ended else ""))
            if self._stops.reached:
                self.ended = "stop"
            elif self.ended:
                piece += self._stops.flush()
            self._shown += piece
            if self.ended:
                self.text = self._shown if self.ended == "stop" else self._detokenizer.text()
        if self._stream is not None:
            self._stream(self.number, token, piece)

    def result(self) -> Answer:
        """Once it has ended."""
        return Answer(self.tokens, self.text, self.ended if self.ended in ("eos", "stop") else self._full)


def _finite(logits: torch.Tensor, rows: list[int] | None = None) -> torch.Tensor:
    """``logits``. Raises NonFiniteError: those of ``rows`` (default: all) are not finite."""
    used = logits if rows is None else logits[rows]
    if torch.isfinite(used).all():
        return logits
    raise NonFiniteError(
        "logits",
        expected="finite numbers",
        found="NaN or infinity",
        fix="Check the model in PyTorch, then export again.",
    )


def _cache_kib(manifest: Manifest, folder: Path, budget: int) -> int:
    """The neuron cache that ``budget`` leaves, in KiB. Raises ConfigError: none."""
    cache = budget - manifest.fixed_bytes
    if cache < 1024:
        raise ConfigError(
            f"budget for {folder}",
            expected=f"more than {-(-manifest.fixed_bytes // 2**20)} MiB, which it takes without any neurons",
            found=f"{budget / 2**20:.0f} MiB",
            fix="Give it more, or export with fewer tokens or batches.",
        )
    if cache < min(manifest.token_bytes, manifest.ffn_bytes):
        _log.warning(
            "%s: the cache of %.1f MiB holds less than the %.1f MiB of neurons that a token wants on average; much of "
            "it comes from flash for each token.",
            *(folder, cache / 2**20, manifest.token_bytes / 2**20),
        )
    kib: int = min(cache, manifest.store_bytes) // 1024
    return kib
