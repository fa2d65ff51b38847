"""Run a bundle on this machine with ExecuTorch's Python runtime: what the C++ runner does on a phone, in Python."""

from __future__ import annotations

import importlib.metadata
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from torch_pi2.base.arguments import checked
from torch_pi2.base.fields import argument
from torch_pi2.base.files import check_not_standard_output
from torch_pi2.base.units import parse_bytes
from torch_pi2.decode import executorch as backend
from torch_pi2.decode.executorch import parts_of_problem
from torch_pi2.decode.sequence import GeneratedSequence, StopStrings, decode_loop
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    DtypeError,
    NonFiniteError,
    Pi2Error,
    ShapeError,
    StaleArtifactError,
    VersionError,
)
from torch_pi2.export.choose import Choosing, is_whole, of_model
from torch_pi2.export.manifest import CONTEXT_METHOD, PROGRAM_FILE, STORE_FILE, Manifest
from torch_pi2.export.text import Detokenizer, encode, load_tokenizer

_log = logging.getLogger("torch_pi2")

#: ``stream(sequence, token, text)``: which sequence, what was chosen, and the text that is certain since the last call.
Stream = Callable[[int, int, str], None]
#: Options are global to the library until a store is opened with them: one bundle at a time sets them and opens.
_OPENING = threading.Lock()


@dataclass(frozen=True)
class Answer:
    """One answer.

    Attributes:
        ids: chosen tokens, with the one that ended it. text: of them; empty without a tokenizer.
        ended: "eos", "stop" (one of the strings), "length" (``max_new_tokens``) or "room" (prompt and answer have
            ``max_tokens``).
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
        """Of the first sequence."""
        return self.sequences[0].text

    @property
    def tokens_per_second(self) -> float:
        """Of decoding: tokens of all sequences after the first of each; 0 if there are none."""
        count = sum(len(s.ids) - 1 for s in self.sequences)
        return count / self.decode_seconds if count else 0.0


class Bundle:
    """A bundle, open. Methods are loaded when they are first needed, the neuron store with the first of them.

    One thread at a time: the methods share one KV cache. Settings below are lossless: same bits whatever they are.

    Args:
        folder: written by ``torch_pi2.export``; every file must be there with its size.
        budget: bytes for all of it, or text such as "2.5GiB"; what ``manifest.memory.fixed_bytes`` leaves is for the
            neuron cache. Python and PyTorch themselves come on top. None: everything fits.
        store: the neuron store, or its folder, if it is not in ``folder`` (but on a faster disk, for instance).
        threads: of the engine, for what it computes beside an accelerator (default: as many as ExecuTorch's pool has).
        io_threads, engine, policy, direct, preload: as in :class:`torch_pi2.OffloadConfig`.
        trace: a file that gets what threads did, for Perfetto, when the bundle is closed.
        tokenizer: instead of that of the folder.
        verify: what is compared with its checksum before it is used. None: every file but the store, whose parts are
            compared when they are read. True: all of the store too. False: nothing but sizes, and those parts.

    Attributes:
        manifest: of the bundle. store: path of the neuron store. load_seconds: that loading methods took so far.

    Raises:
        ArtifactError: a file is missing, cut, changed or of another bundle, or ExecuTorch does not take the program.
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
        self.manifest.verify(
            self.folder, "loaded" if verify is None else "all" if verify else "sizes", store=self.store
        )
        self._options: dict[str, str | int | bool | None] = {
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
        self._model_says = of_model(self.folder)
        self._fed: list[int] = []  # what the first lane has read and said, but for its last token
        self._methods: dict[str, Any] = {}
        self._using = threading.RLock()
        self._answering = False
        self.load_seconds = 0.0
        _check_executorch(self.manifest, self.folder)
        backend.load_library()
        if self.manifest.target.startswith("qnn:"):
            from torch_pi2.export.qnn import sdk

            sdk.load(sdk.find())
        from executorch.runtime import Runtime, Verification

        path = self.folder / PROGRAM_FILE
        try:
            self._program: Any = Runtime.get().load_program(path, verification=Verification.InternalConsistency)
            _check_program(self._program, self.manifest, path)
        except RuntimeError as error:
            raise _refused(str(path), "a program of ExecuTorch", error) from error
        # The first method opens the store: what is wrong with it is said now.
        self._load("forward")

    def __enter__(self) -> Bundle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:  # else it is the one to tell
                raise

    def close(self) -> None:
        """Release the program; the store is closed when no other bundle uses it. A closed bundle cannot be used.

        Raises:
            ConfigError: the trace cannot be written; or this is within ``stream`` of an answer.
        """
        trace = self._options["trace"]
        with self._alone("close"), _OPENING if trace else nullcontext():
            if trace:
                backend.clear_error()
            self._methods.clear()
            self._program = None
            said = backend.last_error() if trace else ""
        if said.startswith(f"trace {trace}: "):
            raise problem_of(said)

    @property
    def tokenizer(self) -> Any:
        """Of the folder, loaded when it is first needed. Raises ArtifactError: there is none, or it is damaged."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def __call__(self, *args: torch.Tensor | float) -> Any:
        """Of kind "module": outputs for these inputs, one tensor or a tuple.

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
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        num_return_sequences: int = 1,
        reuse: bool = False,
        stream: Stream | None = None,
    ) -> Generated:
        """Continue a prompt.

        Greedy answers (``temperature=0``) are the same bits each time. Sequence i of a sampled answer has a generator
        of its own, seeded ``seed + i``. The prompt is read once and its keys and values are copied to the other
        sequences. They end at their own times; as soon as a smaller batch holds those that are left, its method goes
        on.

        Args:
            prompt: text, token ids, or messages of a chat (``{"role": ..., "content": ...}``) for the tokenizer's
                template.
            max_new_tokens: of each sequence (default: as many as there is room for).
            temperature: 0 is greedy. top_k, top_p, min_p, repetition_penalty, stop: see
                :class:`torch_pi2.export.choose.Choosing`; None: as the model's generation_config.json has them.
            num_return_sequences: at most ``manifest.lanes``.
            reuse: do not read again what prompt and last call (with one sequence) begin with: the next question of a
                talk. Keys and values of what was said are those of steps, and the rest is read as a short prompt: where
                neurons are predicted it misses what steps miss, which a long prompt read whole does not.
            stream: called for every token, in order of sequences within a step. What it raises ends the answer; another
                one it cannot ask for, as keys and values of this one are in the lanes.

        Raises:
            ConfigError: the bundle is no decoder, an argument makes no sense, or this is within ``stream``.
            ShapeError: no room for the prompt.
            ArtifactError: a tokenizer is needed and there is none, or the store cannot be read.
            NonFiniteError: logits are not finite.
        """
        with self._alone("generate"):
            _check_count("num_return_sequences", num_return_sequences, self.manifest.lanes)
            argument(reuse, "reuse").flag()
            how = Choosing(temperature, top_k, top_p, min_p, repetition_penalty, stop)
            answers, timing = self._answer([prompt] * num_return_sequences, max_new_tokens, how, seed, stream, reuse)
        return Generated(answers[0].prompt, [answer.result() for answer in answers], *timing)

    @torch.no_grad()
    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int = 0,
        stream: Stream | None = None,
    ) -> list[Generated]:
        """Continue several prompts together: each is read into a lane of its own, then they grow at the same time.

        A lossless bundle gives each the greedy answer that :meth:`generate` gives (but for last bits of logits, where
        methods of other batch sizes add in another order).

        Args:
            prompts: at most ``manifest.lanes``. The others: as of :meth:`generate`; prompt i is sequence i.

        Returns:
            Of each prompt one sequence; seconds and steps are those of all together.

        Raises:
            As :meth:`generate`.
        """
        with self._alone("generate_batch"):
            if isinstance(prompts, str):
                argument(prompts, "prompts").wrong("a list of prompts")
            _check_count("prompts", len(prompts), self.manifest.lanes)
            how = Choosing(temperature, top_k, top_p, min_p, repetition_penalty, stop)
            answers, timing = self._answer([*prompts], max_new_tokens, how, seed, stream, False)
        return [Generated(answer.prompt, [answer.result()], *timing) for answer in answers]

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time: other threads wait, and ``stream``, which is called within one, is refused."""
        with self._using:
            if self._answering:
                raise ConfigError(
                    f"{what} of {self.folder}",
                    expected="one call at a time: keys and values of an answer are in the lanes",
                    found="a call within the stream of an answer",
                    fix="Call it later, or open the bundle once more; to end the answer raise an error in stream.",
                )
            if what != "close":
                self._require("decoder", what)
            self._answering = True
            try:
                yield
            finally:
                self._answering = False

    def _answer(
        self, prompts: list[Any], most: int | None, how: Choosing, seed: int, stream: Stream | None, reuse: bool
    ) -> tuple[list[_Answering], tuple[float, float, int, int]]:
        """An answer to each of ``prompts``, of which equal ones are read once, and how it went as in Generated."""
        if most is not None and not is_whole(most, 1):
            raise ConfigError("max_new_tokens", expected="1 or more", found=str(most), fix="Correct it.")
        if stream is not None and not callable(stream):
            argument(stream, "stream").wrong("a function, or None")
        argument(seed, "seed").whole(most=1 << 62)
        texts = [argument(prompt, "prompt").text(empty=True) for prompt in prompts if isinstance(prompt, str)]
        wordless = self._tokenizer is None and not self._has_tokenizer() and not texts
        if wordless and how.stop is not None:
            raise ConfigError(
                "stop", expected="a bundle with a tokenizer", found="one without", fix="Leave it out, or pass one."
            )
        how, tokenizer = how.or_as(self._model_says), None if wordless else self.tokenizer
        one = all(prompt is prompts[0] for prompt in prompts)
        ids = [encode(p, lambda: self.tokenizer, self.manifest.model.vocab or 0) for p in prompts[: 1 if one else None]]
        left = [self._room(some) for some in ids]
        answers = [
            _Answering(i, seed, left[k], most, self.manifest.eos, ids[k], tokenizer, stream, how)
            for i in range(len(prompts))
            for k in [0 if one else i]
        ]
        self._load_decoding(len(answers))
        steps: list[float] = []  # when each began

        def step(going: list[_Answering]) -> list[tuple[_Answering, torch.Tensor]]:
            steps.append(time.perf_counter())
            if one and len(answers) > 1 and len(steps) == 1:
                self._call("fork", torch.zeros(self.manifest.lanes, dtype=torch.int64))
            logits_NV = self._step(going)
            return [(answer, logits_NV[answer.lane]) for answer in going]

        known = self._same(ids[0]) if reuse else 0
        self._fed = []
        started = time.perf_counter()
        read = [self._read(some, known, lane) for lane, some in enumerate(ids)]
        decode_loop(
            answers, read * len(answers) if one else read, step, lambda answer, logits_V: answer.choose(logits_V)
        )
        done = time.perf_counter()
        if len(answers) == 1:
            self._fed = ids[0] + answers[0].tokens[:-1]
        first = steps[0] if steps else done
        return answers, (first - started, done - first, len(steps), known)

    def _same(self, ids: list[int]) -> int:
        """Tokens with which ``ids`` and what the first lane has begin, but for the last of ``ids``."""
        pairs = enumerate(zip(ids[:-1], self._fed))
        return next((i for i, (a, b) in pairs if a != b), min(len(ids) - 1, len(self._fed)))

    @torch.no_grad()
    def logits(self, ids: Sequence[int] | torch.Tensor, prompt: int = 1) -> torch.Tensor:
        """Logits at every position from ``prompt - 1`` on, float32 ``[len(ids) - prompt + 1, V]``.

        The first ``prompt`` tokens are read at once (``forward``), the others one by one (``decode``).

        Raises:
            ConfigError: the bundle is no decoder, or this is within ``stream``. ShapeError: too many tokens, or none.
        """
        with self._alone("logits"):
            tokens = encode(ids, lambda: self.tokenizer, self.manifest.model.vocab or 0)
            self._room(tokens[:-1])
            if not 1 <= prompt <= len(tokens):
                raise ShapeError("prompt", expected=f"1 to {len(tokens)} tokens", found=str(prompt), fix="Correct it.")
            self._fed = []
            rows = [self._read(tokens[:prompt])]
            for position in range(prompt, len(tokens)):
                rows.append(self._decode({0: (tokens[position], position)})[0])
        return torch.stack(rows)

    def stats(self, *, reset: bool = False) -> dict[str, Any]:
        """What was read from the store since the last reset, summed over bundles that have it open.

        Returns:
            The fields of ``pi2_et_stats`` (``docs/BUNDLE.md``) of this store; ``hit_rate``: of the neurons wanted, the
            share that was in the cache; ``wait_share``: of the time in layers, the share spent waiting for reads. Both
            are None before anything was computed.
        """
        every = backend.stats(reset=reset)
        place = self.store.resolve()
        of_each = [store for store in every["stores"] if Path(store["path"]).resolve() == place]  # by their settings
        mine = {**of_each[0]} if of_each else {}
        mine |= {name: sum(each[name] for each in of_each) for name, one in mine.items() if isinstance(one, int)}
        wanted, busy = mine.get("wanted", 0), mine.get("busy_ns", 0)
        return {
            **mine,
            "hit_rate": mine["hits"] / wanted if wanted else None,
            "wait_share": mine["wait_ns"] / busy if busy else None,
        }

    def _has_tokenizer(self) -> bool:
        return any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))

    def _require(self, kind: str, what: str) -> None:
        if self._program is None:
            raise ConfigError(
                f"{what} of {self.folder}", expected="an open bundle", found="a closed one", fix="Open it."
            )
        if self.manifest.kind != kind:
            raise ConfigError(
                f"{what} of {self.folder}",
                expected=f"a bundle of kind {kind}",
                found=self.manifest.kind,
                fix="Call bundle(...) for modules, generate or logits for decoders.",
            )

    def _room(self, ids: list[int]) -> int:
        """Tokens that an answer to ``ids`` may have. Raises ShapeError: none."""
        left: int = self.manifest.max_tokens - len(ids)
        if left <= 0:
            raise ShapeError(
                "prompt",
                expected=f"at most {self.manifest.max_tokens - 1} tokens: the bundle has room for "
                f"{self.manifest.max_tokens}, answer included",
                found=str(len(ids)),
                fix="Shorten it, or export with a larger max_tokens.",
            )
        return left

    def _read(self, ids: list[int], known: int = 0, lane: int = 0) -> torch.Tensor:
        """Logits ``[V]`` after ``ids``, which the lane then has, and the first of which it has already."""
        behind = lane * self.manifest.max_tokens
        for name, start, count in self.manifest.pieces(known, len(ids)):
            part = ids[start : start + count]
            last = [] if name == "forward" else [torch.tensor([count - 1])]
            if last:  # what it writes behind the prompt is written again, and not read before
                part += part[-1:] * (self.manifest.methods[name].max_tokens - count)
            logits_11V = self._call(name, torch.tensor([part]), torch.tensor([behind + start]), *last)[0]
        return _finite(logits_11V[0, -1])

    def _step(self, going: list[_Answering]) -> torch.Tensor:
        """The next token of each: logits ``[N, V]`` by lane. They close ranks if a smaller batch then holds them."""
        if max(a.lane for a in going) >= min(b for b in self.manifest.batches if b >= len(going)):
            lanes = [a.lane for a in going]
            self._call("fork", torch.tensor(lanes + lanes[:1] * (self.manifest.lanes - len(lanes))))
            for lane, answer in enumerate(going):
                answer.lane = lane
        return self._decode({a.lane: (a.tokens[-1], a.position) for a in going})

    def _decode(self, lanes: Mapping[int, tuple[int, int]]) -> torch.Tensor:
        """Logits ``[N, V]`` after (token, position) of each lane."""
        batch = min(b for b in self.manifest.batches if b > max(lanes))
        # Lanes not in use get the token of one that is: it wants no other neurons. What they write is never read.
        idle = next(iter(lanes.values()))
        rows = [lanes.get(lane, idle) for lane in range(batch)]
        ids_N1, positions_N1 = torch.tensor(rows).split(1, dim=1)
        logits_N1V = self._call(f"decode_b{batch}", ids_N1.contiguous(), positions_N1.contiguous())[0]
        return _finite(logits_N1V[:, 0], list(lanes))

    def _call(self, name: str, *args: torch.Tensor | float) -> Sequence[torch.Tensor]:
        """Outputs of a method. Raises ShapeError, DtypeError: for what it does not take; ArtifactError: it fails."""
        with self._using:
            method = self._load(name)
            _check_inputs(f"{self.folder}, {name}", method.metadata, args)
            backend.clear_error()
            try:
                found: Sequence[torch.Tensor] = method.execute(args)
            except RuntimeError as error:
                raise self._failed(name, "a call that succeeds", error) from error
            return found

    def _load(self, name: str) -> Any:
        if name not in self._methods:
            started = time.perf_counter()
            with _OPENING:
                backend.clear_error()
                try:
                    backend.share_weights(self.manifest.model.linears == "float32")
                    backend.set_options({name: value for name, value in self._options.items() if value is not None})
                    self._methods[name] = self._program.load_method(name)
                except RuntimeError as error:
                    raise self._failed(name, "a method that ExecuTorch loads", error) from error
                finally:
                    backend.set_options(dict.fromkeys(self._options, ""))
                    backend.share_weights(False)
            self.load_seconds += time.perf_counter() - started
        return self._methods[name]

    def _load_decoding(self, count: int) -> None:
        """What ``count`` sequences may need, so that it is not loaded while they wait."""
        for tokens in self.manifest.prefills:
            self._load(f"prefill_{tokens}")
        most = min(b for b in self.manifest.batches if b >= count)
        for batch in self.manifest.batches:
            if batch == most or (count > 1 and batch < most):
                self._load(f"decode_b{batch}")
        if count > 1:
            self._load("fork")

    def _failed(self, name: str, expected: str, error: RuntimeError) -> Pi2Error:
        """What our delegate says of ``error``, or else what ExecuTorch does."""
        text = backend.last_error()
        return problem_of(text) if text else _refused(f"{self.folder / PROGRAM_FILE}, {name}", expected, error)


class _Answering(GeneratedSequence):
    """An answer that is being generated, with its text, in a lane of the KV cache.

    ``left``: tokens that there is room for; ``most``: that are wanted.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        left: int,
        most: int | None,
        eos: tuple[int, ...],
        prompt: list[int],
        tokenizer: Any,
        stream: Stream | None,
        choosing: Choosing,
    ) -> None:
        super().__init__(number, seed, left if most is None else min(most, left), eos)
        self.lane, self.text, self.prompt = number, "", prompt
        self._full = "room" if most is None or most >= left else "length"
        self._stream, self._choosing = stream, choosing
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt)
        self._stops, self._shown = StopStrings(choosing.stop or ()), ""

    @property
    def position(self) -> int:
        """Of the last token."""
        return len(self.prompt) + len(self.tokens) - 1

    def choose(self, logits_V: torch.Tensor) -> int:
        """The next token."""
        return self._choosing.choose(logits_V, self.prompt + self.tokens, self.random)

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
    used = logits if rows is None else logits[rows]
    if torch.isfinite(used).all():
        return logits
    raise NonFiniteError(
        "logits",
        expected="finite numbers",
        found="NaN or infinity",
        fix="Check the model in PyTorch, then export again.",
    )


def _check_count(name: str, count: object, lanes: int) -> None:
    if not is_whole(count, 1, lanes):
        expected = f"1 to {lanes}, the lanes of the bundle"
        raise ConfigError(name, expected=expected, found=str(count), fix="Correct it.")


def _check_inputs(where: str, metadata: Any, args: Sequence[torch.Tensor | float]) -> None:
    """ExecuTorch's own message for wrong inputs is a number."""
    if len(args) != metadata.num_inputs():
        raise ShapeError(
            where, expected=f"{metadata.num_inputs()} inputs", found=str(len(args)), fix="Pass what was exported."
        )
    for i, given in enumerate(args):
        try:
            about = metadata.input_tensor_meta(i)
        except IndexError:  # a number of the example, which ExecuTorch compares
            continue
        if not isinstance(given, torch.Tensor):
            found = type(given).__name__
            raise DtypeError(f"{where}, input {i}", expected="a tensor", found=found, fix="Convert it.")
        most, dtype = tuple(about.sizes()), _DTYPES.get(about.dtype())
        if dtype is not None and given.dtype != dtype:
            raise DtypeError(f"{where}, input {i}", expected=str(dtype), found=str(given.dtype), fix="Convert it.")
        if given.dim() != len(most) or any(n > limit for n, limit in zip(given.shape, most)):
            raise ShapeError(
                f"{where}, input {i}", expected=f"at most {list(most)}", found=str(list(given.shape)), fix="Correct it."
            )


#: ExecuTorch's numbers of scalar types, those that inputs have.
_DTYPES = dict(
    enumerate(
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    )
) | {11: torch.bool, 15: torch.bfloat16}


def _cache_kib(manifest: Manifest, folder: Path, budget: int) -> int:
    """What ``budget`` leaves for neurons, in KiB. Raises ConfigError: nothing."""
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


def _check_program(program: Any, manifest: Manifest, path: Path) -> None:
    """Raises ArtifactError unless the sizes that the manifest says are those of the program."""

    def require(what: str, expected: object, found: object) -> None:
        if found != expected:
            raise ArtifactError(
                f"{path}, {what}",
                expected=f"{expected}, as {manifest.where} says",
                found=str(found),
                fix="The program counts: copy the bundle again, or export again.",
            )

    missing = {*manifest.methods} - program.method_names
    if manifest.kind == "module":
        require("methods", "forward", "forward" if not missing else ", ".join(sorted(program.method_names)))
        return
    missing |= {CONTEXT_METHOD} - program.method_names
    require("methods that it lacks", "none", ", ".join(sorted(missing)) or "none")
    require("max_tokens", manifest.max_tokens, program.load_method(CONTEXT_METHOD).execute([])[0])
    for name, method in manifest.methods.items():
        about = program.metadata(name)
        sizes = (method.batch, method.max_tokens) if method.kind != "fork" else (manifest.lanes,)
        require(f"input of {name}", sizes, tuple(about.input_tensor_meta(0).sizes()))
        if method.kind != "fork":
            logits = (method.batch, 1, manifest.model.vocab)
            require(f"logits of {name}", logits, tuple(about.output_tensor_meta(0).sizes()))


def _check_executorch(manifest: Manifest, folder: Path) -> None:
    """Raises VersionError unless the ExecuTorch that made the program is the one that is installed, if one is."""
    made = manifest.made_by.get("executorch", "").partition("+")[0]
    try:
        found = importlib.metadata.version("executorch")
    except importlib.metadata.PackageNotFoundError:
        return  # what loads our library says so
    if made and found != made:
        raise VersionError(
            f"executorch for {folder}",
            expected=f"{made}, which made it",
            found=found,
            fix=f"pip install executorch=={made}, or export again.",
        )


def problem_of(text: str) -> Pi2Error:
    """The error for what our delegate says: "what: expected ..., found .... what to do"."""
    what, expected, found, fix = parts_of_problem(text)
    if not (what and expected and found and fix):
        return ArtifactError("our delegate", expected="that it works", found=text, fix="See its log on standard error.")
    kind: type[Pi2Error] = ArtifactError
    if what.startswith(("option ", "trace ")):
        kind = ConfigError
    elif expected.startswith("weights "):
        kind = StaleArtifactError
    return kind(what, expected=expected, found=found, fix=fix)


def _refused(what: str, expected: str, error: RuntimeError) -> ArtifactError:
    return ArtifactError(
        what,
        expected=expected,
        found=" ".join(str(error).split()) or type(error).__name__,
        fix="Its log on standard error says more; torch-pi2 inspect --verify BUNDLE finds damage.",
    )
