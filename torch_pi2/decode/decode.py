"""``Decoder``: decoding over a static KV cache, a step as one graph.

What Hugging Face's forward spends in Python (about 140 us a layer) is as much as a sparse layer of a small model.
The calls of a step are therefore recorded, and made again (:mod:`torch_pi2.decode.recorded`); or compiled, with our
operators as calls that Inductor leaves alone. Neither has guards: this class owns everything that these would look at.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.calls import Part
from torch_pi2.base.fields import argument
from torch_pi2.decode.adapt import Engine, engine_of
from torch_pi2.decode.attention import adds_masks, packed_attention
from torch_pi2.decode.budget import room_for_compiling
from torch_pi2.decode.calls import group_of, leader_of, led, number_of
from torch_pi2.decode.cuda_graph import Forward, captured, on_device
from torch_pi2.decode.kv import KeyValues, cache_name
from torch_pi2.decode.masks import masks_of
from torch_pi2.decode.pieces import LEAST_TOKENS, pieces_without_loss, same_frequencies_up_to, takes_several_lengths
from torch_pi2.decode.recorded import Replay, State, record
from torch_pi2.errors import ConfigError, DeviceError, DtypeError, ShapeError, UnsupportedModelError
from torch_pi2.layers.gpu import device_of
from torch_pi2.layers.of_model import homes
from torch_pi2.layers.prompt import piece_of, steps_of_one
from torch_pi2.layers.stages import without_logits
from torch_pi2.ops.constants import constants
from torch_pi2.ops.dtypes import dtype_name
from torch_pi2.rewrite.handle import Handle, store_of

#: Tokens of a :meth:`Decoder.verify`, at most: layers with int8 activations may have other last bits from 12 on.
VERIFIED = 8

#: Inductor settings of the step. Asserts on sizes and guards cost more than the small kernels between our operators,
#: which would lose by a second thread: waking it takes longer than they do. freezing would copy the weights.
_INDUCTOR = {
    "freezing": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "cpp.dynamic_threads": False,
    "cpp.threads": 1,
}


def _through_dynamo(forward: Forward, backend: str | Callable[..., Any]) -> Forward:
    """``forward`` compiled so that hooks see each step, and without guards."""
    compile_step: Any = torch.compile
    compiled: Forward = compile_step(
        forward,
        fullgraph=True,
        dynamic=False,
        backend=backend,
        options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
        # every step's own: with the guards gone, another one's code would fit too
        isolate_recompiles=True,
    )
    return compiled


def _together(model: nn.Module) -> AbstractContextManager[None]:
    """Within it what goes wrong is explained, if ``model`` is computed by several processes."""
    group = group_of(model)
    return nullcontext() if group is None else group.together()


def _check_ids(ids_BT: torch.Tensor, what: str) -> None:
    """Raises ShapeError or DtypeError unless these are token ids ``[B, T]``."""
    is_tensor = isinstance(ids_BT, torch.Tensor)
    if not is_tensor or ids_BT.dim() != 2:
        found = str(list(ids_BT.shape)) if is_tensor else f"a {type(ids_BT).__name__}"
        raise ShapeError(what, expected="a tensor of ids [B, T]", found=found, fix="A row for each sequence.")
    if ids_BT.is_floating_point() or ids_BT.is_complex() or ids_BT.dtype is torch.bool:
        raise DtypeError(what, expected="integer token ids", found=dtype_name(ids_BT.dtype), fix="Tokenise the text.")


def _is_idle(hook: Any) -> bool:
    """Whether it is one that transformers leaves on modules once it was asked for what layers return: nobody is now."""
    return getattr(hook, "__module__", None) == "transformers.utils.output_capturing"


def check_vocabulary(model: nn.Module, input_ids: torch.Tensor, what: str = "input_ids") -> None:
    """Raises ConfigError: one is not in the vocabulary of ``model``."""
    vocab: int = model.get_input_embeddings().num_embeddings  # type: ignore[operator]
    wrong = input_ids[(input_ids < 0) | (input_ids >= vocab)]
    if wrong.numel():
        raise ConfigError(
            what,
            expected=f"tokens of 0 to {vocab - 1}, the model's vocabulary",
            found=f"the token {int(wrong[0])}",
            fix="Use the tokenizer of this model.",
        )


class Decoder:
    """Greedy continuation of prompts, or of one prompt by several sequences (:meth:`fork`).

    Each step is one forward for all sequences: weights are read once. Others join (:meth:`joining`), those that end
    leave (:meth:`keep`), and a model that follows a plan (:func:`torch_pi2.follow`) is told how many there are.

    The model must not be changed (rewritten, moved, converted, planned anew, hooked) between a prompt and the last step
    that goes on from it: that would not be seen. New values in the same tensors are; all else from the next prompt on,
    but for what is inside of objects that modules hold (lists and mappings are looked at). Compiled, a model must not
    change itself in its steps (counters, moving averages).

    Args:
        model: a Hugging Face causal language model, dense or optimised, in evaluation mode: on the CPU, on a GPU, or
            divided between them, of which steps are not recorded. On a GPU recorded steps, and compiled ones of
            optimised models, are captured as CUDA graphs. Ids are taken from any device, and results are where the
            model is.
        max_tokens: room of the KV cache, prompt and answer together.
        batch: sequences decoded together, at most.
        backend: what compiles a step; ``torch_pi2`` makes one call of linears with the same input.
        compiled: run each step through Inductor (compiled at the first step of each number of sequences, which takes a
            second a layer, or where it has been on this machine, 2 to 5 s in all, and makes that step two more times,
            as counters see). Lossless but for roundings: Inductor keeps float32 between operations that it fuses.
            False: steps are recorded and made again, which has the model's bits, needs no compiler, and most of the
            gain.
        cpp_wrapper: let Inductor write the code between kernels in C++ too: per layer and token some 10 us less, but a
            minute more to compile (Inductor keeps both on disk).
        logits: :meth:`prompt` and :meth:`step` return the logits ``[B, V]`` of what comes next, for sampling, instead
            of the most likely tokens.
        chunk_tokens: read longer prompts in equal pieces of at most so many tokens, which bounds the memory of their
            activations, and in memory is faster, as those of a piece stay in caches. Feed-forward layers go the way
            that they would for all: lossless but for the roundings of PyTorch's products, and of ours in pieces of
            fewer than 12 tokens. 0: at most so many of all sequences together: over a store as its budget has room for
            (``Budget.piece_tokens``: 1,024, or the context if that is less); in memory 256 where every product is one
            of ours with int8 activations, which has no such roundings (AVX-512 VNNI); else whole. Whole in any case
            are prompts of models whose rotary frequencies depend on the length that a call sees (longrope, dynamic
            NTK), where they are longer than what these were trained with.

    Attributes:
        batch: sequences that are decoded now. lengths: of each, in tokens. length: of the longest. cache: theirs, a
            ``StaticCache``.
        compiled: whether steps are.

    Raises:
        UnsupportedModelError: the model's cache cannot be static (state-space layers); it has an encoder; or (by
            :meth:`prompt`) it does not use the cache.
        DeviceError: the model is on several GPUs, or (by what reads a prompt) has been moved since.
        ConfigError: a divided model, compiled; or a setting that makes no sense.
    """

    @checked
    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        batch: int = 1,
        backend: str | Callable[..., Any] = "torch_pi2",
        compiled: bool = True,
        cpp_wrapper: bool = False,
        logits: bool = False,
        chunk_tokens: int = 0,
    ) -> None:
        if not callable(backend):
            argument(backend, "Decoder(backend)").text(torch._dynamo.list_backends(exclude_tags=()))
        if max_tokens < 2 or batch < 1:
            raise ConfigError(
                "max_tokens, batch",
                expected="at least 2 and 1",
                found=f"{max_tokens}, {batch}",
                fix="max_tokens is the length of prompt and answer together.",
            )
        self.model, self.max_tokens, self.batch, self.rows = model, max_tokens, batch, batch
        self.lengths, self.logits, self.chunk_tokens = list[int](), logits, chunk_tokens
        self.device, self.compiled = device_of(model), compiled
        self._look()
        self._kv = KeyValues(model, max_tokens, batch, self.device)
        self.cache: Any = None
        self._cache_name = cache_name(model)
        self._settings = _INDUCTOR | {"cpp_wrapper": cpp_wrapper}
        self._backend = backend
        #: By sequences, tokens and whether all their logits are wanted: what is compiled, or recorded, of their steps.
        self._runs: dict[tuple[int, int, bool], Forward] = {}
        self._replays: dict[tuple[int, int, bool], Replay] = {}
        self._state: State | None = None
        #: The row of the sequence that :meth:`joining` reads, and how; None: of none.
        self._joining: int | None = None
        self._pieces: Generator[int] | None = None
        #: By which other processes know it (:func:`torch_pi2.lead`).
        self.number = number_of(
            self,
            max_tokens=max_tokens,
            batch=batch,
            backend=backend,
            compiled=compiled,
            cpp_wrapper=cpp_wrapper,
            logits=logits,
            chunk_tokens=chunk_tokens,
        )

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def _look(self) -> None:
        """What the model allows now. Raises DeviceError: it is elsewhere than it was; ConfigError: see the class."""
        device = device_of(self.model)
        if device != self.device:
            raise DeviceError(
                f"Decoder of {type(self.model).__name__}",
                expected=f"the model on {self.device}, where keys and values are",
                found=f"it on {device}",
                fix="Make another Decoder after moving a model.",
            )
        self._divided = any(home.split is not None for home in homes(self.model))
        if self.compiled and self._divided:
            raise ConfigError(
                f"Decoder of {type(self.model).__name__}, compiled",
                expected="a model that is on one device as a whole",
                found="layers that are divided between a GPU and the CPU, which no compiler can order",
                fix="Leave compiled out (compiled=False, or no --compile).",
            )
        handle = Handle.of(self.model)
        budget = None if handle is None else handle.budget
        self._most_tokens = 0
        if not self.chunk_tokens:
            self._most_tokens = pieces_without_loss(self.model) if budget is None else budget.piece_tokens
        self._least_tokens = LEAST_TOKENS if budget is None else 1
        self._short_pieces = self._most_tokens > 0 and budget is None
        self._positions = takes_several_lengths(self.model, self.max_tokens)
        self._same_frequencies = same_frequencies_up_to(self.model)

    def _inputs(self, ids_BT: torch.Tensor) -> dict[str, Any]:
        """Of a step: each sequence has a position of its own, and sees what is before it."""
        inputs = {"input_ids": ids_BT, self._cache_name: self.cache, "use_cache": True}
        if self._positions:
            batch, tokens = ids_BT.shape
            positions_BT = self._kv.lengths[:batch, None] + torch.arange(tokens, device=self.device)
            config, dtype = self.model.config, cast(torch.dtype, self.model.dtype)
            masks = masks_of(config, positions_BT, self.max_tokens, dtype if adds_masks(config) else torch.bool)
            inputs |= {"position_ids": positions_BT, "attention_mask": masks}
        return inputs

    def _answer(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BTV[:, -1]
        return logits_BV if self.logits else logits_BV.argmax(-1, keepdim=True)

    def _forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self._answer(self.model(**self._inputs(ids_BT), logits_to_keep=1).logits)

    def _forward_each(self, ids_1T: torch.Tensor) -> torch.Tensor:
        logits_1TV: torch.Tensor = self.model(**self._inputs(ids_1T)).logits
        return logits_1TV[0]

    @led
    @torch.inference_mode()
    def prompt(self, ids_BT: torch.Tensor, known: int = 0) -> torch.Tensor:
        """Forget what was before, read a prompt (int64 ``[B, T]``), return the next tokens ``[B, 1]``.

        Args:
            known: so many tokens of it are the first ones of the one sequence that there is, and not read again: the
                next question of a talk. Lossless as pieces of a prompt are (what steps have fed has the bits of
                steps); for that the last 12 tokens are read in any case, as fewer go another way through layers with
                int8 activations.

        Raises:
            ShapeError: more sequences than there is room for, a prompt that leaves no room, or one of which so many
                tokens cannot be known.
        """
        _check_ids(ids_BT, "prompt")
        check_vocabulary(self.model, ids_BT, "prompt")
        self._check_not_joining("prompt")
        batch, tokens = ids_BT.shape
        if not (1 <= batch <= self.rows and 1 <= tokens < self.max_tokens):
            rows = f"1 to {self.rows}" if self.rows > 1 else "1"
            raise ShapeError(
                "prompt",
                expected=f"[{rows}, 1 to {self.max_tokens - 1}]",
                found=str(list(ids_BT.shape)),
                fix="Make a Decoder for this batch and length.",
            )
        if known and not (len(self.lengths) == batch == 1 and 0 < known <= self.length and known < tokens):
            raise ShapeError(
                "prompt(known=...)",
                expected=f"0, or one prompt of more tokens and one sequence that has so many (now {self.lengths})",
                found=f"{known} of {list(ids_BT.shape)}",
                fix="Read it whole.",
            )
        self._check_same("prompt", ids_BT)
        self._count([])  # whatever happens below, what was before is gone
        return self._read(ids_BT, known)

    def joining(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]] = ()) -> Iterator[int]:
        """Read the prompt of one more sequence, int64 ``[1, T]``, of any length, by pieces: steps may come between.

        Gives how many tokens are left after each piece. Once it is exhausted the sequence is the last row, ``batch`` -
        1, with all its tokens but the last, which the next step is to feed: others are in no one's way for it. What
        becomes of a sequence does not depend on who else is decoded. If it fails or is closed, the others go on.

        While there are others, pieces are short where that is lossless (``chunk_tokens``).

        Args:
            known: keys and values that :meth:`copied` gave of the same tokens as the first of these, part by part:
                they are not read again, but for up to 12 (:meth:`prompt`) if more come that are not known, before the
                last.

        Raises:
            ShapeError: there are as many sequences as there is room for, one is being read, a prompt that leaves no
                room, or more ``known`` than the prompt has.
            UnsupportedModelError: the model cannot have sequences of several lengths; or, with ``known``, keys and
                values are divided among processes of which this one leads, and these are none of its parts.
        """
        _check_ids(ids_1T, "joining")
        check_vocabulary(self.model, ids_1T, "joining")
        self._check_not_joining("joining")
        self._look()
        if len(self.lengths) == self.rows or len(ids_1T) != 1 or not 1 <= ids_1T.shape[1] < self.max_tokens:
            raise ShapeError(
                "joining",
                expected=f"[1, 1 to {self.max_tokens - 1}] while there are fewer than {self.rows} sequences",
                found=f"{list(ids_1T.shape)} beside {len(self.lengths)}",
                fix="Let others leave first (keep), or make a Decoder for more.",
            )
        kept = sum(part[0].shape[1] for part in known)
        if kept > ids_1T.shape[1]:
            raise ShapeError(
                "joining(known=...)",
                expected=f"keys and values of the first tokens of the prompt, at most {ids_1T.shape[1]}",
                found=f"those of {kept}",
                fix="Leave out what the prompt does not begin with.",
            )
        leader, group = leader_of(self.model), group_of(self.model)
        divided_by = leader if group is not None and group.divides_kv else None
        if divided_by and not all(isinstance(part, Part) and divided_by.knows(part.number) for part in known):
            raise UnsupportedModelError(
                "joining(known=...) of a model whose keys and values are divided among processes",
                expected="what copied gave since torch_pi2.lead: every process has a part of it",
                found="others",
                fix="Read the prompt whole.",
            )
        if self.lengths and not self._positions:
            raise UnsupportedModelError(
                type(self.model).__name__,
                expected="a model that takes position_ids, uses sdpa, and has rotary frequencies that do not depend on "
                "the length, to decode sequences of several lengths",
                found="another",
                fix="Load it with attn_implementation='sdpa', or decode one after another.",
            )
        return self._join(ids_1T, known)

    def _join(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]]) -> Iterator[int]:
        """Piece by piece, each a call of its own."""
        self.begin_joining(ids_1T, known)
        try:
            while (left := self.next_piece()) is not None:
                yield left
        finally:
            self.end_joining()

    @led
    def begin_joining(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]]) -> None:
        """A part of :meth:`joining`, which has looked at the arguments, as are the next two."""
        self._check_not_joining("joining")  # another may have begun since
        self._look()
        self._pieces = self._read_pieces(ids_1T.to(self.device), known)

    @led
    @torch.inference_mode()
    def next_piece(self) -> int | None:
        """Read one; how many tokens are left, or None: the sequence is the last row."""
        return None if self._pieces is None else next(self._pieces, None)

    @led
    @torch.inference_mode()
    def end_joining(self) -> None:
        """Whether or not there are pieces left."""
        pieces, self._pieces = self._pieces, None
        if pieces is not None:
            pieces.close()

    def _read_pieces(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]]) -> Generator[int]:
        fed = ids_1T.shape[1] - 1
        tokens = max(1, fed)  # one in any case, which makes the memory of keys and values
        row = self._joining = len(self.lengths)
        try:
            at = 0
            for part in known:
                self._kv.put(row, at, part)
                at += part[0].shape[1]
            at = at if at == fed > 0 else self._known(at, tokens)
            cache = self._kv.reading(row, 1, tokens, at)
            while left := tokens - at:
                self._tell(row + 1)
                most = self._least_tokens if self.lengths and self._short_pieces else self._most_of(1)
                most = most if most and tokens <= self._same_frequencies else tokens
                piece = -(-left // -(-left // most))  # as tensor_split has it
                self._read_piece(ids_1T[:, at : at + piece], cache, tokens, without_logits())
                at += piece
                yield tokens - at
            self._kv.check_used(self.model)
            new = len(self.lengths)  # some may have left
            self._kv.lengths[row].fill_(fed)
            if new != row:
                self._kv.copy_row(row, new)
            self._count([*self.lengths, fed])
            self._use(new + 1)
            self.cache = self._kv.stepping(new + 1)
            self._forget()
        finally:
            self._joining = None
            self._give_back()

    def copied(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Keys and values of the tokens from ``first`` to ``last`` (exclusive) of a row, for :meth:`joining`.

        Where they are divided among processes of which this one leads, it is those that are here; each of the others
        keeps its own for as long as these are referred to.

        Raises:
            ShapeError: the row has no such tokens.
        """
        if not (0 <= row < len(self.lengths) and 0 <= first < last <= self.lengths[row]):
            raise ShapeError(
                "copied",
                expected=f"tokens, 1 or more, of a sequence that there is (now {self.lengths})",
                found=f"{first} to {last} of row {row}",
                fix="Name tokens that were read or fed.",
            )
        leader, group = leader_of(self.model), group_of(self.model)
        if leader is None or group is None or not group.divides_kv:
            return self._kv.copied(row, first, last)
        part = Part()
        part.number = leader.number(part)
        part.extend(self.keep_part(row, first, last, part.number))
        return part

    @led
    @torch.inference_mode()
    def keep_part(self, row: int, first: int, last: int, number: int) -> Part:
        """A part of :meth:`copied`."""
        return Part(self._kv.copied(row, first, last), number)

    def _read(self, ids_BT: torch.Tensor, known: int = 0) -> torch.Tensor:
        """Prompts of all sequences; of the first so many tokens are ``known``."""
        rows, tokens = ids_BT.shape
        self._look()
        ids_BT = ids_BT.to(self.device)
        known = self._known(known, tokens)
        self._use(rows)
        self._tell(rows)  # after keys and values gave memory back, and before they want any
        most = (self._most_of(rows) if tokens <= self._same_frequencies else 0) or tokens
        cache = self._kv.reading(0, rows, tokens, known)
        try:
            # pieces of equal length: a short one at the end might be taken for a step
            *others, last_BT = ids_BT[:, known:].tensor_split(-(-(tokens - known) // most), 1)
            for piece_BT in others:
                self._read_piece(piece_BT, cache, rows * tokens, without_logits())
            result = self._read_piece(last_BT, cache, rows * tokens)
            self._kv.check_used(self.model)
        except BaseException:
            self._use(1)
            raise
        self._kv.lengths[:rows].fill_(tokens)
        self._count([tokens] * rows)
        self.cache = self._kv.stepping(rows)
        self._forget()
        return result

    def _known(self, known: int, tokens: int) -> int:
        """Tokens, of as many as are known of a prompt, that are not read again: others have the bits that they have."""
        if tokens > self._same_frequencies:  # which then depend on what a call sees
            return 0
        return max(0, min(known, tokens - constants().gemm_tokens))

    def _most_of(self, rows: int) -> int:
        """Tokens of each of ``rows`` sequences in a piece, at most; 0: any."""
        return max(self._least_tokens, self._most_tokens // rows) if self._most_tokens else self.chunk_tokens

    def _read_piece(
        self, ids_BT: torch.Tensor, cache: Any, of_tokens: int, how: AbstractContextManager[None] | None = None
    ) -> torch.Tensor:
        """Some tokens of prompts of so many; what comes next."""
        with on_device(self.device), packed_attention(self.model), piece_of(of_tokens), how or nullcontext():
            output = self.model(input_ids=ids_BT, use_cache=True, logits_to_keep=1, **{self._cache_name: cache})
        return self._answer(output.logits)

    @led
    @torch.inference_mode()
    def step(self, next_B1: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence, int64 ``[B, 1]``; returns the next ones. A step that fails can be repeated.

        Raises:
            ShapeError: the longest sequence has no room, no prompt has been read, or another batch size.
        """
        self._check_read("decoding step")
        _check_ids(next_B1, "decoding step")
        if self.length >= self.max_tokens or next_B1.shape != (self.batch, 1):
            raise ShapeError(
                "decoding step",
                expected=f"[{self.batch}, 1] and fewer than {self.max_tokens} tokens before it",
                found=f"{list(next_B1.shape)} after {self.length} tokens",
                fix="Make a Decoder with more max_tokens, or for this batch.",
            )
        return self._fed(next_B1, self._forward)

    @led
    @torch.inference_mode()
    def verify(self, ids_1T: torch.Tensor) -> torch.Tensor:
        """Feed some tokens of the one sequence at once, int64 ``[1, T]``, T at most 8; returns logits ``[T, V]``.

        Row t is what comes after the first t + 1 of them: the weights are read once for all, and those of a sparse
        layer once that some of them want. What turns out to be wrong is taken back (:meth:`take_back`).

        Row t has the bits that :meth:`step` gives (with ``logits``, both compiled or both not) where linears, head and
        feed-forward layers are ours (``weights="int4"`` or ``"int8"``) and so is attention, as it is where ``sdpa`` of
        transformers is asked for no soft caps and the like (:mod:`torch_pi2.decode.attention`). PyTorch's float
        products of several tokens have other last bits than those of one, as has other attention. Compiled, each
        number of tokens is a graph of its own; that Inductor rounds in both alike is tested, not promised by it.

        Raises:
            ShapeError: no prompt has been read, several sequences, too many tokens, or no room for them.
        """
        self._check_read("verify")
        _check_ids(ids_1T, "verify")
        tokens = ids_1T.shape[1]
        if self.batch != 1 or len(ids_1T) != 1 or not 1 <= tokens <= min(VERIFIED, self.max_tokens - self.length):
            raise ShapeError(
                "verify",
                expected=f"[1, 1 to {VERIFIED}] for one sequence, and at most {self.max_tokens} tokens in all",
                found=f"{list(ids_1T.shape)} for {self.batch} after {self.length} tokens",
                fix="Verify fewer tokens, or make a Decoder with more max_tokens.",
            )
        return self._fed(ids_1T, self._forward_each)

    def compile_passes(self, tokens: int) -> None:
        """Compile :meth:`verify` for so many tokens now, if it is to be and has not been: after a prompt."""
        if self.compiled and (1, tokens, True) not in self._runs and self.length + tokens <= self.max_tokens:
            self.verify(torch.zeros(1, tokens, dtype=torch.int64, device="cpu"))
            self.take_back(tokens)

    @led
    @torch.inference_mode()
    def take_back(self, tokens: int) -> None:
        """Forget the last ``tokens`` of each sequence: the next one takes their place.

        Raises:
            ShapeError: none would be left. ConfigError: no whole number of 0 or more.
        """
        tokens = argument(tokens, "take_back(tokens)").whole()
        least = min(self.lengths, default=0)
        if tokens >= max(1, least):
            raise ShapeError(
                "take_back",
                expected=f"0 to {max(0, least - 1)} tokens, of {least} that were read",
                found=str(tokens),
                fix="Read another prompt instead.",
            )
        self._add(-tokens)

    @led
    @torch.inference_mode()
    def fork(self, sequences: int) -> None:
        """Go on with so many sequences from the one that there is: its keys and values are copied.

        Raises:
            ShapeError: no prompt has been read, there are several sequences already, or no room for so many.
        """
        self._check_read("fork")
        self._check_not_joining("fork")
        if self.batch != 1 or not 1 <= sequences <= self.rows:
            raise ShapeError(
                "fork",
                expected=f"1 to {self.rows} sequences from 1",
                found=f"{sequences} from {self.batch}",
                fix="Make a Decoder with a larger batch, and read one prompt.",
            )
        self._tell(sequences)  # so that a cache of neurons gives memory back before keys and values want it
        for row in range(1, sequences):
            self._kv.copy_row(0, row)
        self._count(self.lengths * sequences)
        self._use(sequences)

    @led
    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> list[int]:
        """Go on with the sequences in these rows; the last of them move into the rows of those that leave.

        None: all have ended, and the next prompt is the first.

        Over a store, the memory of keys and values that are not needed goes back to the system.

        Returns:
            For each row from now on, the one in which its sequence was.

        Raises:
            ShapeError: no prompt has been read, or rows that there are not.
        """
        self._check_read("keep")
        kept = sorted(set(rows))
        if not kept:
            self._count([])
            return []
        if kept[0] < 0 or kept[-1] >= self.batch:
            raise ShapeError(
                "keep",
                expected=f"rows from 0 to {self.batch - 1}",
                found=", ".join(map(str, rows)),
                fix="Name the rows of sequences that go on.",
            )
        came_from = list(range(len(kept)))
        free = [row for row in came_from if row not in kept]
        for row, last in zip(free, reversed(kept)):
            self._kv.copy_row(last, row)
            came_from[row] = last
        self._count([self.lengths[row] for row in came_from])
        self._use(len(kept))
        return came_from

    def _check_same(self, what: str, ids_BT: torch.Tensor) -> None:
        """Raises ConfigError unless all processes that compute the model together do the same with the same tokens."""
        group = group_of(self.model)
        if group is not None and not group.led:
            # a step that is compiled is made two more times, of which who records it knows nothing
            names = ("max_tokens", "rows", "chunk_tokens", "compiled")
            group.check_same(what, ids_BT, {f"Decoder.{name}": int(getattr(self, name)) for name in names})

    def agreed(self, numbers: list[int]) -> list[int]:
        """``numbers`` as the first of the processes has them that compute the model together: as many in each."""
        group = group_of(self.model)
        if group is None or group.led:
            return numbers
        with group.together():
            found: list[int] = group.of(torch.tensor(numbers, dtype=torch.int64, device="cpu"), 0).tolist()
        return found

    def _fed(self, ids_BT: torch.Tensor, forward: Forward) -> torch.Tensor:
        """What ``forward`` says of tokens that come next. If it fails, it is as if they had not been fed."""
        on_gpu = self.device.type != "cpu" and ids_BT.device.type == "cpu"
        if on_gpu or group_of(self.model) is not None:  # where a wrong one would end CUDA, or the group
            check_vocabulary(self.model, ids_BT, "token")
        ids_BT = ids_BT.to(self.device, torch.int64).contiguous()  # compiled code would not see another layout
        of_each = forward == self._forward_each
        self._tell(self.batch)
        try:
            with on_device(self.device), _together(self.model):
                run = self._runs.get((self.batch, ids_BT.shape[1], of_each))
                if run is not None:
                    result: torch.Tensor = run(ids_BT)
                elif self.compiled:
                    result = self._first_run(ids_BT, forward, of_each)
                else:
                    result = self._replay(ids_BT, forward, of_each)(ids_BT)
        except BaseException:
            check_vocabulary(self.model, ids_BT, "token")  # what may have been wrong, and is said by no name
            raise
        self._add(ids_BT.shape[1])
        return result

    def _forget(self) -> None:
        """After a prompt: what was made of steps, if the model has changed since; or in it, by itself."""
        before, self._state = self._state, State(self.model)
        if self._state != before:
            self._runs, self._replays = {}, {}

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy: what was made of steps has this one's keys and values."""
        return vars(self) | {
            "_runs": {},
            "_replays": {},
            "_state": None,
            "_joining": None,
            "_pieces": None,
            "number": None,
            "cache": None if self.cache is None else True,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.cache is not None:
            self.cache = self._kv.stepping(self.batch)

    def is_hooked(self) -> bool:
        """Whether somebody sees what modules do; a plan that is followed is told of steps in any case."""
        hooks = (h for m in self.model.modules() for h in (*m._forward_hooks.values(), *m._forward_pre_hooks.values()))
        others = any(not isinstance(getattr(hook, "__self__", None), Engine) and not _is_idle(hook) for hook in hooks)
        return others or nn.modules.module._has_any_global_hook()

    def has_one_way(self) -> bool:
        """Whether calls of a step are all there is to it: no hook sees it, and no copies and threads are in it."""
        return not (self._divided or self.is_hooked())

    @led
    @torch.inference_mode()
    def rest(self) -> None:
        """Forget all sequences; the memory of their keys and values goes back to the system until the next prompt (on a
        GPU it is kept).
        """
        self._count([])
        self._kv.give_back(0)

    def let_go(self) -> None:
        """:meth:`rest`, without the model: of who is kept by it, and must not keep it. :meth:`wake` is next."""
        self.rest()
        self._left = weakref.ref(self.model)
        del self.model

    def wake(self, model: nn.Module) -> bool:
        """Undo :meth:`let_go`, if this is the model that was let go."""
        if self._left() is not model:
            return False
        self.model = model
        return True

    def _add(self, tokens: int) -> None:
        """Each sequence has so many tokens more."""
        lengths = [length + tokens for length in self.lengths]
        self._kv.add(tokens, lengths)
        self._count(lengths)

    def _count(self, lengths: list[int]) -> None:
        self.lengths = lengths
        if (store := store_of(self.model)) is not None:
            store.check_context(self, sum(lengths))

    @contextmanager
    def _attending(self, of_each: bool) -> Iterator[None]:
        """Within it a forward is a step; ``of_each``: its tokens are steps of one sequence, each as if alone."""
        with packed_attention(self.model), steps_of_one() if of_each else nullcontext():
            yield

    def _check_read(self, what: str) -> None:
        if not self.lengths:
            raise ShapeError(
                what,
                expected="a prompt before it",
                found="none that was read to its end",
                fix="Call prompt(ids) first; it returns the token to begin with.",
            )

    def _check_not_joining(self, what: str) -> None:
        if self._joining is not None:
            raise ShapeError(
                what,
                expected="no sequence whose prompt is being read",
                found="one that is joining",
                fix="Go on with joining(...) to its end, or close() it.",
            )

    def _use(self, batch: int) -> None:
        """From now on there are so many sequences."""
        fewer, self.batch = batch < self.batch, batch
        if self.cache is not None:  # there are keys and values
            self.cache = self._kv.stepping(batch)
            if fewer:
                self._give_back()

    def _give_back(self) -> None:
        """Over a store, memory of keys and values of rows that nobody has goes back to the system."""
        if store_of(self.model) is not None:
            self._kv.give_back(self.batch if self._joining is None else self._joining + 1)

    def _tell(self, batch: int) -> None:
        engine = engine_of(self.model)
        if engine is not None:
            engine.batch(batch)

    def _replay(self, ids_BT: torch.Tensor, forward: Forward, of_each: bool) -> Replay:
        key = self.batch, ids_BT.shape[1], of_each
        if key not in self._replays:
            me: Callable[[], Any] = weakref.ref(self)  # a cycle would keep the model until garbage is collected
            name = forward.__name__

            def attending(ids_BT: torch.Tensor) -> torch.Tensor:
                decoder = me()
                with decoder._attending(of_each):
                    found: torch.Tensor = getattr(decoder, name)(ids_BT)
                return found

            again = group_of(self.model) is None
            self._replays[key] = Replay(attending, lambda: me().has_one_way(), lambda: State(me().model), again)
        return self._replays[key]

    def _first_run(self, ids_BT: torch.Tensor, forward: Forward, of_each: bool) -> torch.Tensor:
        import torch._inductor.config as inductor

        hooked = self.is_hooked()
        with self._attending(of_each), inductor.patch(self._settings), room_for_compiling(self.model):
            run = None if hooked else self._compiled(ids_BT, forward)
            run = _through_dynamo(forward, self._backend) if run is None else run
            result = run(ids_BT)
        # What compiling has put into a dense model looks at each call whether its weights are others.
        whole = not hooked and Handle.of(self.model) is not None
        self._runs[self.batch, ids_BT.shape[1], of_each] = captured(run, ids_BT) if whole else run
        return result

    def _compiled(self, ids_BT: torch.Tensor, forward: Forward) -> Forward | None:
        """``forward`` compiled as it was recorded; None: it cannot be."""
        other_BT = (ids_BT + 1) % self.model.get_input_embeddings().num_embeddings  # type: ignore[operator]
        before = State(self.model)
        (_, first), (_, recorded) = record(forward, other_BT), record(forward, ids_BT)
        if recorded is None or first is None or not first.is_same(recorded) or before != State(self.model):
            return None
        backend = torch._dynamo.lookup_backend(self._backend)
        return recorded.compiled(backend, ids_BT, self.model)
