"""``Decoder``: greedy decoding over a static KV cache, one compiled graph a token.

What Hugging Face's forward spends in Python (about 140 us a layer) is as much as a sparse layer of a small model.
The whole step is therefore captured once (``fullgraph``), with our operators as calls that Inductor leaves alone, and
runs without guards: this class owns everything that guards would look at.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_pi2.errors import ConfigError, ShapeError, UnsupportedModelError
from torch_pi2.runtime.attention import packed_attention

#: Inductor settings of the step. Asserts on sizes and guards cost more than the small kernels between our operators,
#: which do not gain from a second thread either. freezing would copy the weights.
_INDUCTOR = {
    "freezing": False,
    "size_asserts": False,
    "alignment_asserts": False,
    "scalar_asserts": False,
    "cpp.dynamic_threads": True,
    "cpp.min_chunk_size": 16384,
}


class Decoder:
    """Greedy continuation of prompts of equal length.

    The model must not be changed (rewritten, moved, converted) while a compiled decoder of it is in use: that would
    not be seen. New values in the same tensors are.

    Args:
        model: a Hugging Face causal language model on the CPU, dense or optimised, in evaluation mode.
        max_tokens: room of the KV cache, prompt and answer together.
        batch: sequences decoded together.
        backend: what compiles a step; ``torch_pi2`` makes one call of linears with the same input.
        compiled: run each step through ``torch.compile`` (compiled at the first step: 5 to 30 s for 32 layers).
            Lossless but for roundings: Inductor keeps float32 between operations that it fuses.
        cpp_wrapper: let Inductor write the code between kernels in C++ too: per layer and token some 10 us less, but a
            minute more to compile (Inductor keeps both on disk).

    Raises:
        UnsupportedModelError: the model's cache cannot be static (state-space layers), or has a sliding window shorter
            than ``max_tokens``.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        max_tokens: int,
        batch: int = 1,
        backend: str = "torch_pi2",
        compiled: bool = True,
        cpp_wrapper: bool = False,
    ) -> None:
        if max_tokens < 2 or batch < 1:
            raise ConfigError(
                "max_tokens, batch",
                expected="at least 2 and 1",
                found=f"{max_tokens}, {batch}",
                fix="max_tokens is the length of prompt and answer together.",
            )
        self.model, self.max_tokens, self.batch = model, max_tokens, batch
        self.length = 0
        self.cache = static_cache(model, max_tokens)
        self._settings = _INDUCTOR | {"cpp_wrapper": cpp_wrapper}
        self._step: Any = self._forward
        if compiled:
            # every decoder's own: with the guards gone, another one's code would fit too
            compile_step: Any = torch.compile
            self._step = compile_step(
                self._forward,
                fullgraph=True,
                dynamic=False,
                backend=backend,
                options={"guard_filter_fn": torch.compiler.skip_all_guards_unsafe},
                isolate_recompiles=True,
            )

    def _forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        output = self.model(input_ids=ids_BT, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        next_B1: torch.Tensor = output.logits[:, -1].argmax(-1, keepdim=True)
        return next_B1

    @torch.inference_mode()
    def prompt(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """Forget what was before, read a prompt (int64 ``[B, T]``), return the next tokens ``[B, 1]``.

        Raises:
            ShapeError: another batch size, or a prompt that leaves no room.
        """
        batch, tokens = ids_BT.shape
        if batch != self.batch or not 1 <= tokens < self.max_tokens:
            raise ShapeError(
                "prompt",
                expected=f"[{self.batch}, 1 to {self.max_tokens - 1}]",
                found=str(list(ids_BT.shape)),
                fix="Make a Decoder for this batch and length.",
            )
        self.length = 0  # whatever happens below, what was before is gone
        self.cache.reset()
        with packed_attention(self.model):
            next_B1 = self._forward(ids_BT)
        self.length = tokens
        return next_B1

    @torch.inference_mode()
    def step(self, next_B1: torch.Tensor) -> torch.Tensor:
        """Feed one token per sequence, int64 ``[B, 1]``; returns the next ones. A step that fails can be repeated.

        Raises:
            ShapeError: the cache is full, no prompt has been read, or another batch size.
        """
        if self.length == 0:
            raise ShapeError(
                "decoding step",
                expected="a prompt before it",
                found="none that was read to its end",
                fix="Call prompt(ids) first; it returns the token to begin with.",
            )
        if self.length >= self.max_tokens or next_B1.shape != (self.batch, 1):
            raise ShapeError(
                "decoding step",
                expected=f"[{self.batch}, 1] and fewer than {self.max_tokens} tokens before it",
                found=f"{list(next_B1.shape)} after {self.length} tokens",
                fix="Make a Decoder with more max_tokens, or for this batch.",
            )
        try:
            if self._step is not self._forward and not self._compiled_once:
                result = self._first_step(next_B1)
            else:
                result = self._step(next_B1)
            self.length += 1
        except BaseException:
            # Layers before the one that failed have the token already: repeated, it would be there twice.
            for layer in self.cache.layers:
                layer.cumulative_length.fill_(self.length)
            raise
        return result

    _compiled_once = False

    def _first_step(self, next_B1: torch.Tensor) -> torch.Tensor:
        import torch._inductor.config as inductor

        with packed_attention(self.model), inductor.patch(self._settings):
            result: torch.Tensor = self._step(next_B1)
        self._compiled_once = True
        return result


def static_cache(model: nn.Module, max_tokens: int) -> Any:
    """transformers' ``StaticCache`` for ``model``; windows that ``max_tokens`` never fills are left out (lossless).

    Raises:
        UnsupportedModelError: see :class:`Decoder`.
    """
    from transformers import StaticCache
    from transformers.cache_utils import StaticLayer

    config: Any = model.config
    cache = StaticCache(config=config, max_cache_len=max_tokens)
    for i, layer in enumerate(cache.layers):
        window = getattr(config, "sliding_window", None) or 0
        if type(layer) is not StaticLayer and isinstance(layer, StaticLayer) and layer.is_sliding:
            if window < max_tokens:
                raise UnsupportedModelError(
                    f"KV cache of layer {i}",
                    expected=f"a window of at least {max_tokens} tokens",
                    found=f"a sliding window of {window}",
                    fix="Decode fewer tokens, or use model.generate.",
                )
            cache.layers[i] = StaticLayer(max_cache_len=max_tokens)
        elif type(layer) is not StaticLayer:
            raise UnsupportedModelError(
                f"KV cache of layer {i}",
                expected="keys and values of plain attention",
                found=type(layer).__name__,
                fix="Use model.generate.",
            )
    return cache
