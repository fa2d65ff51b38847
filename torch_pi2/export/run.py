"""``Bundle``: run a bundle on this machine by ExecuTorch's Python runtime. On phones the C++ runner does."""

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
from torch_pi2.decode.sequence import GeneratedSequence, TextStream, decode_loop
from torch_pi2.errors import (
    ArtifactError,
    ConfigError,
    DtypeError,
    NonFiniteError,
    Pi2Error,
    ShapeError,
    VersionError,
)
from torch_pi2.export import executorch as backend
from torch_pi2.export.manifest import PROGRAM_FILE, STORE_FILE, Manifest
from torch_pi2.export.text import SamplingKeywords, SamplingSettings, defaults_of, encode, load_tokenizer

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
        prompt_ids: tokens of the prompt. sequences: the answers.
        prompt_seconds: until the first token. decode_seconds: all others. decode_steps: calls of decoding methods.
    """

    prompt_ids: list[int]
    sequences: list[Answer]
    prompt_seconds: float
    decode_seconds: float
    decode_steps: int

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

    One call at a time: the methods share one KV cache. The settings below are lossless: they change no bit.

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
        self._busy = threading.Lock()
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
            ConfigError: the trace cannot be written; or another call is going on.
        """
        if self._program is not None:
            with self._alone("close", None) as program:
                self._program = None
                program.close()

    @property
    def load_seconds(self) -> float:
        """Time that loading methods took so far."""
        return 0.0 if self._program is None else self._program.load_seconds

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
        with self._alone("bundle(...)", "module") as program:
            outputs = program.call("forward", *args)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @torch.no_grad()
    def generate(
        self,
        prompt: Prompt | torch.Tensor,
        max_new_tokens: int | None = None,
        *,
        seed: int = 0,
        num_return_sequences: int = 1,
        stream: Stream | None = None,
        **sampling: Unpack[SamplingKeywords],
    ) -> Generated:
        """Continue a prompt.

        Greedy answers (``temperature=0``, the default) are the same bits each time. Sequence i of a sampled answer has
        its own generator, seeded ``seed + i``. The prompt is read once and its keys and values are copied to the other
        sequences, which end at their own times.

        Args:
            prompt: text, token ids, or messages of a chat (``{"role": ..., "content": ...}``) for the tokenizer's
                template.
            max_new_tokens: most tokens of each sequence (default: as many as fit).
            num_return_sequences: at most ``manifest.lanes``.
            stream: called for every token, in order of sequences within a step. An error that it raises ends the
                answer. It cannot call this bundle, whose KV cache is in use.
            sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``stop``: see
                :class:`torch_pi2.export.text.SamplingSettings`; None: the model's generation_config.json decides.

        Raises:
            ConfigError: the bundle is no decoder, an argument is wrong, or another call is going on.
            ShapeError: the prompt is too long.
            ArtifactError: a tokenizer is needed and there is none, or the store cannot be read.
            NonFiniteError: logits are not finite.
        """
        how = SamplingSettings(**sampling)
        if max_new_tokens is not None:
            argument(max_new_tokens, "max_new_tokens").whole(1)
        if stream is not None and not callable(stream):
            argument(stream, "stream").wrong("a function, or None")
        argument(seed, "seed").whole(most=1 << 62)
        if isinstance(prompt, str):
            argument(prompt, "prompt").text(empty=True)
        with self._alone("generate", "decoder") as program:
            count, lanes = num_return_sequences, self.manifest.lanes
            if type(count) is not int or not 1 <= count <= lanes:
                argument(count, "num_return_sequences").wrong(f"1 to {lanes}, the lanes of the bundle")
            ids, room = self._encode(prompt)
            tokenizer = self.tokenizer if how.stop or self._has_tokenizer() else None
            how = how.with_defaults(self._sampling)
            answers = [
                _Answering(i, seed, room, max_new_tokens, self.manifest.eos, ids, tokenizer, stream, how)
                for i in range(count)
            ]
            batch = min(b for b in self.manifest.batches if b >= count)
            sizes = [f"prefill_{n}" for n in self.manifest.prefills]
            for name in (*sizes, f"decode_b{batch}", *(["fork"] if count > 1 else [])):
                program.load(name)  # so that no answer waits for it later
            steps: list[float] = []  # when each began

            def step(going: list[_Answering]) -> list[tuple[_Answering, torch.Tensor]]:
                steps.append(time.perf_counter())
                if count > 1 and len(steps) == 1:
                    program.call("fork", torch.zeros(lanes, dtype=torch.int64))
                logits_NV = _decode(program, batch, {a.number: (a.tokens[-1], a.position) for a in going})
                return [(answer, logits_NV[answer.number]) for answer in going]

            started = time.perf_counter()
            decode_loop(answers, [self._read(program, ids)] * count, step, _Answering.choose)
            done = time.perf_counter()
        first = steps[0] if steps else done
        return Generated(ids, [answer.result() for answer in answers], first - started, done - first, len(steps))

    @torch.no_grad()
    def logits(self, ids: Sequence[int] | torch.Tensor, prompt: int = 1) -> torch.Tensor:
        """Logits at every position from ``prompt - 1`` on, float32 ``[len(ids) - prompt + 1, V]``.

        The first ``prompt`` tokens are read at once (``forward``), the others one by one (``decode``).

        Raises:
            ConfigError: the bundle is no decoder, or another call is going on. ShapeError: too many tokens, or none.
        """
        with self._alone("logits", "decoder") as program:
            tokens, _ = self._encode(ids, 0)
            if not 1 <= prompt <= len(tokens):
                raise ShapeError("prompt", expected=f"1 to {len(tokens)} tokens", found=str(prompt), fix="Correct it.")
            rows = [self._read(program, tokens[:prompt])]
            for position in range(prompt, len(tokens)):
                rows.append(_decode(program, self.manifest.batches[0], {0: (tokens[position], position)})[0])
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

    @contextmanager
    def _alone(self, what: str, kind: str | None) -> Iterator[Program]:
        """The program, for one call at a time. Raises ConfigError: another one, a closed bundle, or of another kind."""

        def refuse(expected: str, found: str, fix: str) -> ConfigError:
            return ConfigError(f"{what} of {self.folder}", expected=expected, found=found, fix=fix)

        if not self._busy.acquire(blocking=False):
            fix = "Call it later, or open the bundle once more; to end an answer raise an error in its stream."
            raise refuse("one call at a time: the KV cache holds an answer", "a call within another one", fix)
        try:
            if self._program is None:
                raise refuse("an open bundle", "a closed one", "Open it.")
            if kind not in (None, self.manifest.kind):
                fix = "Call bundle(...) for modules, generate or logits for decoders."
                raise refuse(f"a bundle of kind {kind}", self.manifest.kind, fix)
            yield self._program
        finally:
            self._busy.release()

    def _has_tokenizer(self) -> bool:
        names = ("tokenizer.json", "tokenizer_config.json")
        return self._tokenizer is not None or any((self.folder / name).is_file() for name in names)

    def _encode(self, prompt: Any, answer: int = 1) -> tuple[list[int], int]:
        """Tokens of ``prompt``, and how many an answer may have. Raises ShapeError: not ``answer``."""
        ids = encode(prompt, lambda: self.tokenizer, self.manifest.model.vocab or 0)
        room: int = self.manifest.max_tokens - len(ids)
        if room < answer:
            raise ShapeError(
                "prompt",
                expected=f"at most {self.manifest.max_tokens - answer} tokens: the bundle has room for "
                f"{self.manifest.max_tokens}, answer included",
                found=str(len(ids)),
                fix="Shorten it, or export with a larger max_tokens.",
            )
        return ids, room

    def _read(self, program: Program, ids: list[int]) -> torch.Tensor:
        """Read ``ids`` into the first lane; logits ``[V]`` after the last one."""
        for name, start, count in self.manifest.pieces(len(ids)):
            piece, last = ids[start : start + count], []
            if name != "forward":  # what padding writes is overwritten before it is read
                piece += piece[-1:] * (self.manifest.methods[name].max_tokens - count)
                last = [torch.tensor([count - 1])]
            logits_11V = program.call(name, torch.tensor([piece]), torch.tensor([start]), *last)[0]
        return _finite(logits_11V[0, -1])


def _decode(program: Program, batch: int, lanes: Mapping[int, tuple[int, int]]) -> torch.Tensor:
    """Logits ``[N, V]`` after (token, position) of each lane."""
    # Idle lanes get the token of a used one, which wants no other neurons. What they write is never read.
    idle = next(iter(lanes.values()))
    rows = [lanes.get(lane, idle) for lane in range(batch)]
    ids_N1, positions_N1 = torch.tensor(rows).split(1, dim=1)
    logits_N1V = program.call(f"decode_b{batch}", ids_N1.contiguous(), positions_N1.contiguous())[0]
    _finite(logits_N1V[[*lanes]])
    return logits_N1V[:, 0]


class _Answering(GeneratedSequence):
    """An answer that is being generated in the lane of its number, with its text.

    ``room``: tokens that fit; ``most``: that the caller wants at most.
    """

    def __init__(
        self,
        number: int,
        seed: int,
        room: int,
        most: int | None,
        eos: tuple[int, ...],
        prompt: list[int],
        tokenizer: Any,
        stream: Stream | None,
        sampling: SamplingSettings,
    ) -> None:
        super().__init__(number, seed, room if most is None else min(most, room), eos)
        self.prompt, self.text = prompt, ""
        self._full = "room" if most is None or most >= room else "length"
        self._stream, self._sampling = stream, sampling
        self._decoded = None if tokenizer is None else TextStream(tokenizer, sampling.stop or (), before=prompt)

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
        if self._decoded is not None:
            piece = "" if self.ended == "eos" else self._decoded.add(token)
            piece += self._decoded.end() if self.ended else ""
            if self._decoded.stopped:
                self.ended = "stop"
            self.text += piece
        if self._stream is not None:
            self._stream(self.number, token, piece)

    def result(self) -> Answer:
        """Once it has ended."""
        return Answer(self.tokens, self.text, self.ended if self.ended in ("eos", "stop") else self._full)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """``logits``. Raises NonFiniteError."""
    if torch.isfinite(logits).all():
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


# --- the program ------------------------------------------------------------------------------------------------------


#: Options are global to the library until a store is opened with them: one program at a time sets them and opens.
_OPENING = threading.Lock()
#: ExecuTorch's numbers of the dtypes that inputs have.
_DTYPES: Mapping[int, torch.dtype] = dict(
    enumerate(
        (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
    )
) | {11: torch.bool, 15: torch.bfloat16}


class Program:
    """The program of the bundle in ``folder``. Methods are loaded when they are first called, the store with them.

    Args:
        options: for the delegate, see :func:`torch_pi2.export.executorch.set_options`; None: the default.

    Raises:
        ArtifactError: ExecuTorch does not load it. VersionError: it is of another ExecuTorch. LibraryMissingError:
            ExecuTorch or our library is not installed.
    """

    def __init__(self, folder: Path, manifest: Manifest, options: Mapping[str, str | int | bool | None]) -> None:
        self.path, self.options, self.load_seconds = folder / PROGRAM_FILE, options, 0.0
        self._share_weights = manifest.model.linears == "float32"
        self._methods: dict[str, Any] = {}
        backend.load_library()
        made_by = manifest.made_by.get("executorch", "").partition("+")[0]
        if made_by not in ("", backend.EXECUTORCH):
            raise VersionError(
                f"program of {folder}",
                expected=f"one of ExecuTorch {backend.EXECUTORCH}, which is installed",
                found=made_by,
                fix="Export again.",
            )
        if manifest.target.startswith("qnn:"):
            from torch_pi2.export.qnn import sdk

            sdk.load(sdk.find())
        from executorch.runtime import Runtime, Verification

        try:
            self._program: Any = Runtime.get().load_program(self.path, verification=Verification.InternalConsistency)
        except RuntimeError as error:
            raise _refused(str(self.path), "a program of ExecuTorch", error) from error

    def load(self, name: str) -> Any:
        """The method ``name``."""
        if name not in self._methods:
            started = time.perf_counter()
            with _OPENING:
                backend.clear_error()
                try:
                    backend.share_weights(self._share_weights)
                    backend.set_options({key: value for key, value in self.options.items() if value is not None})
                    self._methods[name] = self._program.load_method(name)
                except RuntimeError as error:
                    raise self._failed(name, "a method that ExecuTorch loads", error) from error
                finally:
                    backend.set_options(dict.fromkeys(self.options, ""))
                    backend.share_weights(False)
            self.load_seconds += time.perf_counter() - started
        return self._methods[name]

    def call(self, name: str, *args: torch.Tensor | float) -> Sequence[torch.Tensor]:
        """Outputs of a method. Raises ShapeError, DtypeError: for wrong inputs; ArtifactError: it fails."""
        method = self.load(name)
        _check_inputs(f"{self.path.parent}, {name}", method.metadata, args)
        backend.clear_error()
        try:
            outputs: Sequence[torch.Tensor] = method.execute(args)
        except RuntimeError as error:
            raise self._failed(name, "a call that succeeds", error) from error
        return outputs

    def close(self) -> None:
        """Release it. Raises ConfigError: the trace cannot be written."""
        with _OPENING:
            backend.clear_error()
            self._methods.clear()
            self._program = None
            problem = backend.last_error()
        trace = self.options.get("trace")
        if trace and problem.startswith(f"trace {trace}: "):
            raise backend.delegate_error(problem)

    def _failed(self, name: str, expected: str, error: RuntimeError) -> Pi2Error:
        """What our delegate says of ``error``, or else what ExecuTorch does."""
        problem = backend.last_error()
        return backend.delegate_error(problem) if problem else _refused(f"{self.path}, {name}", expected, error)


def _refused(what: str, expected: str, error: RuntimeError) -> ArtifactError:
    return ArtifactError(
        what,
        expected=expected,
        found=" ".join(str(error).split()) or type(error).__name__,
        fix="Its log on standard error says more; torch-pi2 inspect --verify BUNDLE finds damage.",
    )


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
        name = f"{where}, input {i}"
        if not isinstance(given, torch.Tensor):
            raise DtypeError(name, expected="a tensor", found=type(given).__name__, fix="Convert it.")
        most, dtype = tuple(about.sizes()), _DTYPES.get(about.dtype())
        if dtype is not None and given.dtype != dtype:
            raise DtypeError(name, expected=str(dtype), found=str(given.dtype), fix="Convert it.")
        if given.dim() != len(most) or any(n > limit for n, limit in zip(given.shape, most)):
            raise ShapeError(
                name, expected=f"at most {list(most)}", found=str(list(given.shape)), fix="Pass what was exported."
            )
