"""Small tokenizers, trained here: of bytes, and of every kind that the runner reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

TRAINED = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
TEXT = "".join(f"def f{i}(x, y={i}):\n    return x * {i % 7} + y\n\n" for i in range(50))


def byte_tokenizer(text: str, size: int = 300, bos: bool = False) -> PreTrainedTokenizerFast:
    """A small byte-level BPE tokenizer made from ``text``; with ``bos`` it starts every text with one."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator([text], trainer)
    if bos:
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="<s>", pad_token="<s>")


def _byte_level(regex: str, normalizer: Any = None, **options: Any) -> Tokenizer:
    raw = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        raw.normalizer = normalizer
    split = pre_tokenizers.Split(Regex(regex), "isolated")
    raw.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    _train(raw, ["<|bos|>"], pre_tokenizers.ByteLevel.alphabet())
    raw.add_special_tokens([AddedToken("<|end|>", rstrip=True), AddedToken("<mask>", lstrip=True)])
    raw.add_tokens([AddedToken("Tool", single_word=True), "<tool>"])
    template = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    raw.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return raw


def _sentencepiece(normalizer: Any, pre_tokenizer: Any, decoder: Any) -> Tokenizer:
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    _train(raw, ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))], [])
    description = json.loads(raw.to_str())
    description["added_tokens"] = description["added_tokens"][:3]  # bytes are no added tokens in real models
    description["pre_tokenizer"] = None
    raw = Tokenizer.from_str(json.dumps(description))
    if normalizer is not None:
        raw.normalizer = normalizer
    if pre_tokenizer is not None:
        raw.pre_tokenizer = pre_tokenizer
    raw.decoder = decoder
    raw.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    return raw


def _odd() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    split = pre_tokenizers.Split
    raw.pre_tokenizer = pre_tokenizers.Sequence(
        [
            split(" ", "merged_with_previous"),
            split(Regex("[a-c]+"), "removed"),
            split(Regex("x+|y"), "merged_with_next"),
            split(Regex("[0-4]"), "contiguous"),
            split(Regex("[^,]+"), "removed", invert=True),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(),
        ]
    )
    raw.decoder = decoders.ByteLevel()
    return _train(raw, [], pre_tokenizers.ByteLevel.alphabet())


def _train(raw: Tokenizer, special: list[str], alphabet: list[str]) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=300, show_progress=False
    )
    raw.train_from_iterator(
        [TEXT, "日本語 한국어 été café Straße ﬁ ½ Å 🙂👍🏽 The tool's 'Tools', we'll see. " * 9], trainer
    )
    return raw


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


TOKENIZERS = {
    "gpt2": lambda: Tokenizer.from_file(str(TRAINED / "tokenizer.json")),
    "llama3": lambda: _byte_level(_LLAMA3, ignore_merges=True),
    "qwen": lambda: _byte_level(_O200K, normalizers.NFC()),
    "nfkd": lambda: _byte_level(_LLAMA3, normalizers.NFKD()),
    "llama2": lambda: _sentencepiece(
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        None,
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    ),
    "mistral": lambda: _sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), decoders.Metaspace(prepend_scheme="first")
    ),
    "odd": _odd,
}
