"""``Kept``: the Decoder that answers of one model borrow, one after another, so that its steps are recorded once."""

from __future__ import annotations

from torch import nn

from torch_pi2.decode.adapt import Engine, engine_of
from torch_pi2.decode.decode import Decoder
from torch_pi2.layers.gpu import device_of
from torch_pi2.rewrite.handle import store_of

#: Tokens of a Decoder that is kept for the next answer: this, or the next power of two (on a GPU multiple).
_LEAST_ROOM = 256


class Kept:
    """Of a model in memory, which it does not keep; the memory of keys and values goes back to the system in between,
    but on a GPU.

    Over a store nothing is kept: its memory is the budget's. Threads may borrow at the same time.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Decoder, object]] = []  # one at most

    def borrow(self, model: nn.Module, tokens: int, sequences: int) -> Decoder:
        """With so much room: the kept one, unless another answer has it, or a new one."""
        if store_of(model) is not None:
            return decoder_for(model, tokens, sequences)
        try:
            decoder, kind = self._free.pop()
        except IndexError:
            pass
        else:
            same = decoder.wake(model) and kind == _kind(model)  # a shallow copy has the decoder of another
            if same and decoder.rows >= sequences and decoder.max_tokens >= tokens:
                return decoder
        return decoder_for(model, _room(model, tokens), sequences)

    def give_back(self, decoder: Decoder) -> None:
        if store_of(decoder.model) is None:
            kind = _kind(decoder.model)
            decoder.let_go()
            self._free[:] = [(decoder, kind)]


def _room(model: nn.Module, tokens: int) -> int:
    """For so many, and for others: on the CPU the next power of two, which takes memory only where it is used."""
    if device_of(model).type == "cpu":
        return max(_LEAST_ROOM, 1 << (tokens - 1).bit_length())
    return -(-tokens // _LEAST_ROOM) * _LEAST_ROOM


def _kind(model: nn.Module) -> object:
    """Dtype and device of parameters, as ``model.to`` changes them: those of keys and values."""
    return getattr(model, "dtype", None), device_of(model)


def decoder_for(
    model: nn.Module, tokens: int, sequences: int, compiled: bool = False, engine: Engine | None = None
) -> Decoder:
    """One with logits and so much room, which reads prompts as the plan says that is followed."""
    following = engine or engine_of(model)
    over_store = following is not None and store_of(model) is not None
    return Decoder(
        model,
        max_tokens=tokens,
        batch=sequences,
        compiled=compiled,
        logits=True,
        chunk_tokens=following.plan.prompt.chunk_tokens if over_store and following is not None else 0,
    )
