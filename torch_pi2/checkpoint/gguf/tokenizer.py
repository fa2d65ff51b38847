"""The tokenizer and chat template of a GGUF file, written in transformers' format."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from torch_pi2.base.fields import shown
from torch_pi2.errors import ArtifactError
from torch_pi2.store.gguf import GgufFile
from torch_pi2.store.trust import is_failure

#: ``tokenizer.ggml.pre`` of byte-level vocabularies with GPT-2's pre-tokenizer.
_GPT2 = "gpt-2"
#: Those for which llama.cpp ignores merges for words that are tokens, and adds the BOS token
#: unless the file says otherwise.
_LIKE_LLAMA3 = frozenset(
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano", "tekken")
)
#: Kinds of tokens.
_CONTROL, _USER_DEFINED = 3, 4
#: A space in the tokens of SentencePiece.
_SPACE = "\u2581"
_TOKENS = "tokenizer.ggml.tokens"
#: The template that llama.cpp calls rwkv-world.
RWKV_CHAT = (
    "{% for m in messages %}{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(m.role, '') + m.content.strip() }}"
    "{{ '\n\n' }}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def _splits() -> dict[str, str]:
    """``tokenizer.ggml.pre`` -> regular expression of the pre-tokenizer, where transformers knows it."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # before 5.24
        return {}
    return dict(GGUF_PRE_TOKENIZER_SPLITS)


def write_tokenizer(file: GgufFile, folder: Path) -> str:
    """Write the tokenizer into ``folder``. Returns why that is impossible; empty: it was written."""
    model, pre = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre", "")
    if model in (None, "none") or not isinstance(file.metadata.get(_TOKENS), list):
        return "the file has none"
    if model not in ("llama", "gpt2", "rwkv", "t5") or (model == "gpt2" and pre not in (_GPT2, *_splits())):
        return f"of a kind that transformers does not know, {shown(str(model))} {shown(str(pre))}"
    apart = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("add_space_prefix", "remove_extra_whitespaces"))
    if model == "t5" and not all(apart):
        return "it keeps spaces as they are, or begins without one, as transformers' T5 does not"
    arch = str(file.metadata.get("general.architecture"))
    _check_counts(file)
    try:
        from tokenizers import normalizers
        from transformers import PreTrainedTokenizerFast
        from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

        vocabulary, about = _described(file)
        given = [(left, right) for left, _, right in (merge.partition(" ") for merge in vocabulary.get("merges", ()))]
        if model == "gpt2":
            made = _byte_level(vocabulary["tokens"], vocabulary.get("token_type", ()), pre)
            about = {"add_bos_token": pre in _LIKE_LLAMA3, **about}
        elif model == "rwkv":
            made = longest_matches([_unescaped(token) for token in vocabulary["tokens"]], vocabulary.get("token_type"))
            if about.get("chat_template") == "rwkv-world":
                about["chat_template"] = RWKV_CHAT
        elif model == "t5":
            made, _ = convert_gguf_tokenizer(arch, vocabulary)
            if table := file.metadata.get("tokenizer.ggml.precompiled_charsmap"):  # of characters to replace
                made.normalizer = normalizers.Precompiled(bytes(table))
        else:  # merges apart, with which tokenizers take seconds
            made, _ = convert_gguf_tokenizer(arch, vocabulary | {"merges": []})
        ids = made.get_vocab(with_added_tokens=False)
        if model != "llama" or given:
            merges = _checked(given, ids)
        else:
            merges = _implied_merges(ids, None if arch.startswith("gemma") else vocabulary["scores"])
        if model == "llama" and not arch.startswith("gemma"):
            _as_llama_cpp_splits(made, file.metadata.get("tokenizer.ggml.add_space_prefix") is not False)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=_NotCopied(made), **about)
        tokenizer.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(_with_merges(made, merges), encoding="utf-8")
    except BaseException as error:  # transformers and tokenizers raise many types
        if not is_failure(error):
            raise
        return f"transformers cannot read it: {' '.join(str(error).split())[:200]}"
    return ""


def _check_counts(file: GgufFile) -> None:
    """Raises ArtifactError: fewer or more scores or kinds than tokens."""
    count, fix = len(file.metadata[_TOKENS]), "The file is damaged; get it again."
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        found = file.metadata.get(key)
        said = len(found) if isinstance(found, list) else shown(found)
        if found is not None and said != count:
            raise ArtifactError(f"{key} in {file.path}", expected=f"{count}, one a token", found=str(said), fix=fix)


class _NotCopied:
    """A tokenizer that transformers would copy, which takes as long as to parse it."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __deepcopy__(self, memo: Any) -> Any:
        return self._tokenizer


def _implied_merges(ids: Mapping[str, int], scores: Sequence[float] | None) -> list[tuple[str, str]]:
    """The merges of a SentencePiece vocabulary, best first (by scores, or in the vocabulary's order), as transformers
    finds them.
    """
    found = []
    for token, index in sorted(ids.items(), key=itemgetter(1)):
        score, size = -index if scores is None else scores[index], len(token)
        for cut in range(1, size):
            if (left := token[:cut]) in ids and (right := token[cut:]) in ids:
                found.append((score, cut, size - cut, left, right))
    found.sort(key=itemgetter(0, 1, 2), reverse=True)
    return [merge[3:] for merge in found]


def _checked(merges: list[tuple[str, str]], ids: Collection[str]) -> list[tuple[str, str]]:
    """Raises ValueError: a merge has words, or makes one, that are no tokens."""
    if strange := next((m for m in merges if m[0] not in ids or m[1] not in ids or m[0] + m[1] not in ids), None):
        raise ValueError(f"the merge {shown(strange)} is not of its vocabulary")
    return merges


def _with_merges(tokenizer: Any, merges: list[tuple[str, str]]) -> str:
    """``tokenizer.json`` of a tokenizer that lacks its merges.

    Each is a text of two words, as before tokenizers 0.20, which is read a third faster; not if words have spaces, or
    one begins with "#version", which is skipped as a file's first line.
    """
    words = [f"{left} {right}" for left, right in merges]
    found = merges if any(text.count(" ") > 1 or text.startswith("#version") for text in words) else words
    text = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    return str(tokenizer.to_str()).replace('"merges":[]', f'"merges":{text}', 1)


def _described(file: GgufFile) -> tuple[dict[str, Any], dict[str, Any]]:
    """Vocabulary and settings, as transformers' converters take them, without token ids outside the vocabulary."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    count = len(file.metadata[_TOKENS])

    def value(key: str) -> Any:
        found = file.metadata.get(key)
        if isinstance(found, list):
            return [one.decode() if isinstance(one, bytes) else one for one in found]
        is_token = type(found) is int and 0 <= found < count
        return found if is_token or not key.endswith("_token_id") else None

    vocabulary, about = (
        {name: found for key, name in names.items() if (found := value(f"tokenizer.{key}")) is not None}
        for names in (GGUF_TOKENIZER_MAPPING["tokenizer"], GGUF_TOKENIZER_MAPPING["tokenizer_config"])
    )
    if vocabulary["tokenizer_type"] == "llama":
        about.setdefault("add_bos_token", True)
    for name in ("bos", "eos", "unk", "pad"):
        token = vocabulary.get(f"{name}_token_id")
        about[f"{name}_token"] = None if token is None else vocabulary["tokens"][token]
    return vocabulary, about


def _byte_level(tokens: Sequence[str], kinds: Sequence[int], pre: str) -> Any:
    """A byte-level tokenizer with the file's own ids; transformers' converter renumbers special tokens beyond ASCII."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    ids = {token: index for index, token in enumerate(tokens)}
    if twice := next((token for index, token in enumerate(tokens) if ids[token] != index), None):
        raise ValueError(f"the token {shown(twice)} is in its vocabulary twice")
    made = Tokenizer(models.BPE(ids, [], ignore_merges=pre in _LIKE_LLAMA3))
    split = _splits().get(pre)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    steps = [bytes_] if split is None else [pre_tokenizers.Split(Regex(split), behavior="isolated"), bytes_]
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=False):
        if kind in (_CONTROL, _USER_DEFINED):
            made.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL)])
    return made


def _unescaped(token: str) -> bytes:
    """The bytes of a token of RWKV, which files have as Python writes them."""
    return token.encode("latin-1", "backslashreplace").decode("unicode_escape").encode("latin-1")


def longest_matches(tokens: Sequence[bytes], kinds: Sequence[int] | None = None) -> Any:
    """A tokenizer that takes the longest of all tokens at each byte, as RWKV does; ``kinds``: those of GGUF files.

    ``tokenizers`` has no such model: a pre-tokenizer's regular expression, the tree of all tokens, splits the text.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters, tree = bytes_to_unicode(), dict[str, Any]()
    words = ["".join(letters[byte] for byte in token) for token in tokens]
    normal = [word for word, kind in zip(words, kinds or [1] * len(words), strict=True) if kind == 1]
    for word in normal:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = None
    if len(tree) < 256 or any("" not in tree[letter] for letter in letters.values()):
        raise ValueError("it lacks a byte")
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}))
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([bytes_, pre_tokenizers.Split(Regex(_pattern(tree)), "isolated")])
    made.decoder = decoders.ByteLevel()
    controls = [word for word, kind in zip(words, kinds or ()) if kind == _CONTROL]
    made.add_tokens([AddedToken(word, normalized=False, special=True) for word in controls])
    return made


def _pattern(tree: Mapping[str, Any]) -> str:
    """A regular expression of the words in ``tree``, which finds the longest one."""
    ends = "".join(re.escape(letter) for letter, more in tree.items() if more is not None and [*more] == [""])
    longer = [re.escape(letter) + _pattern(more) for letter, more in tree.items() if more and [*more] != [""]]
    return f"(?:{'|'.join(longer + ([f'[{ends}]'] if ends else []))}){'?' if '' in tree else ''}"


def _as_llama_cpp_splits(tokenizer: Any, prefix: bool) -> None:
    """Make a SentencePiece tokenizer work on whole texts, as llama.cpp does; ``prefix``: add a leading space.

    The space precedes every text between special tokens, whatever its first character; decoding removes the first one.
    transformers' converter adds it to the first text only, and only if that has none.
    """
    from tokenizers import decoders, normalizers

    spaces: list[Any] = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    tokenizer.pre_tokenizer = None
    steps: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
