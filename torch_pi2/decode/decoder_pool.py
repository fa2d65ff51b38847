"""``DecoderPool``: keeps the Decoder of a model for the next answer, so that its steps are recorded only once."""

from __future__ import annotations

from torch import nn

from torch_pi2.decode.decoder import Decoder
from torch_pi2.decode.plan_controller import controller_of
from torch_pi2.layers.gpu import device_of
from torch_pi2.rewrite.state import store_of

#: Size of a pooled Decoder in tokens: this, or the next power of two (on a GPU multiple).
_LEAST_TOKENS = 256


class DecoderPool:
    """At most one Decoder of a model in memory. It does not keep the model alive, and on the CPU no keys and values.

    Over a store nothing is pooled: its memory is part of the budget. Threads may use the pool at the same time.
    """

    def __init__(self) -> None:
        self._free: list[tuple[Decoder, object]] = []

    def acquire(self, model: nn.Module, tokens: int, sequences: int) -> Decoder:
        """A Decoder for this many tokens and sequences: the pooled one if it is free and fits, else a new one."""
        if store_of(model) is not None:
            return decoder_for(model, tokens, sequences)
        try:
            decoder, kind = self._free.pop()
        except IndexError:
            pass
        else:
            same = decoder.attach(model) and kind == _kind(model)  # a shallow copy has the decoder of another model
            if same and decoder.rows >= sequences and decoder.max_tokens >= tokens:
                return decoder
        return decoder_for(model, _rounded(model, tokens), sequences)

    def release(self, decoder: Decoder) -> None:
        """Keep ``decoder`` for the next call of :meth:`acquire`."""
        if store_of(decoder.model) is None:
            kind = _kind(decoder.model)
            decoder.detach()
            self._free[:] = [(decoder, kind)]


def _rounded(model: nn.Module, tokens: int) -> int:
    """A size that fits later answers too: on the CPU a power of two, of which only used parts take memory."""
    if device_of(model).type == "cpu":
        return max(_LEAST_TOKENS, 1 << (tokens - 1).bit_length())
    return -(-tokens // _LEAST_TOKENS) * _LEAST_TOKENS


def _kind(model: nn.Module) -> object:
    """Dtype and device of keys and values, which ``model.to`` changes."""
    return getattr(model, "dtype", None), device_of(model)


def decoder_for(model: nn.Module, tokens: int, sequences: int, compiled: bool = False) -> Decoder:
    """A Decoder with logits that reads prompts as the followed plan says, if there is one."""
    controller = controller_of(model)
    planned = 0 if controller is None or store_of(model) is None else controller.plan.prompt.chunk_tokens
    return Decoder(
        model,
        max_tokens=tokens,
        batch=sequences,
        compiled=compiled,
        logits=True,
        chunk_tokens=planned,
    )
