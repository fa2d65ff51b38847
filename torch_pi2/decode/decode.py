"""``Decoder``: decoding over a static KV cache, one compiled graph a step.

What Hugging Face's forward spends in Python (about 140 us a layer) is as much as a sparse layer of a small model.
The whole step is therefore captured once (``fullgraph``), with our operators as calls that Inductor leaves alone, and
runs without guards: this class owns everything that guards would look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from torch_pi2.base.arguments import checked
from torch_pi2.base.fields import argument
from torch_pi2.decode.adapt import engine_of
from torch_pi2.decode.attention import packed_attention
from torch_pi2.decode.budget import room_for_compiling
from torch_pi2.decode.direct import Direct
from torch_pi2.decode.kv import KeyValues
from torch_pi2.decode.pieces import LEAST_TOKENS, pieces_without_loss, same_frequencies_up_to, takes_several_lengths
from torch_pi2.errors import ConfigError, DtypeError, ShapeError, UnsupportedModelError
from torch_pi2.layers.prompt import piece_of, steps_of_one
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


def _check_ids(ids_BT: torch.Tensor, what: str) -> None:
    """Raises ShapeError or DtypeError unless these are token ids ``[B, T]``."""
    is_tensor = isinstance(ids_BT, torch.Tensor)
    if not is_tensor or ids_BT.dim() != 2:
        found = str(list(ids_BT.shape)) if is_tensor else f"a {type(ids_BT).__name__}"
        raise ShapeError(what, expected="a tensor of ids [B, T]", found=found, fix="A row for each sequence.")
    if ids_BT.is_floating_point() or ids_BT.is_complex() or ids_BT.dtype is torch.bool:
        raise DtypeError(what, expected="integer token ids", found=dtype_name(ids_BT.dtype), fix="Tokenise the text.")


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

    Each step is one forward for all sequences: weights are read once. Others join (:meth:`join`), those that end leave
    (:meth:`keep`), and a model that follows a plan (:func:`torch_pi2.follow`) is told how many there are.

    The model must not be changed (rewritten, moved, converted, planned anew, hooked) while a compiled decoder of it is
    in use: that would not be seen. New values in the same tensors are, and other tensors in their places from the next
    prompt on.

    Args:
        model: a Hugging Face causal language model on the CPU, dense or optimised, in evaluation mode.
        max_tokens: room of the KV cache, prompt and answer together.
        batch: sequences decoded together, at most.
        backend: what compiles a step; ``torch_pi2`` makes one call of linears with the same input.
        compiled: run each step through ``torch.compile`` (compiled at the first step of each number of sequences: 5 to
            30 s for 32 layers). Lossless but for roundings: Inductor keeps float32 between operations that it fuses.
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
        UnsupportedModelError: the model's cache cannot be static (state-space layers), or has a sliding window shorter
            than ``max_tokens``; it has an encoder; or (by :meth:`prompt`) it does not use the cache.
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
        handle = Handle.of(model)
        budget = None if handle is None else handle.budget
        self._most_tokens = 0
        if not chunk_tokens:
            self._most_tokens = pieces_without_loss(model) if budget is None else budget.piece_tokens
        self._least_tokens = LEAST_TOKENS if budget is None else 1
        self._kv = KeyValues(model, max_tokens, batch)
        self.cache: Any = None
        self._positions = takes_several_lengths(model, max_tokens)
        self._same_frequencies = same_frequencies_up_to(model)
        self._settings = _INDUCTOR | {"cpp_wrapper": cpp_wrapper}
        self._backend, self.compiled = backend, compiled
        #: By sequences, tokens and whether all their logits are wanted: what is compiled, each after its first call.
        self._runs: dict[tuple[int, int, bool], Direct] = {}

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    def _inputs(self, ids_BT: torch.Tensor) -> dict[str, Any]:
        """Of a step: each sequence has a position of its own, and sees what is before it."""
        inputs = {"input_ids": ids_BT, "past_key_values": self.cache, "use_cache": True}
        if self._positions:
            batch, tokens = ids_BT.shape
            positions_BT = self._kv.lengths[:batch, None] + torch.arange(tokens)
            mask_B1TL = torch.arange(self.max_tokens) <= positions_BT[:, None, :, None]
            inputs |= {"position_ids": positions_BT, "attention_mask": mask_B1TL}
        return inputs

    def _answer(self, logits_BTV: torch.Tensor) -> torch.Tensor:
        logits_BV = logits_BTV[:, -1]
        return logits_BV if self.logits else logits_BV.argmax(-1, keepdim=True)

    def _forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self._answer(self.model(**self._inputs(ids_BT), logits_to_keep=1).logits)

    def _forward_each(self, ids_1T: torch.Tensor) -> torch.Tensor:
        logits_1TV: torch.Tensor = self.model(**self._inputs(ids_1T)).logits
        return logits_1TV[0]

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
        self.lengths = []  # whatever happens below, what was before is gone
        return self._read(ids_BT, known)

    @torch.inference_mode()
    def join(self, ids_1T: torch.Tensor, known: Sequence[list[torch.Tensor]] = ()) -> torch.Tensor:
        """Read the prompt of one more sequence, int64 ``[1, T]``, of any length; returns its next token ``[1, 1]``.

        It is the last row from now on, ``batch`` - 1; without others, the only one. If it fails, the others go on.

        Args:
            known: keys and values that :meth:`copied` gave of the same tokens as the first of these, part by part:
                they are not read again, but for the last ones (:meth:`prompt`).

        Raises:
            ShapeError: there are as many sequences as there is room for, or a prompt that leaves no room.
            UnsupportedModelError: the model cannot have sequences of several lengths.
        """
        _check_ids(ids_1T, "join")
        check_vocabulary(self.model, ids_1T, "join")
        if len(self.lengths) == self.rows or len(ids_1T) != 1 or not 1 <= ids_1T.shape[1] < self.max_tokens:
            raise ShapeError(
                "join",
                expected=f"[1, 1 to {self.max_tokens - 1}] while there are fewer than {self.rows} sequences",
                found=f"{list(ids_1T.shape)} beside {len(self.lengths)}",
                fix="Let others leave first (keep), or make a Decoder for more.",
            )
        if self.lengths and not self._positions:
            raise UnsupportedModelError(
                type(self.model).__name__,
                expected="a model that takes position_ids, uses sdpa, and has rotary frequencies that do not depend on "
                "the length, to decode sequences of several lengths",
                found="another",
                fix="Load it with attn_implementation='sdpa', or decode one after another.",
            )
        tokens = 0
        for part in known:
            self._kv.put(len(self.lengths), tokens, part)
            tokens += part[0].shape[1]
        return self._read(ids_1T, tokens)

    @torch.inference_mode()
    def copied(self, row: int, first: int, last: int) -> list[torch.Tensor]:
        """Keys and values of the tokens from ``first`` to ``last`` (exclusive) of a row, for :meth:`join`."""
        return self._kv.copied(row, first, last)

    def _read(self, ids_BT: torch.Tensor, known: int = 0) -> torch.Tensor:
        """Prompts of more sequences, behind those that there are; of the first so many tokens are ``known``."""
        (new, tokens), before = ids_BT.shape, len(self.lengths)
        known = max(0, min(known, tokens - constants().gemm_tokens))
        whole = tokens > self._same_frequencies  # which then depend on what a call sees
        known = 0 if whole else known
        for run in self._runs.values():
            run.forget()
        self._use(before + new)
        self._tell(before + new)  # after keys and values gave memory back, and before they want any
        most = max(self._least_tokens, self._most_tokens // new) if self._most_tokens else self.chunk_tokens
        most = tokens if whole or not most else most
        cache = self._kv.reading(before, new, tokens, known)
        try:
            with packed_attention(self.model), piece_of(new * tokens):
                # pieces of equal length: a short one at the end might be taken for a step
                for piece_BT in ids_BT[:, known:].tensor_split(-(-(tokens - known) // most), 1):
                    output = self.model(input_ids=piece_BT, past_key_values=cache, use_cache=True, logits_to_keep=1)
                    result = self._answer(output.logits)
            self._kv.check_used()
        except BaseException:
            self._use(max(1, before))
            raise
        self._kv.lengths[before : before + new] = tokens
        self.lengths += [tokens] * new
        self.cache = self._kv.stepping(self.batch)
        return result

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

    @torch.inference_mode()
    def fork(self, sequences: int) -> None:
        """Go on with so many sequences from the one that there is: its keys and values are copied.

        Raises:
            ShapeError: no prompt has been read, there are several sequences already, or no room for so many.
        """
        self._check_read("fork")
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
        self.lengths *= sequences
        self._use(sequences)

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
            self.lengths = []
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
        self.lengths = [self.lengths[row] for row in came_from]
        self._use(len(kept))
        return came_from

    def _fed(self, ids_BT: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """What ``forward`` says of tokens that come next. If it fails, it is as if they had not been fed."""
        ids_BT = ids_BT.to(torch.int64).contiguous()  # compiled code has no guards that would see another layout
        of_each = forward == self._forward_each
        self._tell(self.batch)
        try:
            run = self._runs.get((self.batch, ids_BT.shape[1], of_each))
            if run is not None:
                result: torch.Tensor = run(ids_BT)
            elif self.compiled:
                result = self._first_run(ids_BT, forward, of_each)
            else:
                with self._attending(of_each):
                    result = forward(ids_BT)
        except BaseException:
            check_vocabulary(self.model, ids_BT, "token")  # what may have been wrong, and is said by no name
            raise
        self._add(ids_BT.shape[1])
        return result

    def _add(self, tokens: int) -> None:
        """Each sequence has so many tokens more."""
        self._kv.add(self.batch, tokens)
        self.lengths = [length + tokens for length in self.lengths]

    @contextmanager
    def _attending(self, of_each: bool) -> Iterator[None]:
        """Within it a forward is a step; ``of_each``: its tokens are steps of one sequence, each as if alone."""
        with packed_attention(self.model), steps_of_one() if of_each else nullcontext():
            yield

    def _check_read(self, what: str) -> None:
        if self.length == 0:
            raise ShapeError(
                what,
                expected="a prompt before it",
                found="none that was read to its end",
                fix="Call prompt(ids) first; it returns the token to begin with.",
            )

    def _use(self, batch: int) -> None:
        """From now on there are so many sequences."""
        fewer, self.batch = batch < self.batch, batch
        if self.cache is not None:  # there are keys and values
            self.cache = self._kv.stepping(batch)
            if fewer and store_of(self.model) is not None:
                self._kv.give_back(batch)

    def _tell(self, batch: int) -> None:
        engine = engine_of(self.model)
        if engine is not None:
            engine.batch(batch)

    def _first_run(
        self, ids_BT: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor], of_each: bool
    ) -> torch.Tensor:
        import torch._inductor.config as inductor

        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules())
        run = Direct(forward, self._backend, stay=hooked)
        with self._attending(of_each), inductor.patch(self._settings), room_for_compiling(self.model):
            result: torch.Tensor = run(ids_BT)
        self._runs[self.batch, ids_BT.shape[1], of_each] = run
        return result
