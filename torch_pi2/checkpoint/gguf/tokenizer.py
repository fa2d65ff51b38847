"""The tokenizer and chat template of a GGUF file, as transformers has them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import shown
from torch_pi2.store.gguf import MAGIC, GgufFile

#: ``tokenizer.ggml.pre`` of byte-level vocabularies that are split as GPT-2 does.
_GPT2 = "gpt-2"
#: Those for which llama.cpp takes a word that is a token whole, without merges, and begins a text with the BOS token
#: unless the file says otherwise.
_LIKE_LLAMA3 = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
#: Kinds of tokens.
_CONTROL, _USER_DEFINED = 3, 4
#: A space in the tokens of SentencePiece.
_SPACE = "\u2581"
#: What a file calls these.
_ID_KEYS = tuple(f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos", "unknown", "padding"))


def _splits() -> dict[str, str]:
    """``tokenizer.ggml.pre`` -> the regular expression that texts are split by, where transformers knows it."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # before 5.24
        return {}
    return dict(GGUF_PRE_TOKENIZER_SPLITS)


def write_tokenizer(file: GgufFile, folder: Path) -> str:
    """Write the tokenizer into ``folder``. Returns why there is none; empty: there is one."""
    model, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "")
    if model in (None, "none") or not isinstance(file.metadata.get("tokenizer.ggml.tokens"), list):
        return "the file has none"
    if model not in ("llama", "gpt2") or (model == "gpt2" and pre not in (_GPT2, *_splits())):
        return f"of a kind that transformers does not know, {shown(str(model))} {shown(str(pre))}"
    gemma = str(file.metadata.get("general.architecture")).startswith("gemma")
    try:
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

        with _readable(file, folder) as path:
            arch, vocabulary, about = get_gguf_tokenizer(str(path))
        if model == "gpt2":
            made = _byte_level(vocabulary["tokens"], vocabulary.get("token_type", ()), vocabulary["merges"], pre)
            about = {"add_bos_token": pre in _LIKE_LLAMA3, **about}
        else:
            made, _ = convert_gguf_tokenizer(arch, vocabulary)
        if model == "llama" and not gemma:
            _as_llama_cpp_splits(made, file.metadata.get("tokenizer.ggml.add_space_prefix") is not False)
        PreTrainedTokenizerFast(tokenizer_object=made, **about).save_pretrained(folder)
    except Exception as error:  # transformers and tokenizers raise many types
        return f"transformers cannot read it: {' '.join(str(error).split())[:200]}"
    return ""


@contextmanager
def _readable(file: GgufFile, folder: Path) -> Iterator[Path]:
    """What transformers reads: the file, or a copy of its header in ``folder``, before nothing.

    Of a file that begins otherwise, or names tokens that are none, such as 4294967295, which llama.cpp leaves out.
    """
    count = len(file.metadata["tokenizer.ggml.tokens"])
    odd = [key for key in _ID_KEYS if not _is_token(file.metadata.get(key, 0), count)]
    if file.magic == MAGIC and not odd:
        yield file.path
        return
    copy = folder / "header.gguf"
    with open(file.path, "rb") as whole:
        header = whole.read(min((tensor.start for tensor in file.tensors.values()), default=file.size))
    for key in odd:
        header = header.replace(key.encode(), key.replace("ggml", "none").encode())
    copy.write_bytes(MAGIC + header[len(MAGIC) :])
    os.truncate(copy, file.size)  # tensors are holes, which take no space
    try:
        yield copy
    finally:
        copy.unlink()


def _is_token(value: object, count: int) -> bool:
    return type(value) is int and 0 <= value < count


def _byte_level(tokens: Sequence[str], kinds: Sequence[int], merges: Sequence[str], pre: str) -> Any:
    """A byte-level vocabulary with the file's own ids, whatever characters its special tokens have.

    transformers' own reader knows special tokens of ASCII alone, gives others new ids, and adds one that no file has.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    made = Tokenizer(models.BPE(ids, pairs, ignore_merges=pre in _LIKE_LLAMA3))
    split = _splits().get(pre)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [bytes_] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated"), bytes_]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return made


def _as_llama_cpp_splits(tokenizer: Any, prefix: bool) -> None:
    """A SentencePiece vocabulary over a text whole, as llama.cpp takes it: ``prefix``: with a space before it.

    The space goes before every text between special tokens, whatever that begins with; answers lose the first one.
    transformers' own reader has it before the first text only, and only where there is none.
    """
    from tokenizers import decoders, normalizers

    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
