"""RWKV-7, which transformers does not have: as llama.cpp and the package rwkv compute it, from their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ggufs
import pytest
import rwkv7s
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

import torch_pi2
from torch_pi2.checkpoint.gguf.families import configuration
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint
from torch_pi2.checkpoint.gguf.tokenizer import longest_matches
from torch_pi2.errors import ArtifactError, Pi2Error
from torch_pi2.layers import rwkv7

SAID = json.loads((Path(__file__).parents[1] / "data" / "gguf" / "tiny-rwkv7.json").read_text())
IDS = torch.tensor([SAID["tokens"]])


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rwkv7s.written(tmp_path_factory.mktemp("rwkv7") / "tiny.gguf")


@pytest.fixture(scope="module")
def dense(file: Path) -> Any:
    """With the file's numbers, not as neurons."""
    with GgufCheckpoint(file) as checkpoint:
        model = rwkv7.RWKV7ForCausalLM(rwkv7.RWKV7Config(**configuration(checkpoint.file))).eval()
        model.load_state_dict({name: checkpoint.read(name) for name in model.state_dict()})
        assert checkpoint.unused() == []
    return model


@pytest.fixture(scope="module")
def imported(file: Path) -> Path:
    torch_pi2.import_gguf(file, file.parent / "out")
    return file.parent / "out"


def off(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made - wanted).abs().max() / wanted.abs().max())


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits[0]


@pytest.mark.parametrize(("engine", "most"), [("rwkv", 1e-5), ("llama.cpp", 1e-5)])
def test_logits_of_other_engines(dense: Any, engine: str, most: float) -> None:
    assert off(logits(dense)[-2:], torch.tensor(SAID[engine])) < most


@pytest.mark.parametrize("tokens", [1, 2, 15, 16])
def test_tokens_together_are_those_one_by_one(tokens: int) -> None:
    """Against the recurrence as the paper writes it, in float64."""
    random = torch.Generator().manual_seed(tokens)
    inputs = torch.randn(6, 2, 3, tokens, 8, generator=random)
    inputs[1] = -0.6065 * inputs[1].sigmoid()
    inputs[4] = -torch.nn.functional.normalize(inputs[4], dim=-1)
    inputs[5] = -inputs[4] * inputs[5].sigmoid()
    state = torch.randn(2, 3, 8, 8, generator=random)
    made, after = rwkv7.recurrence(state, inputs)
    now = state.double()
    for t in range(tokens):
        r, w, k, v, a, b = (part[:, :, t, :, None].double() for part in inputs)
        now = now * w.exp().mT + now @ a @ b.mT + v @ k.mT
        torch.testing.assert_close(made[:, :, t], (now @ r)[..., 0].float(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after, now.float(), rtol=1e-4, atol=1e-4)


def test_pieces_and_padding(dense: Any) -> None:
    """A prompt in pieces of odd lengths, and one with padding before it beside a longer one."""
    wanted, cache, made = logits(dense), None, []
    with torch.no_grad():
        for piece in IDS.split([17, 1, 2, 15], 1):
            out = dense(piece, cache=cache)
            cache, made = out.cache, [*made, out.logits[0]]
        assert off(torch.cat(made), wanted) < 1e-5
        padded = torch.cat([torch.full((1, 5), 9), IDS[:, :30]], 1)
        mask = torch.ones(2, 35, dtype=torch.int64)
        mask[1, :5] = 0
        assert off(dense(torch.cat([IDS, padded]), attention_mask=mask).logits[1, 5:], wanted[:30]) < 1e-5


def test_channel_mixes_become_neurons(dense: Any, imported: Path) -> None:
    model = torch_pi2.load(imported, dtype=torch.float32, activations="float")
    assert str(model).count("SparseFFN(128 -> 256 -> 128, relu2(up), exact, 0 hot, int8)") == 2  # (1-2): 2 x ...
    assert 0 < off(logits(model), logits(dense)) < 0.05
    made = torch_pi2.generate(model, IDS, max_new_tokens=6, eos_token_id=[]).sequences[0]
    assert made == model.generate(IDS, max_new_tokens=6, do_sample=False, eos_token_id=None)[0, IDS.shape[1] :].tolist()
    torch_pi2.save(model, imported.parent / "saved")
    assert torch.equal(logits(torch_pi2.load(imported.parent / "saved", activations="float")), logits(model))


@pytest.mark.slow
def test_quantised_files_and_stores(dense: Any, file: Path, tmp_path: Path) -> None:
    """Rows of matrices are the file's own; those of low rank stay floats, as in llama.cpp's files."""
    floats = dict.fromkeys(("_w1", "_w2", "_a1", "_a2", "_v1", "_v2", "_g1", "_g2", "lerp"), "F32")
    ggufs.retyped(file, tmp_path / "typed.gguf", "Q8_0", others=floats)
    report = torch_pi2.import_gguf(tmp_path / "typed.gguf", tmp_path / "out", neurons="all")
    assert (report.types["Q8_0"], report.neurons, report.weights) == (4 * 3 + 2 + 3, 3, "int8")
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    how: dict[str, Any] = {"dtype": torch.float32, "activations": "float"}
    whole, stored = torch_pi2.load(tmp_path / "out", **how), torch_pi2.load(tmp_path / "packed", budget="64MiB", **how)
    assert torch.equal(logits(stored, IDS[:, :16]), logits(whole, IDS[:, :16]))
    assert off(logits(whole), logits(dense)) < 0.05


@pytest.mark.parametrize("method", ["exact", pytest.param("lowrank", marks=pytest.mark.slow)])
def test_checkpoints_of_flash_linear_attention(dense: Any, tmp_path: Path, method: str) -> None:
    """Folders have its names, whatever becomes of the channel mix."""
    dense.save_pretrained(tmp_path / "dense")
    assert {"model.layers.1.ffn.x_k", "model.layers.1.attn.x_k"} <= {*load_file(tmp_path / "dense/model.safetensors")}
    again = torch_pi2.load_dense(tmp_path / "dense")
    assert torch.equal(logits(again), logits(dense))
    calibration = {"calibration": IDS.repeat(12, 1)} if method == "lowrank" else {}
    model = torch_pi2.optimize(again, method=method, **calibration)
    assert off(logits(model), logits(dense)) < (1e-5 if method == "exact" else 0.5)
    torch_pi2.restore(model)
    assert torch.equal(logits(model), logits(dense))


def test_the_longest_token_at_each_byte(imported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(imported)
    words = {word: i for i, (word, kind) in enumerate(rwkv7s.vocabulary()) if kind == 1}
    texts = [*SAID["texts"], "the" * 5 + "\x00\x7f\n\n\n 's", " o on ooon 你你\ufffd🙂", ""]
    for text in texts:
        rest, wanted = text.encode(), []
        while rest:
            word = max((word for word in words if rest.startswith(word)), key=len)
            wanted.append(words[word])
            rest = rest[len(word) :]
        assert tokenizer(text).input_ids == wanted == SAID["texts"].get(text, wanted)
        assert tokenizer.decode(wanted) == text
    assert tokenizer("the<s>").input_ids == [words[b"the"], 0]
    chat = [
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "a"},
    ]
    said = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert said == "User: hi\n\nAssistant: yes\n\nUser: a\n\nAssistant:"
    ends = json.loads((imported / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, words[b"\n\n"]]
    with pytest.raises(ValueError, match="lacks a byte"):
        longest_matches([word for word in words if word != b"\x80"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"feed_forward_length": 512}, "found rwkv7.'feed_forward_length' 512"),
        ({"attention.decay_lora_rank": 8}, "found rwkv7.'attention.decay_lora_rank' 8"),
        ({"token_shift_count": 1}, "found rwkv7.'token_shift_count' 1"),
        ({"rescale_every_n_layers": 6}, "found rwkv7.'rescale_every_n_layers' 6"),
        ({"wkv.head_size": None}, "rwkv7.wkv.head_size"),
        ({"wkv.head_size": 48}, "hidden_size 128 is no multiple of head_dim 48"),
        ({"block_count": 4}, "blk.3.channel_mix_key.weight"),
        ({"block_count": 2}, "blk.2"),
    ],
)
def test_what_is_refused(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_gguf(rwkv7s.written(tmp_path / "a.gguf", **keys), tmp_path / "out")


def test_configurations_of_other_kinds(tmp_path: Path, dense: Any) -> None:
    dense.save_pretrained(tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    for key, value in {"norm_bias": False, "hidden_act": "relu", "attn": {"layers": [1]}}.items():
        (tmp_path / "config.json").write_text(json.dumps(said | {key: value}))
        with pytest.raises(ArtifactError, match=f"{key} .*: RWKV-7 is known here with"):
            torch_pi2.load_dense(tmp_path)


def test_checkpoints_of_the_authors(tmp_path: Path, dense: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their numbers, in their dtype; a word of their vocabulary may have the character NEL or be no UTF-8."""
    made, words = rwkv7s.weights(), [word for word, kind in rwkv7s.vocabulary() if kind == 1]
    made |= {f"blocks.0.att.v{i}": torch.zeros(1) for i in range(3)}
    torch.save(made, tmp_path / "a.pth")
    monkeypatch.setattr("torch_pi2.checkpoint.rwkv.find_spec", lambda name: None)
    report = torch_pi2.import_rwkv(tmp_path / "a.pth", tmp_path / "out")
    assert report.tokenizer.startswith("there is no rwkv_vocab*.txt beside the file")
    assert torch.equal(logits(torch_pi2.load_dense(tmp_path / "out")), logits(dense))
    words.append(b"a\xc2\x85b")
    lines = []
    for i, word in enumerate(words, 1):
        try:
            said = f"'{word.decode()}'" if b"\x85" in word and len(word) > 1 else repr(word.decode())
        except UnicodeDecodeError:
            said = repr(word)
        lines.append(f"{i} {said} {len(word)}\n")
    (tmp_path / "rwkv_vocab_v1.txt").write_bytes("".join(lines).encode())
    torch.save({name: value.bfloat16() for name, value in made.items()}, tmp_path / "a.pth")
    report = torch_pi2.import_rwkv(tmp_path / "a.pth", tmp_path / "half")
    assert (report.tokenizer, report.types) == ("", {"bfloat16": len(dense.state_dict())})
    model = torch_pi2.load_dense(tmp_path / "half")
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight.bfloat16())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "half")
    assert tokenizer("then\n\n你a\x85b").input_ids == [259, 260, 261, 265]
    (tmp_path / "rwkv_vocab_v1.txt").write_text("2 'a' 1\n")
    assert "2 is not the next number" in torch_pi2.import_rwkv(tmp_path / "a.pth", tmp_path / "last").tokenizer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks.0.att.r_k": None}, "no, .blocks.0.att.r_k"),
        ({"blocks.1.ffn.s_emb.weight": torch.zeros(4, 4)}, r"found blocks.1.ffn.s_emb.weight of \[4, 4\]"),
        ({"blocks.1.att.key.weight": torch.zeros(4, 4)}, r"found blocks.1.att.key.weight of \[4, 4\]"),
        ({"blocks.1.att.k_a": None}, "nothing for model.layers.1.attn.k_a"),
        ({"blocks.1.att.k_a": 3}, "no dict of tensors"),
        ({"blocks.1.att.k_a": torch.zeros(128, dtype=torch.int64)}, r"found blocks.1.att.k_a of \[128\], int64"),
        ({"blocks.1.att.k_a": torch.full((128,), torch.nan)}, "expected finite numbers"),
    ],
)
def test_other_checkpoints_of_the_authors(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = {name: value for name, value in (rwkv7s.weights() | change).items() if value is not None}
    torch.save(made, tmp_path / "a.pth", _use_new_zipfile_serialization=None not in change.values())  # some are of old
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_rwkv(tmp_path / "a.pth", tmp_path / "out")
    (tmp_path / "a.pth").write_bytes((tmp_path / "a.pth").read_bytes()[:5000])
    with pytest.raises(ArtifactError, match=r"expected a \.pth of tensors"):
        torch_pi2.import_rwkv(tmp_path / "a.pth", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["a.pth"]
