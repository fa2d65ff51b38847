"""``torch_pi2.generate``: one or several continuations of a prompt, decoded together.

Best-of-N is why phones decode in batches (PowerInfer-2, arXiv 2406.06282, section 7.2.3). The prompt is read once, and
each step reads the weights once for all sequences. As sequences end, the batch and its KV cache shrink.
"""

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import argument, checked
from torch_pi2.base.progress import log
from torch_pi2.decode.decoder import Decoder, check_vocabulary
from torch_pi2.decode.hf_generate import decoder_for, pool_of
from torch_pi2.decode.sequence import GeneratedSequence, Sampling, decode_loop, end_tokens, pick
from torch_pi2.decode.speculate import Drafts, Speculator, speculator
from torch_pi2.errors import ConfigError, ShapeError
from torch_pi2.store.trust import tokenizer_of

#: Settings of a generation configuration that :func:`generate` ignores, and their neutral values.
_IGNORED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("repetition_penalty", "guidance_scale", "num_beams"), (None, 1)),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens"), (None, 0)),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), (None,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id"), (None,)),
}


@dataclass(frozen=True)
class Generated:
    """The result of :func:`generate`.

    Attributes:
        sequences: new tokens of each sequence, with its end token.
        batches: number of sequences in each step. step_ms: milliseconds of each step.
        prompt_ms: prefill time in milliseconds (an assistant reads the prompt in the step of its first drafts).
        drafts: statistics of speculative decoding, if it was used.
        prompt, tokenizer, ends: for :attr:`text`; the tokenizer is None if the prompt was given as ids.
    """

    sequences: list[list[int]]
    batches: list[int]
    step_ms: list[float]
    prompt_ms: float
    drafts: Drafts | None = None
    prompt: list[int] = field(default_factory=list, repr=False)
    tokenizer: Any = field(default=None, repr=False, compare=False)
    ends: Collection[int] = field(default=(), repr=False)

    @property
    def text(self) -> str:
        """Text of the first sequence, without the prompt. Raises ConfigError: the prompt was given as ids."""
        return self.texts[0]

    @property
    def texts(self) -> list[str]:
        """:attr:`text` of each sequence."""
        if self.tokenizer is None:
            found = "none: the prompt was given as token ids"
            fix = "Pass text, or tokenizer=..., or decode the sequences yourself."
            raise ConfigError("text of what was generated", expected="a tokenizer", found=found, fix=fix)
        texts = [tokens[:-1] if tokens[-1:] and tokens[-1] in self.ends else tokens for tokens in self.sequences]
        return [_continuation(self.tokenizer, self.prompt, tokens) for tokens in texts]

    @property
    def steps(self) -> int:
        """Forwards after the prompt's."""
        return len(self.batches)


@checked
def generate(
    model: nn.Module,
    input_ids: torch.Tensor | str,
    *,
    tokenizer: Any = None,
    num_return_sequences: int = 1,
    max_new_tokens: int = 64,
    do_sample: bool = False,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    eos_token_id: int | list[int] | None = None,
    seed: int = 0,
    compiled: bool = False,
    streamer: Callable[[int, int], object] | None = None,
    decoder: Decoder | None = None,
    prompt_lookup: int | None = None,
    assistant_model: nn.Module | None = None,
    draft_tokens: int | None = None,
    kv: str | None = None,
) -> Generated:
    """Continue one prompt ``num_return_sequences`` times.

    Greedy sequences equal that of ``model.generate``. With sampling, sequence i is the one that ``seed + i`` gives
    alone, except where the last bits of PyTorch's matrix products differ with the batch size.

    One sequence can be decoded speculatively: ``prompt_lookup`` or ``assistant_model`` drafts the next tokens, and one
    pass over the weights verifies several. If linear layers, feed-forward layers and head are ours
    (``weights="int4"`` or ``"int8"``; see :meth:`torch_pi2.Decoder.verify`), the text is bit by bit that of plain
    decoding. PyTorch's float products of several tokens have other last bits than those of one, so at a near tie the
    other token may win. Drafting pauses while it does not pay (:class:`~torch_pi2.decode.speculate.Pace`): answers of
    128 tokens or more take at most 1.03 times as long. Over a store it seldom pays, as each token needs other neurons
    (docs/SPECULATION.md).

    Args:
        model: see :class:`torch_pi2.Decoder`; dense or optimised.
        input_ids: int64 ``[1, T]``; or text, with which the result has ``text``.
        tokenizer: for text (default: that of the folder from which the model was loaded).
        max_new_tokens: maximum number of new tokens of each sequence.
        do_sample: draw tokens from softmax(logits / ``temperature``), among the ``top_k`` most likely (0: all), and of
            these among the fewest whose probabilities add up to ``top_p``.
        eos_token_id: ends a sequence (an empty list: nothing does). Default: the model's; with text or ``tokenizer``
            also the tokenizer's, and the token that ends an answer in its chat template.
        compiled: run steps through ``torch.compile``, one graph for each number of sequences: worth it for long
            answers, or with ``decoder``. Drafts take one more graph.
        streamer: called with (sequence, token) for each new token.
        decoder: a Decoder of this model to use, with ``logits`` and room for the sequences and tokens; it keeps its
            compiled steps.
        prompt_lookup: draft up to this many tokens, 1 to 7, that followed the last few tokens earlier in the text; 0:
            none. Default: 2 for one sequence without an assistant, where weights are in memory and passes have the
            bits of steps (int8 activations, all linear layers ours, not compiled).
        assistant_model: a smaller causal language model of the same vocabulary, which drafts ``draft_tokens``, 1 to 7
            (default: 3), among the first 49,152 ids unless the prompt has many others. It has a separate KV cache.
        kv: ``int8`` or ``int4``: format of keys and values, see :class:`torch_pi2.Decoder` (lossy; with ``decoder``,
            that has its own).

    Raises:
        ConfigError: a setting is invalid, text without a tokenizer, or more tokens than the model's table of positions
            has. ShapeError: not one prompt.
        UnsupportedModelError: see :class:`torch_pi2.Decoder`.
        NonFiniteError: logits are NaN or infinite, as where float16 overflows.
        ArtifactError: the store of the model cannot be read.
    """
    if isinstance(input_ids, str):
        tokenizer = tokenizer_of(model, tokenizer, "generate(text)")
        ids = list(tokenizer(input_ids)["input_ids"])
        input_ids = torch.tensor([ids], dtype=torch.int64, device="cpu")
    _check(input_ids, num_return_sequences, max_new_tokens)
    text: dict[str, Any] = {} if tokenizer is None else {"prompt": input_ids[0].tolist(), "tokenizer": tokenizer}
    if num_return_sequences > 1 and (prompt_lookup or assistant_model is not None):
        found, fix = f"num_return_sequences={num_return_sequences}", "Several sequences are decoded step by step."
        name = "prompt_lookup" if assistant_model is None else "assistant_model"
        raise ConfigError(name, expected="one sequence", found=found, fix=fix)
    sampling = Sampling(temperature, top_k, top_p) if do_sample else None
    tokens = input_ids.shape[1]
    room = max(2, tokens + max_new_tokens - 1)  # the last token is not fed
    ends = end_tokens(model, eos_token_id, tokenizer)
    _warn(model, tokens + max_new_tokens, do_sample or (temperature, top_k, top_p) == (1.0, 0, 1.0))
    pool = None if compiled or kv or decoder is not None else pool_of(model)
    if decoder is not None and kv is not None:
        argument(kv, "generate(kv)", "Make the Decoder with it.").wrong("None with a decoder, which has its own")
    if decoder is not None:
        _check_decoder(decoder, model, num_return_sequences, room)
    elif pool is not None:
        decoder = pool.acquire(model, room, num_return_sequences)
    else:
        decoder = decoder_for(model, room, num_return_sequences, compiled, kv)
    check_vocabulary(model, input_ids)  # the model takes ids, or it would have no decoder
    sequences = [GeneratedSequence(i, seed, max_new_tokens, ends, streamer) for i in range(num_return_sequences)]
    most = tokens + max_new_tokens
    lookup = 0 if num_return_sequences > 1 else prompt_lookup
    drafts = speculator(decoder, most, lookup, assistant_model, draft_tokens)
    if drafts is not None:
        result = _speculated(decoder, sequences[0], input_ids, sampling, drafts)
        drafts.source.release()
    else:
        result = _continued(decoder, sequences, input_ids, sampling, max_new_tokens)
    if pool is not None:
        pool.release(decoder)
    return replace(result, ends=ends, **text)


def _speculated(
    decoder: Decoder, sequence: GeneratedSequence, ids_1T: torch.Tensor, sampling: Sampling | None, drafts: Speculator
) -> Generated:
    def take(logits_V: torch.Tensor) -> None:
        sequence.append(pick(logits_V, sampling, sequence.random))

    started = time.perf_counter()
    logits_V, prompt = decoder.prompt(ids_1T)[0].cpu(), ids_1T[0].tolist()
    drafts.source.begin(prompt)
    prompt_ms, step_ms = (time.perf_counter() - started) * 1e3, list[float]()
    most = drafts.pace.counts[-1]
    if most < sequence.left - 1:  # else the answer is too short for a pass
        decoder.compile_passes(most + 1)
    take(logits_V)
    while sequence.ended is None:
        step_ms.append(drafts.forward(decoder, prompt, sequence, take))
    return Generated([sequence.tokens], [1] * len(step_ms), step_ms, prompt_ms, drafts.drafts)


def _continued(
    decoder: Decoder, sequences: list[GeneratedSequence], input_ids: torch.Tensor, sampling: Sampling | None, limit: int
) -> Generated:
    started = time.perf_counter()
    logits_BV = decoder.prompt(input_ids).cpu()
    prompt_ms = (time.perf_counter() - started) * 1e3
    live, step_ms, batches = sequences, list[float](), list[int]()
    if len(sequences) > 1 and limit > 1:
        decoder.fork(len(sequences))

    def step(going: list[GeneratedSequence]) -> Iterable[tuple[GeneratedSequence, torch.Tensor]]:
        nonlocal live
        if len(going) < len(live):
            live = [live[row] for row in decoder.retain([row for row, s in enumerate(live) if s.ended is None])]
        started = time.perf_counter()
        ids_B1 = torch.tensor([[sequence.tokens[-1]] for sequence in live], dtype=torch.int64, device="cpu")
        logits_BV = decoder.step(ids_B1).cpu()  # waits for a GPU
        step_ms.append((time.perf_counter() - started) * 1e3)
        batches.append(len(live))
        return zip(live, logits_BV, strict=True)

    def chosen(sequence: GeneratedSequence, logits_V: torch.Tensor) -> int:
        return pick(logits_V, sampling, sequence.random)

    decode_loop(sequences, repeat(logits_BV[0]), step, chosen)
    return Generated([sequence.tokens for sequence in sequences], batches, step_ms, prompt_ms)


def _continuation(tokenizer: Any, prompt: list[int], tokens: list[int]) -> str:
    """Text of ``tokens``, with the space that some tokenizers put only after other words."""
    before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, prompt + tokens))
    alone = not whole.startswith(before)
    text = tokenizer.decode(tokens, skip_special_tokens=True) if alone else whole.removeprefix(before)
    return str(text)


def ignored_settings(model: nn.Module) -> list[str]:
    """Settings of the model's generation configuration that :func:`generate` ignores."""
    config = getattr(model, "generation_config", None)
    return [name for name, none in _IGNORED.items() if getattr(config, name, None) not in none]


def _warn(model: nn.Module, tokens: int, sampled: bool) -> None:
    if asked := ignored_settings(model):
        log.warning("generate: the model's generation configuration has %s, which is not applied", ", ".join(asked))
    made_for = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if isinstance(made_for, int) and tokens > made_for:
        log.warning("generate: %d tokens with the prompt, where the model was made for %d", tokens, made_for)
    if not sampled:
        log.warning("generate: temperature, top_k and top_p change nothing without do_sample=True")


def _check(input_ids: torch.Tensor, sequences: int, max_new_tokens: int) -> None:
    for name, value in (("num_return_sequences", sequences), ("max_new_tokens", max_new_tokens)):
        if value < 1:
            raise ConfigError(name, expected="1 or more", found=str(value), fix="Choose a larger number.")
    if input_ids.dim() != 2 or input_ids.shape[0] != 1 or input_ids.shape[1] < 1 or input_ids.dtype != torch.int64:
        expected, fix = "one prompt, int64 [1, tokens]", "Call it once for each prompt; model.generate takes several."
        found = f"{dtype_name(input_ids.dtype)} {list(input_ids.shape)}"
        raise ShapeError("input_ids", expected=expected, found=found, fix=fix)


def _check_decoder(decoder: Decoder, model: nn.Module, sequences: int, tokens: int) -> None:
    good = decoder.model is model and decoder.logits and decoder.rows >= sequences and decoder.max_tokens >= tokens
    if not good:
        of = "this" if decoder.model is model else "another"
        expected = f"one of this model with logits, for {sequences} sequences and {tokens} tokens"
        room = f"for {decoder.rows} sequences and {decoder.max_tokens} tokens"
        found = f"one of {of} model with{'' if decoder.logits else 'out'} logits, {room}"
        raise ConfigError("decoder", expected=expected, found=found, fix="Make another, or leave it out.")
