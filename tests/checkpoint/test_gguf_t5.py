"""T5 in GGUF files: an encoder and a decoder, whose FFNs of ReLU become neurons; Flan-T5, which has none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import ggufs
import pytest
import torch
from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

import torch_pi2
from torch_pi2.errors import Pi2Error

IDS, ANSWER = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 1]]), torch.tensor([[0, 18, 250, 3, 40, 7]])
#: Token -> score; more follow that nothing uses.
WORDS = {"<pad>": 0.0, "</s>": 0.0, "<unk>": 0.0, "\u2581the": -2.0, "\u2581": -3.0, "\u2581cat": -4.0, "s": -4.5}
WORDS |= {one: -6.0 - i / 10 for i, one in enumerate("thecaonmdr.")}


def tiny(**more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"d_model": 256, "d_ff": 512, "d_kv": 64, "num_heads": 4, "num_layers": 3, "num_decoder_layers": 2}
    made = T5ForConditionalGeneration(T5Config(**sizes, vocab_size=320, decoder_start_token_id=0, **more)).eval()
    if more:
        made.lm_head.weight = torch.nn.Parameter(torch.empty(320, 256))
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if parameter.dim() > 1:
                scale = 1.0 if "bias" in name or "shared" in name else parameter.shape[-1] ** -0.5
                parameter.normal_(0, scale * (0.3 if ".q." in name else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + 1)
    return made


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def flan() -> Any:
    return tiny(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def file(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(model, tmp_path_factory.mktemp("t5") / "tiny.gguf")


def written(model: Any, path: Path, more: tuple[str, ...] = (), words_apart: bool = True, **keys: Any) -> Path:
    """As llama.cpp's converter would, but for ``keys`` (None: without it) and tensors that there are as well."""
    config, writer = model.config, gguf.GGUFWriter(path, "t5")
    said = {"context_length": 512, "embedding_length": config.d_model, "feed_forward_length": config.d_ff}
    said |= {"block_count": config.num_layers, "decoder_block_count": config.num_decoder_layers}
    said |= {"attention.head_count": config.num_heads, "attention.relative_buckets_count": 32}
    said |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.d_kv)
    said |= dict.fromkeys(("attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"), 1e-6)
    said |= {"decoder_start_token_id": 0} | keys
    for key, value in said.items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"t5.{key}", value)
    words = [*WORDS, *(f"[PAD{i}]" for i in range(len(WORDS), config.vocab_size))]
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(words)
    writer.add_token_scores([WORDS.get(word, -1000.0) for word in words])
    writer.add_token_types([3, 3, 2, *(1 if word in WORDS else 5 for word in words[3:])])
    for name, token in (("eos", 1), ("unk", 2), ("pad", 0)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(words_apart)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(True)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5, 3)
    for name, value in model.named_parameters():
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", value.detach().numpy())
    for name in more:
        writer.add_tensor(name, torch.zeros(32, config.num_heads).numpy())
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file"):
        getattr(writer, step)()
    writer.close()
    return path


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, decoder_input_ids=ANSWER).logits[0].float()


def off(made: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((made - wanted).abs().max() / wanted.abs().max())


def test_there_and_back(model: Any, file: Path, tmp_path: Path) -> None:
    """FFNs become neurons of int8; everything else is kept. Answers begin with the file's token."""
    report = torch_pi2.import_gguf(file, tmp_path / "out")
    assert (report.neurons, report.weights, report.tokenizer) == (5, "int8", "")
    dense = torch_pi2.load_dense(tmp_path / "out", dtype=torch.float32)
    assert type(dense) is T5ForConditionalGeneration
    made, own = dense.state_dict(), model.state_dict()
    assert made.keys() == own.keys()
    assert all(torch.equal(made[name], own[name]) or "DenseRelu" in name for name in own)
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    assert len(re.findall(r"SparseFFN\(256 -> 512 -> 256, relu\(up\), exact", str(again))) == 4  # (1-2): 2 x ...
    assert off(logits(again), logits(dense)) < 1e-5
    assert 0 < off(logits(again), logits(model)) < 0.05
    answer = again.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(answer, dense.generate(IDS, max_new_tokens=6, do_sample=False))
    assert int(answer[0, 0]) == 0


def test_flan(flan: Any, tmp_path: Path) -> None:
    """Its GELU has no zeros; its output layer is not the embedding."""
    report = torch_pi2.import_gguf(written(flan, tmp_path / "a.gguf"), tmp_path / "out")
    assert (report.neurons, report.rounded) == (0, {})
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    assert off(logits(again), logits(flan)) < 1e-5
    torch_pi2.save(again, tmp_path / "again")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "again", dtype=torch.float32)), logits(again))


def test_tokenizers_that_split_otherwise(model: Any, tmp_path: Path) -> None:
    report = torch_pi2.import_gguf(written(model, tmp_path / "a.gguf", words_apart=False), tmp_path / "out")
    assert report.tokenizer.startswith("it keeps spaces as they are, or begins without one")


@pytest.mark.slow
def test_typed_files_over_a_store(model: Any, file: Path, tmp_path: Path) -> None:
    ggufs.retyped(file, tmp_path / "typed.gguf", "Q8_0", others={"attn_rel_b": "F32"})
    report = torch_pi2.import_gguf(tmp_path / "typed.gguf", tmp_path / "out")
    assert set(report.types) == {"Q8_0"}
    whole = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    assert off(logits(whole), logits(model)) < 0.05
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    stored = torch_pi2.load(tmp_path / "packed", budget="64MiB", dtype=torch.float32)
    assert torch.equal(logits(stored), logits(whole))


@pytest.mark.parametrize("name", ["model", "flan"])
def test_beside_llama_cpp(request: pytest.FixtureRequest, tmp_path: Path, name: str) -> None:
    """Logits and tokens. It leaves out that inputs of a tied output layer are divided by the root of the width."""
    llama_cpp = pytest.importorskip("llama_cpp")
    model, tied = request.getfixturevalue(name), name == "model"
    more = ("dec.blk.0.cross_attn_rel_b.weight",) if tied else ()  # Google's checkpoints have it, and nothing uses it
    file = written(model, tmp_path / "a.gguf", more)
    engine = llama_cpp.Llama(str(file), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    engine._batch.set_batch(batch=IDS[0].tolist(), n_past=0, logits_all=True)
    engine._ctx.encode(engine._batch)
    engine.eval(ANSWER[0].tolist())
    theirs = torch.from_numpy(engine.scores[: ANSWER.shape[1]].copy())
    assert off(theirs * (model.config.d_model**-0.5 if tied else 1.0), logits(model)) < 2e-3
    torch_pi2.import_gguf(file, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("the cats", " the  cat on a mat. ", "s", "", "theme", "Grüße", "a 你 b"):
        wanted = engine.tokenize(text.encode(), add_bos=True, special=False)
        assert tokenizer(text).input_ids == wanted, text


@pytest.mark.parametrize(
    ("keys", "more", "message"),
    [
        ({"block_count": 2}, (), r"block_count in .*: expected 3, as its tensors have it, found 2"),
        ({"decoder_block_count": None}, (), r"decoder_block_count in .*: expected 2, as its tensors have it, found 3"),
        ({"embedding_length": 128}, (), "embedding_length in .*: expected 256"),
        ({"attention.relative_buckets_count": 16}, (), r"relative_attention_bias.weight in .*: expected \[16, 4\]"),
        ({"attention.layer_norm_rms_epsilon": 0.5}, (), "'attention.layer_norm_rms_epsilon' 0.5"),
        ({"attention.key_length": None}, (), "attention.key_length in .*found 'nothing'"),
        ({}, ("enc.blk.0.ffn_gate.weight",), "wi_1.weight|wi_0.weight"),
        ({}, ("dec.blk.1.attn_rel_b.weight",), "found dec.blk.1.attn_rel_b.weight as well"),
    ],
)
def test_what_is_refused(model: Any, tmp_path: Path, keys: dict[str, Any], more: tuple[str, ...], message: str) -> None:
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_gguf(written(model, tmp_path / "a.gguf", more, **keys), tmp_path / "out")
