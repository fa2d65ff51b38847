"""Vocabularies of GGUF files: the ids of llama.cpp, whose way of merging SentencePiece's is written here once more."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer

from torch_pi2.checkpoint.gguf.tokenizer import write_tokenizer
from torch_pi2.errors import ArtifactError
from torch_pi2.store.gguf import GgufFile

UNKNOWN, CONTROL, USER, BYTE, NORMAL = 2, 3, 4, 6, 1
WORDS = "the cat sat on a mat and   the  rat. def read(self):\n    return self.name Grüße von hier, aaa aaaa aaaaa"
TEXTS = (
    *("", " ", "  ", "the cat", " the cat", "   the  rat", "the cat ", "\n", " \n the", "aaaaaaa", "Grüße", "你好 🙂"),
    *(
        "<|user|>the cat</s>",
        "<|user|> the cat</s> mat",
        "the<|user|>",
        " <|user|>  ",
        "a<think>b </think> c",
        "<s>the",
    ),
    *("\u2581the", "the\u2581cat", "<0x41>", "def read(self):\n\n    return"),
)


def pieces() -> dict[str, tuple[float, int]]:
    """Token -> score and kind: merges of pairs that are frequent in ``WORDS``, the earlier the higher the score."""
    found: dict[str, tuple[float, int]] = {"<unk>": (0.0, UNKNOWN), "<s>": (0.0, CONTROL), "</s>": (0.0, CONTROL)}
    found |= {f"<0x{byte:02X}>": (0.0, BYTE) for byte in range(256)}
    text = ["\u2581" if one == " " else one for one in f" {WORDS}"]
    merged: list[str] = []
    for _ in range(60):
        pairs = [left + right for left, right in itertools.pairwise(text) if "\n" not in left + right]
        best = max(sorted(set(pairs)), key=pairs.count)
        merged.append(best)
        made: list[str] = []
        for one in text:
            if made and made[-1] + one == best:
                made[-1] = best
            else:
                made.append(one)
        text = made
    found |= {token: (-float(rank), NORMAL) for rank, token in enumerate(dict.fromkeys(merged))}
    singles = sorted(set(WORDS) - set(" \n"))
    found |= {one: (-float(len(found) + i), NORMAL) for i, one in enumerate(["\u2581", *singles])}
    return found | {"<|user|>": (0.0, CONTROL), "<think>": (0.0, USER), "</think>": (0.0, USER)}


def file_with(path: Path, prefix: bool | None, add_bos: bool = True) -> GgufFile:
    writer, known = gguf.GGUFWriter(path, "llama"), pieces()
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(list(known))
    writer.add_token_scores([score for score, _ in known.values()])
    writer.add_token_types([kind for _, kind in known.values()])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, step)()
    writer.close()
    return GgufFile(path)


def merged_ids(text: str, ids: dict[str, int], scores: dict[str, float]) -> list[int]:
    """As llama.cpp: of neighbours whose join is a token, the best score first, of equal ones the leftmost."""
    parts = list(text.replace(" ", "\u2581"))
    while True:
        joins = [(scores[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in scores]
        if not joins:
            break
        at = -max(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    found: list[int] = []
    for part in parts:
        found += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return found


def reference(text: str, prefix: bool) -> list[int]:
    known = pieces()
    ids = {token: index for index, token in enumerate(known)}
    scores = {token: score for token, (score, kind) in known.items() if kind == NORMAL}
    whole = [token for token, (_, kind) in known.items() if kind in (CONTROL, USER)]
    found, rest, special = [1], text, True
    while rest:
        places = [(rest.find(token), -len(token), token) for token in whole if token in rest]
        at, _, token = min(places, default=(len(rest), 0, ""))
        if at:
            found += merged_ids((" " if prefix and special else "") + rest[:at], ids, scores)
            special = False
        if token:
            found.append(ids[token])
            special = True
        rest = rest[at + len(token) :]
    return found


@pytest.mark.parametrize("prefix", [None, True, False])
def test_ids(tmp_path: Path, prefix: bool | None) -> None:
    with file_with(tmp_path / "a.gguf", prefix) as file:
        assert write_tokenizer(file, tmp_path) == ""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')  # which has a tokenizer of its own
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chance = random.Random(0)
    some = ["".join(chance.choices([*WORDS, "<|user|>", "<think>", " "], k=12)) for _ in range(200)]
    for text in (*TEXTS, *some):
        wanted = reference(text, prefix is not False)
        assert tokenizer(text)["input_ids"] == wanted, text
        if "<" not in text:
            assert tokenizer.decode(wanted, skip_special_tokens=True) == text.replace("\u2581", " ")


def test_a_token_that_is_there_twice(tmp_path: Path) -> None:
    """A byte was changed: one of the two would have no text."""
    path = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
    (tmp_path / "a.gguf").write_bytes(path.read_bytes().replace(b"[PAD314]", b"[PAD313]"))
    with GgufFile(tmp_path / "a.gguf") as file:
        assert "the token '[PAD313]' is in its vocabulary twice" in write_tokenizer(file, tmp_path)


@pytest.mark.parametrize("key", ["scores", "token_type"])
def test_fewer_scores_or_kinds_than_tokens(tmp_path: Path, key: str) -> None:
    with file_with(tmp_path / "a.gguf", None) as file:
        file.metadata[f"tokenizer.ggml.{key}"].pop()
        count = len(pieces())
        with pytest.raises(ArtifactError, match=rf"{key} in .*a\.gguf: expected {count}, .*, found {count - 1}"):
            write_tokenizer(file, tmp_path)


@pytest.mark.parametrize("said", [0xFFFFFFFF, 5000])
def test_tokens_that_are_none(tmp_path: Path, said: int) -> None:
    """As some converters write what a model has not; llama.cpp leaves them out."""
    with file_with(tmp_path / "a.gguf", None):
        data = bytearray((tmp_path / "a.gguf").read_bytes())
    key = b"tokenizer.ggml.eos_token_id"
    at = data.index(key) + len(key) + 4  # after the type
    data[at : at + 4] = said.to_bytes(4, "little")
    (tmp_path / "a.gguf").write_bytes(data)
    with GgufFile(tmp_path / "a.gguf") as file:
        assert write_tokenizer(file, tmp_path) == ""
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert (tokenizer.eos_token, tokenizer.bos_token_id) == (None, 1)
    assert tokenizer(TEXTS[0])["input_ids"] == reference(TEXTS[0], True)


def test_without_a_first_token(tmp_path: Path) -> None:
    with file_with(tmp_path / "a.gguf", None, add_bos=False) as file:
        assert write_tokenizer(file, tmp_path) == ""
    assert AutoTokenizer.from_pretrained(tmp_path)("the cat")["input_ids"] == reference("the cat", True)[1:]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", [True, False])
def test_beside_llama_cpp(tmp_path: Path, prefix: bool) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    file_with(tmp_path / "a.gguf", prefix).close()
    engine = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    for text in TEXTS:
        found = engine.tokenize(text.encode(), add_bos=True, special=True)
        assert found == reference(text, prefix), text


#: Not of ASCII, as DeepSeek's are, nor all of them in use.
BARS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>", "你好")
BYTE_TEXTS = (
    *("", " ", "the cat", " the cat", "xylo", " zzz xylophone", "it's I'M 12345", "a\n\n b", "\r\n\t x", "Grüße 🙂"),
    *("<｜User｜>the cat<think>\n", "a<｜end▁of▁sentence｜>", "<|endoftext|>", "café 你好!"),
)


def byte_file(path: Path, pre: str, *, add_bos: bool | None = None, arch: str = "llama") -> Path:
    """Byte-level pairs of ``WORDS`` and, as no pair leads to them, ``xylo`` and `` zzz``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    made = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), behavior="isolated")
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([WORDS] * 20, trainer)
    model = json.loads(made.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "xylo", "Ġzzz"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*tokens, *BARS])
    writer.add_token_types([NORMAL] * len(tokens) + [CONTROL] * 3 + [USER] * 2)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, step)()
    writer.close()
    return path


def opened(path: Path) -> Any:
    with GgufFile(path) as file:
        assert write_tokenizer(file, path.parent) == ""
        kind = file.metadata["general.architecture"]
    (path.parent / "config.json").write_text(json.dumps({"model_type": kind}))
    return AutoTokenizer.from_pretrained(path.parent)


@pytest.mark.parametrize(("pre", "arch"), [("llama-bpe", "llama"), ("tekken", "llama"), ("deepseek-r1-qwen", "qwen2")])
@pytest.mark.parametrize("add_bos", [None, True, False])
def test_byte_level(tmp_path: Path, pre: str, arch: str, add_bos: bool | None) -> None:
    """The first token, words that no merges lead to, special tokens of any letters: the ids are the file's."""
    tokenizer = opened(byte_file(tmp_path / "a.gguf", pre, add_bos=add_bos, arch=arch))
    like_llama3 = pre != "deepseek-r1-qwen"
    first = len(tokenizer) - len(BARS)
    start = [first] if add_bos or (add_bos is None and like_llama3) else []
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (first, first + 1)
    assert tokenizer("")["input_ids"] == start
    assert (tokenizer("xylo zzz")["input_ids"] == [*start, first - 2, first - 1]) == like_llama3
    assert tokenizer("<｜User｜><think>你好<｜end▁of▁sentence｜>")["input_ids"] == [
        *start,
        *(first + i for i in (2, 3, 4, 1)),
    ]
    for text in BYTE_TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert max(ids, default=0) < first + len(BARS), text
        assert tokenizer.decode(ids[len(start) :]) == text
    assert (
        tokenizer.decode([first + 2, *tokenizer("the cat")["input_ids"][len(start) :]], skip_special_tokens=True)
        == "the cat"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("pre", "arch"), [("llama-bpe", "llama"), ("tekken", "llama"), ("deepseek-r1-qwen", "qwen2")])
def test_byte_level_beside_llama_cpp(tmp_path: Path, pre: str, arch: str) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp")
    tokenizer = opened(byte_file(tmp_path / "a.gguf", pre, arch=arch))
    engine = llama_cpp.Llama(str(tmp_path / "a.gguf"), vocab_only=True, verbose=False)
    for text in BYTE_TEXTS:
        assert tokenizer(text)["input_ids"] == engine.tokenize(text.encode(), add_bos=True, special=True), text
