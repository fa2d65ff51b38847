"""``Decoder``: decoding over a static KV cache, with each step as one graph.

Hugging Face's forward spends about 140 us per layer in Python, as long as a sparse layer of a small model takes.
Therefore a step's calls are recorded and replayed (:mod:`torch_pi2.decode.step_graph`), or compiled; Inductor leaves
our operators alone. :mod:`torch_pi2.decode.guards` notices when a step would make other calls.
"""

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import argument, checked
from torch_pi2.base.memory import keep_freed_memory
from torch_pi2.base.progress import log_once
from torch_pi2.decode import chunked_prefill
from torch_pi2.decode.attention import adds_masks, has_sinks, masks_of, packed_attention
from torch_pi2.decode.broadcast import announce, broadcast_call, check_coordinated, group_of
from torch_pi2.decode.budget import room_for_compiling
from torch_pi2.decode.guards import Guards
from torch_pi2.decode.kv_cache import ForgottenStates, KeyValues, States, cache_name, check_continued, of_another_dtype
from torch_pi2.decode.plan_controller import controller_of
from torch_pi2.decode.sequence import not_finite
from torch_pi2.decode.state_steps import fast_states
from torch_pi2.decode.step_graph import Forward, GraphRunner, StepGraph, captured, on_device, record, repeat
from torch_pi2.distributed.pipeline_parallel import without_logits
from torch_pi2.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedModelError
from torch_pi2.layers.gpu import device_of
from torch_pi2.layers.lazy import LazyDown
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.layers.of_model import homes, replacements
from torch_pi2.layers.prompt import called_with, chunks_of_prompt, single_steps
from torch_pi2.ops.constants import constants
from torch_pi2.profiling.data import last_token
from torch_pi2.rewrite.state import ModelState, store_of

#: Maximum tokens of :meth:`Decoder.verify`: from 12 on, layers with int8 activations may have other last bits.
VERIFIED = 8

#: Tokens from which the mean of keys is taken, and positions over which they are spread: not ``max_tokens``, on which
#: results would then depend.
_MEASURED, _SPAN = 64, 4096

#: Inductor settings of a step. Size asserts cost more than the small kernels between our operators, and waking a second
#: thread takes longer than running one. Freezing would copy the weights.
_OFF = ("freezing", "size_asserts", "alignment_asserts", "scalar_asserts", "cpp.dynamic_threads")
_INDUCTOR = {**dict.fromkeys(_OFF, False), "cpp.threads": 1}


def _check_ids(ids_BT: torch.Tensor, what: str) -> None:
    is_tensor = isinstance(ids_BT, torch.Tensor)
    if not is_tensor or ids_BT.dim() != 2:
        found = str(list(ids_BT.shape)) if is_tensor else f"a {type(ids_BT).__name__}"
        raise ShapeError(what, expected="a tensor of ids [B, T]", found=found, fix="A row for each sequence.")
    if ids_BT.is_floating_point() or ids_BT.is_complex() or ids_BT.dtype is torch.bool:
        raise DtypeError(what, expected="integer token ids", found=dtype_name(ids_BT.dtype), fix="Tokenise the text.")


def check_vocabulary(model: nn.Module, input_ids: torch.Tensor, what: str = "input_ids") -> None:
    """Raises ConfigError: an id is not in the vocabulary of ``model``. UnsupportedModelError: it does not name one."""
    table: Any = model.get_input_embeddings()  # type: ignore[operator]
    if (vocab := getattr(table, "num_embeddings", None)) is None:  # e.g. tokens that PEFT trains
        expected, fix = "a table with num_embeddings", "Call model.generate, or merge adapters first."
        what = f"the input embeddings of {type(model).__name__}"
        raise UnsupportedModelError(what, expected=expected, found=type(table).__name__, fix=fix)
    wrong = input_ids[(input_ids < 0) | (input_ids >= vocab)]
    if wrong.numel():
        found = f"the token {int(wrong[0])}"
        fix = "Use the tokenizer of this model."
        argument(wrong, what, fix).wrong(f"tokens of 0 to {vocab - 1}, the model's vocabulary", found)


def _checked(result_BN: torch.Tensor) -> torch.Tensor:
    """Tokens, or logits. Raises NonFiniteError: one has no token, or each row's logits are NaN."""
    # NaN in a hidden state makes all logits NaN; of several sequences those that are fine can go on
    bad = result_BN[:, 0].isnan().all() if result_BN.is_floating_point() else (result_BN < 0).any()
    if bad:
        raise not_finite()
    return result_BN


class Decoder:
    """Greedy continuation of prompts, or of one prompt by several sequences (:meth:`fork`).

    Each step is one forward for all sequences, which reads the weights once. Sequences can be added (:meth:`add`) and
    dropped (:meth:`retain`) between steps; a model that follows a plan (:func:`torch_pi2.follow`) adapts to the number.

    Steps are recorded if all code that runs in them is PyTorch's, transformers' or this package's. Other attention,
    unless it looks its kernel up in transformers' registry, gets a cache that grows, for sequences of one length.
    Between a prompt and the last step that continues it, the model must not be moved or converted. Other changes are
    heeded from the next step on: new values of tensors, other attributes of modules, lists, mappings, classes,
    functions and registries (configurations: at the next prompt). As a check, the model itself makes the first step
    after each prompt and every 64th; their calls must be the recorded ones. Compiled steps are not checked.

    Args:
        model: a Hugging Face causal language model, dense or optimised, in evaluation mode; on the CPU, on a GPU, or
            divided between them (then steps are not recorded). On a GPU, recorded steps and compiled ones of optimised
            models become CUDA graphs. Ids may be on any device; results are on the model's.
        max_tokens: size of the KV cache, prompt and answer together.
        batch: maximum number of sequences decoded together.
        backend: for ``compiled``. ``torch_pi2`` merges linear layers with the same input into one call.
        compiled: run each step through Inductor. The first step of each number of sequences is compiled: a second per
            layer, or 2 to 5 s in all from Inductor's disk cache; counters see that step twice more. Lossless except for
            rounding: Inductor keeps float32 between fused operations. Steps that hooks see, or that cannot be recorded,
            are not compiled. Default: steps are recorded and replayed, which keeps the model's bits, needs no compiler,
            and gains almost as much.
        logits: :meth:`prompt` and :meth:`step` return the logits ``[B, V]`` of the next token, for sampling, instead of
            the most likely token.
        recorded: record steps also if they run other code, such as a model's own file. This is right only if that code
            makes the same calls in every step: its counters, random numbers and branches keep the values that they had
            when it was recorded. False: record and compile nothing. None: record known code.
        chunk_tokens: read longer prompts in equal chunks of at most this many tokens. This limits the memory for
            activations, and keeps them in the CPU's caches. Feed-forward layers take the path of the whole prompt:
            lossless except for the rounding of PyTorch's products, and of ours in chunks of fewer than 12 tokens. 0:
            automatic. Over a store, chunks have as many tokens as the budget allows (``Budget.piece_tokens``). In
            memory they have 256 if that is lossless, when every product is ours with int8 activations (AVX-512 VNNI);
            otherwise the prompt is read whole, as is one beyond the trained length if rotary frequencies depend on the
            length (longrope, dynamic NTK).
        kv: keep keys and values in ``int8`` or ``int4`` (lossy; docs/REAL.md has the loss), rotated as QuaRot does
            (arXiv 2404.00456), keys without what they share, with a scale for each head and token, or for 32 of its
            numbers. 64 tokens are read once before the first prompt to find that. On the CPU, for
            attention that is ours (see :meth:`verify`). None: in the model's dtype.

    Attributes:
        batch: sequences decoded now. lengths: tokens of each. length: of the longest.
        cache: a ``StaticCache``. compiled: whether steps are. took_longer: whether a step was recorded, or compared
            with the recorded one, since this was False.

    Raises:
        UnsupportedModelError: the model's cache cannot be static, it has an encoder, or (by :meth:`prompt`) it does not
            use the cache; (by :meth:`verify`, :meth:`rollback` and :meth:`copy_kv`) it has recurrent states.
        ConfigError: the model's table of positions is shorter than ``max_tokens``.
        NonFiniteError: (by :meth:`prompt` and :meth:`step`) a sequence has no finite logits, or none of all has with
            ``logits``: float16 overflows.
        ShapeError: (by methods) a prompt or step does not fit, or no prompt has been read.
        DeviceError: the model is on several GPUs, or (by methods that read a prompt) has been moved since.
        DtypeError: (by methods that read a prompt) the model has been converted since.
    """

    #: Its id in the other processes, if a coordinator broadcasts its calls (:func:`torch_pi2.lead`).
    number: int | None = None

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        batch: int = 1,
        backend: str | Callable[..., Any] = "torch_pi2",
        compiled: bool = False,
        logits: bool = False,
        recorded: bool | None = None,
        chunk_tokens: int = 0,
        kv: str | None = None,
    ) -> None:
        settings = {name: value for name, value in locals().items() if name not in ("self", "model")}
        if not callable(backend) and backend != "torch_pi2":  # listing them imports Dynamo
            argument(backend, "Decoder(backend)").text(torch._dynamo.list_backends(exclude_tags=()))
        chunked_prefill.check_kv(model, kv)
        if max_tokens < 2 or batch < 1:
            fix = "max_tokens is the length of prompt and answer together."
            raise ConfigError("max_tokens, batch", expected="at least 2 and 1", found=f"{max_tokens}, {batch}", fix=fix)
        if max_tokens > (most := chunked_prefill.most_positions(model)):
            argument(max_tokens, "tokens of prompt and answer", "Ask for fewer, or shorten the prompt.").wrong(
                f"at most {most}: {type(model).__name__} has a table of so many positions", str(max_tokens)
            )
        self.model, self.max_tokens, self.batch, self.rows = model, max_tokens, batch, batch
        self.lengths, self.logits, self.chunk_tokens = list[int](), logits, chunk_tokens
        self.device, self.compiled, self.recorded = device_of(model), compiled and recorded is not False, recorded
        self._dtype = getattr(model, "dtype", None)
        if grows := recorded is not True and chunked_prefill.attends_itself(model):
            self.compiled, self.recorded = False, False
        self._inspect_model()
        self._grows, self._kv = grows, KeyValues(model, max_tokens, batch, self.device, grows, kv)
        #: Whether prompts can go on after tokens that were read before: until a chunk does not use the states of the
        #: one before it, which other stages would not notice.
        self.continues = not (self._kv.states and (group := group_of(model)) is not None and group.divides_kv)
        self.cache: Any = None
        self._measured = kv is None or has_sinks(model)  # a sink's score has nothing in common with the others
        self._cache_name = cache_name(model)
        self._backend = backend
        #: Compiled and recorded steps, by number of sequences, number of tokens, and whether it is a verifying pass.
        self._compiled_steps: dict[tuple[int, int, bool], Forward] = {}
        self._runners: dict[tuple[int, int, bool], GraphRunner] = {}
        self._autocast = False  # as of the last prompt
        self.took_longer = False
        self._guards, self._compiles = Guards(any_code=recorded is True), self.compiled
        #: The row whose prompt :meth:`add` is reading, and its chunks.
        self._adding: int | None = None
        self._chunks: Generator[int] | None = None
        announce(self, **settings)

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def _inspect_model(self) -> None:
        device = device_of(self.model)
        if device != self.device:
            what = f"Decoder of {type(self.model).__name__}"
            expected, found = f"the model on {self.device}, where keys and values are", f"it on {device}"
            raise DeviceError(what, expected=expected, found=found, fix="Make another Decoder after moving a model.")
        if (dtype := getattr(self.model, "dtype", None)) != self._dtype:
            what = f"Decoder of {type(self.model).__name__}"
            expected, found = f"the model in {self._dtype}, as keys and values are", f"it in {dtype}"
            raise DtypeError(what, expected=expected, found=found, fix="Make another Decoder after converting a model.")
        self._divided = any(home.split is not None for home in homes(self.model))
        self._lazy = any(isinstance(part, LazyDown) for _, part in replacements(self.model))
        if self.compiled and self._divided:
            what = f"Decoder of {type(self.model).__name__}, compiled"
            found = "layers that are divided between a GPU and the CPU, which no compiler can order"
            fix = "Leave compiled out (compiled=False, or no --compile)."
            raise ConfigError(what, expected="a model that is on one device as a whole", found=found, fix=fix)
        handle = ModelState.of(self.model)
        budget = None if handle is None else handle.budget
        keep_freed_memory()
        limit = 0 if self.chunk_tokens else None if budget is None else budget.piece_tokens
        self._chunk_limit = chunked_prefill.lossless_chunk_tokens(self.model) if limit is None else limit
        self._least_tokens = chunked_prefill.LEAST_TOKENS if budget is None else 1
        self._short_chunks = self._chunk_limit > 0 and budget is None
        self._positions = chunked_prefill.takes_several_lengths(self.model, self.max_tokens)
        self._same_frequencies = chunked_prefill.same_frequencies_up_to(self.model)

    def _inputs(self, ids_BT: torch.Tensor) -> dict[str, Any]:
        cache = self._kv.growing(slice(len(ids_BT)), self.length) if self._grows else self.cache
        inputs = {"input_ids": ids_BT, self._cache_name: cache, "use_cache": True}
        if self._positions and self._kv.has_attention:
            batch, tokens = ids_BT.shape
            positions_BT = self._kv.lengths[:batch, None] + torch.arange(tokens, device=self.device)
            config, dtype = self.model.config, cast(torch.dtype, self.model.dtype)
            masks = masks_of(config, positions_BT, self.max_tokens, dtype if adds_masks(config) else torch.bool)
            inputs |= {"position_ids": positions_BT, "attention_mask": masks}
        return inputs

    def _answer(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BTV[:, -1]
        if self.logits:
            return logits_BV
        best_B1 = logits_BV.argmax(-1, keepdim=True)  # NaN is the largest
        return torch.where(logits_BV.gather(-1, best_B1).isfinite(), best_B1, -1)

    def _steps_of_states(self) -> AbstractContextManager[None]:
        return fast_states(self.model) if self._kv.states else nullcontext()

    def _forward(self, ids_BT: torch.Tensor, of_each: bool) -> torch.Tensor:
        """Next tokens or logits; ``of_each``: logits ``[T, V]`` of all tokens, each computed as if it came alone."""
        choices = called_with(choices=self._kv.choices(slice(len(ids_BT)), reading=False))
        with (
            packed_attention(self.model),
            self._steps_of_states(),
            single_steps() if of_each else nullcontext(),
            choices,
        ):
            if of_each:
                return self.model(**self._inputs(ids_BT)).logits[0]
            return self._answer(self.model(**self._inputs(ids_BT), logits_to_keep=1).logits)

    @broadcast_call
    @torch.inference_mode()
    def prompt(self, ids_BT: torch.Tensor, known: int = 0) -> torch.Tensor:
        """Forget all sequences, read prompts (int64 ``[B, T]``) and return the next tokens ``[B, 1]``.

        ``known``: number of first tokens that the only sequence already has and that are not read again, for the next
        question of a conversation. This is as lossless as chunks of a prompt are (tokens fed by steps keep the bits of
        steps). The last 12 tokens are always read: fewer would take another path through layers with int8 activations.
        """
        _check_ids(ids_BT, "prompt")
        check_vocabulary(self.model, ids_BT, "prompt")
        self._check_not_adding("prompt")
        batch, tokens = ids_BT.shape
        if not (1 <= batch <= self.rows and 1 <= tokens <= self.max_tokens):
            rows = f"1 to {self.rows}" if self.rows > 1 else "1"
            fix = "Shorten it, or make a Decoder for this batch and length."
            expected = f"[{rows}, 1 to {self.max_tokens}]"
            raise ShapeError("prompt", expected=expected, found=str(list(ids_BT.shape)), fix=fix)
        if known and not (len(self.lengths) == batch == 1 and 0 < known <= self.length and known < tokens):
            expected = f"0, or one prompt of more tokens and one sequence that has so many (now {self.lengths})"
            fix = "Read it whole."
            raise ShapeError("prompt(known=...)", expected=expected, found=f"{known} of {list(ids_BT.shape)}", fix=fix)
        self._check_same("prompt", ids_BT)
        if self._kv.states and known != self.length:  # states of fewer tokens are gone
            known = 0
        self._set_lengths([])  # whatever happens below, earlier sequences are gone
        return self._read(ids_BT, known)

    def _read(self, ids_BT: torch.Tensor, known: int) -> torch.Tensor:
        rows, tokens = ids_BT.shape
        self._inspect_model()
        ids_BT = ids_BT.to(self.device)
        self._measure_keys()
        known = self._reusable(known, tokens)
        self._use(rows)
        self._announce_batch(rows)  # after the KV cache has released memory, and before it wants any
        most = (self._chunk_of(rows) if tokens <= self._same_frequencies else 0) or tokens
        try:
            try:
                result = self._read_from(ids_BT, known, most)
            except ForgottenStates:
                self.continues = False
                result = self._read_from(ids_BT, 0, tokens)
            self._kv.check_used(self.model)
        except BaseException:
            self._use(1)
            raise
        self._kv.lengths[:rows].fill_(tokens)
        self._set_lengths([tokens] * rows)
        self.cache = self._kv.stepping(rows)
        self._forget_changed()
        return result

    def _measure_keys(self) -> None:
        """Before the first prompt with quantised keys: read a few tokens, all over the positions."""
        measured, self._measured = self._measured, True
        if measured or not self._kv.has_attention:
            return
        table: Any = self.model.get_input_embeddings()  # type: ignore[operator]

        def read(cache: Any, places_1T: torch.Tensor) -> None:
            inputs = {"position_ids": places_1T} if self._positions else {}
            ids_1T = torch.arange(places_1T.shape[1])[None] * table.num_embeddings // places_1T.shape[1]
            with packed_attention(self.model), self._steps_of_states(), chunks_of_prompt(ids_1T.shape[1]):
                self.model(input_ids=ids_1T, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}, **inputs)

        span = min(_SPAN, chunked_prefill.most_positions(self.model), self._same_frequencies or _MEASURED)
        places = min(_MEASURED, span)
        self._kv.measure_keys(self.model, read, torch.arange(places)[None] * (span // places))

    def _read_from(self, ids_BT: torch.Tensor, at: int, most: int) -> torch.Tensor:
        rows, tokens = ids_BT.shape
        cache = self._kv.reading(0, rows, tokens, at)
        # chunks of equal length: a short one at the end might be taken for a step
        *others, last_BT = ids_BT[:, at:].tensor_split(-(-(tokens - at) // most), 1)
        for chunk_BT in others:
            self._read_chunk(chunk_BT, cache, rows * tokens, at, without_logits())
            at += chunk_BT.shape[1]
        return _checked(self._read_chunk(last_BT, cache, rows * tokens, at))

    def add(
        self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]] = (), states: States | None = None
    ) -> Iterator[int]:
        """Read the prompt of one more sequence, int64 ``[1, T]``, in chunks; steps may run in between.

        Yields the number of tokens left after each chunk. Afterwards the sequence is the last row, ``batch`` - 1, with
        all tokens but the last, which the next step has to feed. The result does not depend on the other sequences,
        which continue if this fails or is closed. While there are others, chunks are short if that is lossless.
        ``known``: keys and values of the first tokens, from :meth:`copy_kv`, part by part, which are not read again,
        except up to 12 before the last if unknown ones follow (:meth:`prompt`). ``states``: recurrent states after
        these tokens, from :meth:`copy_states`. Raises UnsupportedModelError: the model cannot have sequences of
        different lengths.
        """
        _check_ids(ids_1T, "add")
        check_vocabulary(self.model, ids_1T, "add")
        self._check_not_adding("add")
        self._inspect_model()
        if len(self.lengths) == self.rows or len(ids_1T) != 1 or not 1 <= ids_1T.shape[1] < self.max_tokens:
            expected = f"[1, 1 to {self.max_tokens - 1}] while there are fewer than {self.rows} sequences"
            found = f"{list(ids_1T.shape)} beside {len(self.lengths)}"
            fix = "Drop others first (retain), or make a Decoder for more."
            raise ShapeError("add", expected=expected, found=found, fix=fix)
        cached = sum(part[0].shape[1] for part in known)
        if states is not None and not self._kv.has_attention:
            cached = states[0]
        if cached > ids_1T.shape[1] or (cached and self.has_states and (states is None or states[0] != cached)):
            expected = f"keys and values (and recurrent states) of the first tokens, at most {ids_1T.shape[1]}"
            found = f"those of {cached}" + ("" if states is None else f" and states after {states[0]}")
            fix = "Leave out what the prompt does not begin with."
            raise ShapeError("add(known=...)", expected=expected, found=found, fix=fix)
        if self.lengths and not self._positions:
            takes = "takes position_ids, uses sdpa, and has rotary frequencies that do not depend on the length"
            what, expected = type(self.model).__name__, f"a model that {takes}, to decode sequences of several lengths"
            fix = "Load it with attn_implementation='sdpa', or decode one after another."
            raise UnsupportedModelError(what, expected=expected, found="another", fix=fix)
        return self._add_by_chunks(ids_1T, known, states)

    def _add_by_chunks(
        self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]], states: States | None
    ) -> Iterator[int]:
        """Each chunk is a separate call, which can be broadcast."""
        self.begin_add(ids_1T, known, states)
        try:
            while (left := self.next_chunk()) is not None:
                yield left
        finally:
            self.end_add()

    @broadcast_call
    def begin_add(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]], states: States | None) -> None:
        """Part of :meth:`add`, which has checked the arguments."""
        self._check_not_adding("add")  # another may have begun since
        if (group := group_of(self.model)) is not None:
            check_coordinated(group)
        self._inspect_model()
        self._chunks = self._read_chunks(ids_1T.to(self.device), known, states)

    @broadcast_call
    @torch.inference_mode()
    def next_chunk(self) -> int | None:
        """Read a chunk; returns how many tokens are left, None once the sequence has been added."""
        return None if self._chunks is None else next(self._chunks, None)

    @broadcast_call
    @torch.inference_mode()
    def end_add(self) -> None:
        chunks, self._chunks = self._chunks, None
        if chunks is not None:
            chunks.close()

    def _read_chunks(
        self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]], states: States | None
    ) -> Generator[int]:
        fed = ids_1T.shape[1] - 1
        tokens = max(1, fed)  # one in any case, which allocates keys and values
        row = self._adding = len(self.lengths)
        try:
            self._measure_keys()
            at = 0
            for part in known:
                self._kv.check_copied(part)
                self._kv.put(row, at, part)
                at += part[0].shape[1]
            if states is not None:
                at = states[0]
                self._kv.put_states(row, states[1])
            at = at if at == fed > 0 else self._reusable(at, tokens)
            cache = self._kv.reading(row, 1, tokens, at)
            while left := tokens - at:
                self._announce_batch(row + 1)
                most = self._least_tokens if self.lengths and self._short_chunks else self._chunk_of(1)
                most = most if most and tokens <= self._same_frequencies else tokens
                size = -(-left // -(-left // most))  # as tensor_split has it
                try:
                    self._read_chunk(ids_1T[:, at : at + size], cache, tokens, at, without_logits())
                except ForgottenStates:
                    self.continues, at, cache = False, 0, self._kv.reading(row, 1, tokens)
                    continue
                at += size
                yield tokens - at
            self._kv.check_used(self.model)
            if not fed:
                self._kv.clear_states(row)
            new = len(self.lengths)  # some may have been dropped
            self._kv.lengths[row].fill_(fed)
            if new != row:
                self._kv.copy_row(row, new)
            self._set_lengths([*self.lengths, fed])
            self._use(new + 1)
            self.cache = self._kv.stepping(new + 1)
            self._forget_changed()
        finally:
            self._adding = None
            self._release_memory()

    def _reusable(self, known: int, tokens: int) -> int:
        """How many of ``known`` tokens have the bits that reading the whole prompt would give."""
        if tokens > self._same_frequencies:  # which then depend on the length of a call
            return 0
        if self._kv.states:  # of all known tokens or of none
            return known if self.continues and tokens - known >= constants().gemm_tokens else 0
        return max(0, min(known, tokens - constants().gemm_tokens))

    def _chunk_of(self, rows: int) -> int:
        """Maximum tokens of each of ``rows`` sequences in a chunk; 0: no limit."""
        if not self.continues:
            return 0
        return max(self._least_tokens, self._chunk_limit // rows) if self._chunk_limit else self.chunk_tokens

    def _read_chunk(
        self, ids_BT: torch.Tensor, cache: Any, of_tokens: int, at: int, how: AbstractContextManager[None] | None = None
    ) -> torch.Tensor:
        """Read a part of prompts with ``of_tokens`` in all, from token ``at`` on; returns what comes next."""
        inputs: dict[str, Any] = {self._cache_name: cache}
        watch: AbstractContextManager[None] = nullcontext()
        if at and self._kv.states:
            watch = check_continued(cache)
            if self._positions and self._kv.has_attention:  # Bamba would count from 0 again
                inputs["position_ids"] = torch.arange(at, at + ids_BT.shape[1], device=self.device).expand_as(ids_BT)
        where = on_device(self.device), packed_attention(self.model), self._steps_of_states()
        first = self._adding or 0
        choices = called_with(choices=self._kv.choices(slice(first, first + len(ids_BT)), reading=True))
        with where[0], where[1], where[2], choices, chunks_of_prompt(of_tokens), how or nullcontext(), watch:
            output = self.model(input_ids=ids_BT, use_cache=True, logits_to_keep=last_token(ids_BT), **inputs)
        return self._answer(output.logits)

    def copy_kv(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Copy keys and values of the tokens from ``first`` to ``last`` (exclusive) of a row, for :meth:`add`."""
        if not (0 <= row < len(self.lengths) and 0 <= first < last <= self.lengths[row]):
            expected = f"tokens, 1 or more, of a sequence that there is (now {self.lengths})"
            found = f"{first} to {last} of row {row}"
            raise ShapeError("copy_kv", expected=expected, found=found, fix="Name tokens that were read or fed.")
        self._check_all_here("copy_kv")
        return self._kv.copied(row, first, last)

    def copy_states(self, row: int) -> States:
        """Copies of the recurrent states of a row after all of its tokens, and their number, for :meth:`add`."""
        self._check_all_here("copy_states")
        return self.lengths[row], self._kv.copied_states(row)

    def _check_all_here(self, what: str) -> None:
        if (group := group_of(self.model)) is not None and group.divides_kv:
            expected, fix = "all keys, values and states here", "Read prompts whole."
            raise UnsupportedModelError(what, expected=expected, found="those of a stage", fix=fix)

    @broadcast_call
    @torch.inference_mode()
    def step(self, next_B1: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence, int64 ``[B, 1]``; returns the next ones.

        A failed step can be repeated, unless the model has recurrent states: then its sequences are gone.
        """
        self._check_read("decoding step")
        _check_ids(next_B1, "decoding step")
        if self.length >= self.max_tokens or next_B1.shape != (self.batch, 1):
            expected = f"[{self.batch}, 1] and fewer than {self.max_tokens} tokens before it"
            found = f"{list(next_B1.shape)} after {self.length} tokens"
            fix = "Ask for fewer tokens, or make a Decoder with more max_tokens, or for this batch."
            raise ShapeError("decoding step", expected=expected, found=found, fix=fix)
        return self._feed(next_B1)

    @broadcast_call
    @torch.inference_mode()
    def verify(self, ids_1T: torch.Tensor) -> torch.Tensor:
        """Feed up to 8 tokens of the only sequence at once, int64 ``[1, T]``; returns logits ``[T, V]``.

        Row t predicts the token after the first t + 1. The weights are read once for all tokens. :meth:`rollback`
        undoes tokens that turn out to be wrong.

        Row t has the bits of :meth:`step` (with ``logits``, both compiled or both not) if linear layers, head and
        feed-forward layers are ours (``weights="int4"`` or ``"int8"``) and so is attention, which it is in place of
        transformers' ``sdpa`` without soft caps and the like (:mod:`torch_pi2.decode.attention`). PyTorch's float
        products and attention of several tokens have other last bits than those of one. Each number of tokens compiles
        to a separate graph; that Inductor rounds alike in all of them is tested, but it does not promise so. Rotary
        frequencies that depend on the length (:attr:`room_to_verify`) are those of the last token.
        """
        self.check_parts("verify")
        self._check_read("verify")
        _check_ids(ids_1T, "verify")
        tokens = ids_1T.shape[1]
        if self.batch != 1 or len(ids_1T) != 1 or not 1 <= tokens <= min(VERIFIED, self.max_tokens - self.length):
            expected = f"[1, 1 to {VERIFIED}] for one sequence, and at most {self.max_tokens} tokens in all"
            found = f"{list(ids_1T.shape)} for {self.batch} after {self.length} tokens"
            fix = "Verify fewer tokens, or make a Decoder with more max_tokens."
            raise ShapeError("verify", expected=expected, found=found, fix=fix)
        return self._feed(ids_1T, of_each=True)

    def compile_passes(self, tokens: int) -> None:
        """After a prompt: compile :meth:`verify` for this many tokens now, unless that has been done."""
        if self.compiled and (1, tokens, True) not in self._compiled_steps and self.length + tokens <= self.max_tokens:
            self.verify(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
            self.rollback(tokens)

    def _feed(self, ids_BT: torch.Tensor, of_each: bool = False) -> torch.Tensor:
        """:meth:`_forward` of the next tokens, recorded or compiled. A failure leaves the sequences as they were, or
        drops them if they have recurrent states.
        """
        group = group_of(self.model)
        on_gpu = self.device.type != "cpu" and ids_BT.device.type == "cpu"
        if on_gpu or group is not None:  # a wrong token would break CUDA, or end the group
            check_vocabulary(self.model, ids_BT, "token")
        if group is not None:
            check_coordinated(group)
        ids_BT = ids_BT.to(self.device, torch.int64).contiguous()  # compiled code would not notice another layout
        self._announce_batch(self.batch)
        if torch.is_autocast_enabled(self.device.type) != self._autocast:  # recorded steps would not heed it
            raise of_another_dtype("torch.autocast " + ("on" if self._autocast else "off"), "the opposite")
        stable = self._compiled_steps or any(runner.is_stable for runner in self._runners.values())
        if stable and not self._guards.hold(self.model):
            self._forget()
            self._compiles = False  # until the next prompt: the model may change again
        try:
            with on_device(self.device), nullcontext() if group is None else group.together():
                run = self._compiled_steps.get((self.batch, ids_BT.shape[1], of_each))
                if run is not None:
                    result: torch.Tensor = run(ids_BT)
                elif self._compiles:
                    result = self._compile_and_run(ids_BT, of_each)
                else:
                    result = self._runner(ids_BT, of_each)(ids_BT)
                _checked(result)
        except BaseException:
            if self._kv.states:  # those of some layers may have changed
                self._set_lengths([])
            check_vocabulary(self.model, ids_BT, "token")  # may be the cause, which other errors do not name
            raise
        self._lengthen(ids_BT.shape[1])
        runner = self._runners.get((self.batch, ids_BT.shape[1], of_each))
        self.took_longer |= runner is not None and runner.took_longer
        return result

    @broadcast_call
    @torch.inference_mode()
    def rollback(self, tokens: int) -> None:
        """Forget the last ``tokens`` of each sequence: the next ones take their place."""
        tokens = argument(tokens, "rollback(tokens)").whole()
        if tokens:
            self.check_parts("rollback")
        least = min(self.lengths, default=0)
        if tokens >= max(1, least):
            expected = f"0 to {max(0, least - 1)} tokens, of {least} that were read"
            raise ShapeError("rollback", expected=expected, found=str(tokens), fix="Read another prompt instead.")
        self._lengthen(-tokens)

    @broadcast_call
    @torch.inference_mode()
    def fork(self, sequences: int) -> None:
        """Continue the only sequence as this many: its keys and values are copied."""
        self._check_read("fork")
        self._check_not_adding("fork")
        if self.batch != 1 or not 1 <= sequences <= self.rows:
            fix = "Make a Decoder with a larger batch, and read one prompt."
            expected = f"1 to {self.rows} sequences from 1"
            raise ShapeError("fork", expected=expected, found=f"{sequences} from {self.batch}", fix=fix)
        self._announce_batch(sequences)  # so that the neuron cache shrinks before keys and values grow
        for row in range(1, sequences):
            self._kv.copy_row(0, row)
        self._set_lengths(self.lengths * sequences)
        self._use(sequences)

    @broadcast_call
    @torch.inference_mode()
    def retain(self, rows: Sequence[int]) -> list[int]:
        """Continue only the sequences in ``rows``; the last of them move into the rows that become free. Returns the
        row in which each new row was. Over a store, unused memory of keys and values goes back to the system.
        """
        kept = sorted(set(rows))
        if not kept:
            self._set_lengths([])
            return []
        self._check_read("retain")
        if kept[0] < 0 or kept[-1] >= self.batch:
            fix = "Name the rows of sequences that go on."
            expected = f"rows from 0 to {self.batch - 1}"
            raise ShapeError("retain", expected=expected, found=", ".join(map(str, rows)), fix=fix)
        came_from = list(range(len(kept)))
        free = [row for row in came_from if row not in kept]
        for row, last in zip(free, reversed(kept)):
            self._kv.copy_row(last, row)
            came_from[row] = last
        self._set_lengths([self.lengths[row] for row in came_from])
        self._use(len(kept))
        return came_from

    @broadcast_call
    @torch.inference_mode()
    def clear_cache(self) -> None:
        """Forget all sequences, and return the memory of keys and values to the system (a GPU keeps it)."""
        self._set_lengths([])
        self._kv.give_back(0)

    def detach(self) -> None:
        """:meth:`clear_cache`, and drop the reference to the model, which owns a pool of these; see :meth:`attach`."""
        self.clear_cache()
        self._guards.rest()
        self._detached = weakref.ref(self.model)
        del self.model

    def attach(self, model: nn.Module) -> bool:
        """Undo :meth:`detach`, if this is the same model."""
        if self._detached() is not model:
            return False
        self.model = model
        return True

    @property
    def has_states(self) -> bool:
        """Whether the model has recurrent states."""
        return bool(self._kv.states)

    def check_parts(self, what: str) -> None:
        """Raises UnsupportedModelError: recurrent states have no parts to take back or keep."""
        if self._kv.states:
            found = "neurons chosen by prompt" if self._kv.choosers else "recurrent states, which each token changes"
            what, expected = f"{what} of {type(self.model).__name__}", "keys and values of each token, to take back"
            fix = "Decode without drafts (prompt_lookup, assistant_model), and read prompts whole."
            raise UnsupportedModelError(what, expected=expected, found=found, fix=fix)

    @property
    def room_to_verify(self) -> int:
        """Tokens that :meth:`verify` may feed: beyond them rotary frequencies depend on how many there are."""
        return min(VERIFIED, self.max_tokens - self.length, self._same_frequencies - self.length)

    def passes_are_steps(self) -> bool:
        """Whether :meth:`verify` has the bits of steps, and reads all weights from memory."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        ours = not (self.compiled or self._kv.states or self.is_hooked()) and group_of(self.model) is None
        ours = ours and store_of(self.model) is None and isinstance(head, QuantLinear)
        return ours and chunked_prefill.lossless_chunk_tokens(self.model) > 0

    def is_hooked(self) -> bool:
        hooks = (h for m in self.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        # transformers leaves hooks on modules once it was asked for the outputs of layers: they do nothing now
        idle = "transformers.utils.output_capturing"
        own = any(getattr(hook, "__module__", None) != idle for hook in hooks)
        return own or nn.modules.module._has_any_global_hook()

    def agreed(self, numbers: list[int]) -> list[int]:
        """``numbers`` of the first process that computes the model; all processes pass the same count."""
        group = group_of(self.model)
        if group is None or group.coordinated:
            return numbers
        with group.together():
            first: list[int] = group.broadcast(torch.tensor(numbers, dtype=torch.int64, device="cpu"), 0).tolist()
        return first

    def _check_same(self, what: str, ids_BT: torch.Tensor) -> None:
        """Raises ConfigError unless all processes that compute the model have the same settings and tokens."""
        group = group_of(self.model)
        if group is None:
            return
        check_coordinated(group)
        if not group.coordinated:
            # compiling runs a step twice more, which a process that only records does not
            settings = self.max_tokens, self.rows, self.chunk_tokens, self.compiled
            group.check_same(what, (settings, ids_BT.shape, ids_BT.tolist()))

    def _check_read(self, what: str) -> None:
        if not self.lengths:
            fix = "Call prompt(ids) first; it returns the token to begin with."
            raise ShapeError(what, expected="a prompt before it", found="none that was read to its end", fix=fix)

    def _check_not_adding(self, what: str) -> None:
        if self._adding is not None:
            expected, fix = "no sequence whose prompt is being read", "Iterate over add(...) to its end, or close() it."
            raise ShapeError(what, expected=expected, found="one that is being added", fix=fix)

    def _lengthen(self, tokens: int) -> None:
        lengths = [length + tokens for length in self.lengths]
        self._kv.add(tokens, lengths)
        self._set_lengths(lengths)

    def _set_lengths(self, lengths: list[int]) -> None:
        self.lengths = lengths
        if (store := store_of(self.model)) is not None:
            store.check_context(self, sum(lengths))

    def _use(self, batch: int) -> None:
        fewer, self.batch = batch < self.batch, batch
        if self.cache is not None:  # there are keys and values
            self.cache = self._kv.stepping(batch)
            if fewer:
                self._release_memory()

    def _release_memory(self) -> None:
        """Over a store: return the memory of unused rows to the system."""
        if store_of(self.model) is not None:
            self._kv.give_back(self.batch if self._adding is None else self._adding + 1)

    def _announce_batch(self, batch: int) -> None:
        engine = controller_of(self.model)
        if engine is not None:
            engine.batch(batch)

    def __reduce__(self) -> Any:
        raise TypeError("a Decoder is neither copied nor pickled: make another one of its model")

    def _forget_changed(self) -> None:
        """Another answer begins: drop recorded and compiled steps if the model or its code has changed."""
        autocast = torch.is_autocast_enabled(self.device.type)
        if autocast != self._autocast:
            self._autocast = autocast
            self._forget()
        retry = self._guards.unknown is not None
        if not self._guards.renew(self.model):
            self._forget()
        self._compiles = self.compiled
        for runner in self._runners.values():
            runner.begin(retry)

    def _forget(self) -> None:
        self._compiled_steps = {}
        for runner in self._runners.values():
            runner.forget()

    def _is_same(self) -> bool:
        """Whether the model and its code are as they were, and the code is known. From now on as they are now."""
        if self._guards.unknown is not None:
            log_once(
                f"steps of {type(self.model).__name__} are not recorded: they call {self._guards.unknown}, which is "
                "not code of PyTorch, transformers or torch_pi2; Decoder(recorded=True) records them all the same"
            )
            return False
        return self._guards.renew(self.model)

    def may_record(self) -> bool:
        """Whether replayed calls do all that a step does: no hooks, lazy tensors, or layers divided with a GPU."""
        return not (self._divided or self._lazy or self.recorded is False or self.is_hooked())

    def _runner(self, ids_BT: torch.Tensor, of_each: bool) -> GraphRunner:
        key = self.batch, ids_BT.shape[1], of_each
        if key not in self._runners:
            me: Callable[[], Any] = weakref.ref(self)  # a cycle would keep the model until garbage is collected
            self._runners[key] = GraphRunner(
                lambda ids_BT: me()._forward(ids_BT, of_each),
                lambda: me().may_record(),
                lambda: me()._guards.recording(),
                lambda: me()._is_same(),
                may_repeat=group_of(self.model) is None and not self._kv.states,
                wait=2 if any(runner.is_stable for runner in self._runners.values()) else None,
            )
        return self._runners[key]

    def _compile_and_run(self, ids_BT: torch.Tensor, of_each: bool) -> torch.Tensor:
        """Compile and run the first step of its kind; it stays eager if hooks see it or it cannot be recorded."""
        import torch._inductor.config as inductor

        if self.is_hooked():
            return self._runner(ids_BT, of_each)(ids_BT)
        with inductor.patch(_INDUCTOR), room_for_compiling(self.model):
            run = self._compiled(ids_BT, of_each)
            if run is None:
                log_once(f"steps of {type(self.model).__name__} are not compiled: their calls cannot be recorded")
                run = self._runner(ids_BT, of_each)
            result = run(ids_BT)
        self._guards.renew(self.model)  # compilers write to modules and classes of PyTorch
        # Compiled code of a dense model checks at each call whether its weights have been replaced.
        whole = ModelState.of(self.model) is not None and not isinstance(run, GraphRunner)
        self._compiled_steps[self.batch, ids_BT.shape[1], of_each] = captured(run, ids_BT) if whole else run
        return result

    def _compiled(self, ids_BT: torch.Tensor, of_each: bool) -> Forward | None:
        """A step compiled from its recorded calls; None: they cannot be recorded."""
        other_BT = (ids_BT + 1) % self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        self._guards.renew(self.model)
        states = self._kv.saved_states(self.batch)
        with self._guards.recording():
            _, calls = record(lambda i: self._forward(i, of_each), other_BT)
            self._kv.restore_states(states)
            same = calls is not None and repeat(lambda i: self._forward(i, of_each), ids_BT, calls)[1]
            self._kv.restore_states(states)
        if calls is None or not same:
            return None
        if not self._is_same():
            return None
        return StepGraph(calls).compiled(torch._dynamo.lookup_backend(self._backend), ids_BT, self.model)
