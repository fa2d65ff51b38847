"""``Bundle``: run a bundle on this machine with ExecuTorch's Python runtime; phones use the C++ runner."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from torch_pi2.base.fields import Field, argument, checked
from torch_pi2.base.files import is_standard_output
from torch_pi2.base.progress import log
from torch_pi2.base.units import parse_bytes
from torch_pi2.decode.sequence import GeneratedSequence, TextStream, decode_loop
from torch_pi2.errors import ArtifactError, ConfigError, DtypeError, NonFiniteError, Pi2Error, ShapeError, VersionError
from torch_pi2.export import executorch as backend
from torch_pi2.export.manifest import PROGRAM_FILE, STORE_FILE, Manifest
from torch_pi2.export.text import SamplingSettings, defaults_of, encode, load_tokenizer

#: ``stream(sequence, token, text)``: index of the sequence, its new token, and newly complete text.
Stream = Callable[[int, int, str], None]
#: Text, token ids, or messages of a chat.
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Answer:
    """One answer: its ``ids`` with eos, its ``text`` (empty without a tokenizer), and how it ``ended``: "eos", "stop"
    (a stop string), "length" (``max_new_tokens``) or "room" (the bundle's ``max_tokens``).
    """

    ids: list[int]
    text: str
    ended: str


@dataclass(frozen=True)
class Generated:
    """The result of :meth:`Bundle.generate`.

    Attributes:
        prompt_ids: tokens of the prompt. sequences: the answers.
        prompt_seconds: to the first token. decode_seconds: the rest. decode_steps: calls of decoding methods.
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
        """Decoding speed over all sequences, without the first token of each; 0 if there are no others."""
        count = sum(len(s.ids) - 1 for s in self.sequences)
        return count / self.decode_seconds if count else 0.0


class Bundle:
    """An open bundle. Methods are loaded on first use, the neuron store with the first of them.

    One call at a time, as methods share the KV cache. All settings are lossless.

    Args:
        folder: written by ``torch_pi2.export``.
        budget: total bytes, or text such as "2.5GiB"; the neuron cache gets what ``manifest.memory.fixed_bytes``
            leaves. Python and PyTorch come on top. None: everything fits.
        store: path of the neuron store or its folder, if not in ``folder``.
        threads: of the engine, beside an accelerator (default: as in ExecuTorch's pool).
        io_threads, engine, policy, direct, preload: as in :class:`torch_pi2.OffloadConfig`.
        trace: file for a Perfetto trace, written on close.
        tokenizer: instead of the folder's.
        verify: None: check sizes, and checksums of all files but the store, whose parts are checked when read. True:
            also the whole store. False: sizes only.

    Attributes:
        manifest: of the bundle. store: path of the neuron store.

    Raises:
        ArtifactError: a file is missing, changed or of another bundle, or ExecuTorch does not load the program.
        StaleArtifactError: the store has other weights. ConfigError: the budget is too small, or an option is invalid.
        LibraryMissingError: ExecuTorch or our backend is not installed. VersionError: another version of ExecuTorch.
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
        if trace is not None and is_standard_output(trace):
            found = f"standard output ({trace})"
            raise ConfigError("Bundle(trace)", expected="a file", found=found, fix="Name a file.")
        self.folder = Path(folder)
        self.manifest = Manifest.load(self.folder, verify is not False)
        for name, given in (("store", store), ("trace", trace)):
            if given is not None and not self.manifest.model.layers:
                expected, found = "a bundle with neurons", "one without, all of whose weights are in its program"
                argument(given, f"Bundle({self.folder}, {name}=...)", "Leave it out.").wrong(expected, found)
        place = Path(self.folder if store is None else store).absolute()
        self.store = place / STORE_FILE if place.is_dir() else place
        what: Any = "loaded" if verify is None else "all" if verify else "sizes"
        self.manifest.verify(self.folder, what, store=self.store)
        cache_kib = None if budget is None else _cache_kib(self.manifest, self.folder, parse_bytes(budget))
        options: dict[str, Any] = {"store_path": str(self.store), "cache_bytes_kib": cache_kib, "threads": threads}
        options |= {"io_threads": io_threads, "engine": engine, "policy": policy, "direct": direct, "preload": preload}
        options["trace"] = None if trace is None else str(Path(trace).absolute())
        self._tokenizer = tokenizer
        self._sampling = defaults_of(self.folder)
        self._busy = threading.Lock()
        self._program: Program | None = Program(self.folder, self.manifest, options)
        self._program.load("forward")  # opens the store, to report its problems now

    def __enter__(self) -> "Bundle":
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self.close()
        except ConfigError:
            if error is None:  # report the original error
                raise

    def close(self) -> None:
        """Release the program, and the store if no other bundle uses it. Raises ConfigError: a trace not written,
        another call.
        """
        if self._program is not None:
            with self._alone("close", None) as program:
                self._program = None
                program.close()

    @property
    def load_seconds(self) -> float:
        """Total time to load methods."""
        return 0.0 if self._program is None else self._program.load_seconds

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, loaded on first use. Raises ArtifactError: it is missing or damaged."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.folder)
        return self._tokenizer

    def __call__(self, *args: torch.Tensor | float) -> Any:
        """Run a bundle of kind "module"; returns one tensor or a tuple. Numbers have to equal those of the example.
        Raises ConfigError: a decoder. ShapeError, DtypeError: the inputs differ from the exported ones.
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
        **sampling: Annotated[Any, SamplingSettings],
    ) -> Generated:
        """Continue a prompt.

        Greedy answers (``temperature=0``, the default) are deterministic. Sampled sequence i has its own generator with
        seed ``seed + i``. The prompt is read once; its KV cache is copied to the other sequences.

        Args:
            prompt: text, token ids, or messages of a chat (``{"role": ..., "content": ...}``) for the tokenizer's
                template.
            max_new_tokens: per sequence (default: as many as fit).
            num_return_sequences: at most ``manifest.lanes``.
            stream: called for every token. Its errors end the answer. It must not call this bundle.
            sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``repetition_penalty``, ``stop``: see
                :class:`torch_pi2.export.text.SamplingSettings`; None: from generation_config.json.

        Raises:
            ConfigError: the bundle is no decoder, an argument is invalid, or another call is running.
            ShapeError: the prompt is too long.
            ArtifactError: there is no tokenizer, or the store cannot be read.
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
            has_one = any((self.folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
            tokenizer = self.tokenizer if how.stop or self._tokenizer is not None or has_one else None
            how = how.with_defaults(self._sampling)
            asked = (seed, room, max_new_tokens, self.manifest.eos, ids, tokenizer, stream, how)
            answers = [_Answering(i, *asked) for i in range(count)]
            batch = min(b for b in self.manifest.batches if b >= count)
            sizes = [f"prefill_{n}" for n in self.manifest.prefills]
            for name in (*sizes, f"decode_b{batch}", *(["fork"] if count > 1 else [])):
                program.load(name)  # not during the answer
            steps: list[float] = []  # start times

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
        """Logits from position ``prompt - 1`` on, float32 ``[len(ids) - prompt + 1, V]``. The first ``prompt`` tokens
        are read at once. Raises ConfigError: no decoder, another call. ShapeError: too many tokens, none.
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
        """Statistics of the store since the last reset, summed over bundles that have it open.

        Returns:
            Fields of ``pi2_et_stats`` (``docs/BUNDLE.md``); ``hit_rate``: of needed neurons in the cache;
            ``wait_share``: share of layers' time spent waiting for reads. Both are None before the first call.
        """
        path = self.store.resolve()
        stores = [one for one in backend.stats(reset=reset)["stores"] if Path(one["path"]).resolve() == path]
        total = {**stores[0]} if stores else {}  # an entry for each combination of settings
        total |= {key: sum(one[key] for one in stores) for key, value in total.items() if isinstance(value, int)}
        wanted, busy = total.get("wanted", 0), total.get("busy_ns", 0)
        hit_rate, wait_share = (total["hits"] / wanted if wanted else None), (total["wait_ns"] / busy if busy else None)
        return {**total, "hit_rate": hit_rate, "wait_share": wait_share}

    @contextmanager
    def _alone(self, what: str, kind: str | None) -> "Iterator[Program]":
        """The program, for one call. Raises ConfigError: another one runs, or the bundle is not open or of ``kind``."""

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

    def _encode(self, prompt: Any, answer: int = 1) -> tuple[list[int], int]:
        """Tokens of ``prompt``, and the room for an answer. Raises ShapeError: less than ``answer``."""
        ids = encode(prompt, lambda: self.tokenizer, self.manifest.model.vocab or 0)
        room: int = self.manifest.max_tokens - len(ids)
        if room < answer:
            why = f"the bundle has room for {self.manifest.max_tokens}, answer included"
            expected = f"at most {self.manifest.max_tokens - answer} tokens: {why}"
            fix = "Shorten it, or export with a larger max_tokens."
            Field(ids, "prompt", fix, ShapeError).wrong(expected, str(len(ids)))
        return ids, room

    def _read(self, program: "Program", ids: list[int]) -> torch.Tensor:
        """Read ``ids`` into the first lane; returns logits ``[V]`` after the last one."""
        for name, start, count in self.manifest.pieces(len(ids)):
            piece, last = ids[start : start + count], []
            if name != "forward":  # the cache of padding is overwritten before it is read
                piece += piece[-1:] * (self.manifest.methods[name].max_tokens - count)
                last = [torch.tensor([count - 1])]
            logits_11V = program.call(name, torch.tensor([piece]), torch.tensor([start]), *last)[0]
        return _finite(logits_11V[0, -1])


def _decode(program: "Program", batch: int, lanes: Mapping[int, tuple[int, int]]) -> torch.Tensor:
    """Logits ``[N, V]`` after (token, position) of each lane."""
    # idle lanes get the token of a used one, which needs no further neurons; their cache is never read
    idle = next(iter(lanes.values()))
    rows = [lanes.get(lane, idle) for lane in range(batch)]
    ids_N1, positions_N1 = torch.tensor(rows).split(1, dim=1)
    logits_N1V = program.call(f"decode_b{batch}", ids_N1.contiguous(), positions_N1.contiguous())[0]
    _finite(logits_N1V[[*lanes]])
    return logits_N1V[:, 0]


class _Answering(GeneratedSequence):
    """A sequence in progress in lane ``number``, with its text; ``room``: tokens that fit, ``most``: of the caller."""

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
        return len(self.prompt) + len(self.tokens) - 1

    def choose(self, logits_V: torch.Tensor) -> int:
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
        return Answer(self.tokens, self.text, self.ended if self.ended in ("eos", "stop") else self._full)


def _finite(logits: torch.Tensor) -> torch.Tensor:
    """``logits``. Raises NonFiniteError."""
    if not torch.isfinite(logits).all():
        fix = "Check the model in PyTorch, then export again."
        Field(logits, "logits", fix, NonFiniteError).wrong("finite numbers", "NaN or infinity")
    return logits


def _cache_kib(manifest: Manifest, folder: Path, budget: int) -> int:
    """KiB of neuron cache within ``budget``. Raises ConfigError: none is left."""
    cache = budget - manifest.fixed_bytes
    if cache < 1024:
        argument(budget, f"budget for {folder}", "Give it more, or export with fewer tokens or batches.").wrong(
            f"more than {-(-manifest.fixed_bytes // 2**20)} MiB, which it takes without any neurons",
            f"{budget / 2**20:.0f} MiB",
        )
    if cache < min(manifest.token_bytes, manifest.ffn_bytes):
        log.warning(
            "%s: the cache of %.1f MiB holds less than the %.1f MiB of neurons that a token wants on average; much of "
            "it comes from flash for each token.",
            *(folder, cache / 2**20, manifest.token_bytes / 2**20),
        )
    return min(cache, manifest.store_bytes) // 1024


#: Options are global until a store is opened: one program at a time sets them.
_OPENING = threading.Lock()
#: ExecuTorch's codes of input dtypes.
_NUMBERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64)
_DTYPES: Mapping[int, torch.dtype] = {**dict(enumerate(_NUMBERS)), 11: torch.bool, 15: torch.bfloat16}


class Program:
    """The program in ``folder``; ``options`` of the delegate (None: default). Errors as in :class:`Bundle`."""

    def __init__(self, folder: Path, manifest: Manifest, options: Mapping[str, str | int | bool | None]) -> None:
        self.path, self.options, self.load_seconds = folder / PROGRAM_FILE, options, 0.0
        self._share_weights = manifest.model.linears == "float32"
        self._methods: dict[str, Any] = {}
        backend.load_library()
        made_by = manifest.made_by.get("executorch", "").partition("+")[0]
        if made_by not in ("", backend.EXECUTORCH):
            expected = f"one of ExecuTorch {backend.EXECUTORCH}, which is installed"
            Field(made_by, f"program of {folder}", "Export again.", VersionError).wrong(expected, made_by)
        if manifest.target.startswith("qnn:"):
            from torch_pi2.export.qnn import sdk

            sdk.load(sdk.find())
        from executorch.runtime import Runtime, Verification

        try:
            self._program: Any = Runtime.get().load_program(self.path, verification=Verification.InternalConsistency)
        except RuntimeError as error:
            raise _refused(str(self.path), "a program of ExecuTorch", error) from error

    def load(self, name: str) -> Any:
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
        """Outputs of a method. Raises ShapeError or DtypeError for wrong inputs, ArtifactError if it fails."""
        method = self.load(name)
        _check_inputs(f"{self.path.parent}, {name}", method.metadata, args)
        backend.clear_error()
        try:
            outputs: Sequence[torch.Tensor] = method.execute(args)
        except RuntimeError as error:
            raise self._failed(name, "a call that succeeds", error) from error
        return outputs

    def close(self) -> None:
        with _OPENING:
            backend.clear_error()
            self._methods.clear()
            self._program = None
            problem = backend.last_error()
        trace = self.options.get("trace")
        if trace and problem.startswith(f"trace {trace}: "):
            raise backend.delegate_error(problem)

    def _failed(self, name: str, expected: str, error: RuntimeError) -> Pi2Error:
        """Our delegate's message for ``error``, else ExecuTorch's."""
        problem = backend.last_error()
        return backend.delegate_error(problem) if problem else _refused(f"{self.path}, {name}", expected, error)


def _refused(what: str, expected: str, error: RuntimeError) -> ArtifactError:
    fix = "Its log on standard error says more; torch-pi2 inspect --verify BUNDLE finds damage."
    return ArtifactError(what, expected=expected, found=" ".join(str(error).split()) or type(error).__name__, fix=fix)


def _check_inputs(where: str, metadata: Any, args: Sequence[torch.Tensor | float]) -> None:
    """Name wrong inputs, for which ExecuTorch returns only a number."""
    if len(args) != metadata.num_inputs():
        fix = "Pass what was exported."
        raise ShapeError(where, expected=f"{metadata.num_inputs()} inputs", found=str(len(args)), fix=fix)
    for i, given in enumerate(args):
        try:
            about = metadata.input_tensor_meta(i)
        except IndexError:  # a number, compared by ExecuTorch
            continue
        name = f"{where}, input {i}"
        if not isinstance(given, torch.Tensor):
            raise DtypeError(name, expected="a tensor", found=type(given).__name__, fix="Convert it.")
        most, dtype = tuple(about.sizes()), _DTYPES.get(about.dtype())
        if dtype is not None and given.dtype != dtype:
            raise DtypeError(name, expected=str(dtype), found=str(given.dtype), fix="Convert it.")
        if given.dim() != len(most) or any(n > limit for n, limit in zip(given.shape, most)):
            fix = "Pass what was exported."
            raise ShapeError(name, expected=f"at most {list(most)}", found=str(list(given.shape)), fix=fix)
