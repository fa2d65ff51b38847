"""GGUF files: read in every type, and compared with what their numbers give in PyTorch."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import ggufs
import pytest
import torch
from transformers import AutoTokenizer

import torch_pi2
from torch_pi2.base.tensorfile import TensorReader
from torch_pi2.checkpoint.gguf.families import FAMILIES, configuration
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import ArtifactError, ConfigError, DtypeError, NonFiniteError, Pi2Error, UnsupportedModelError
from torch_pi2.layers.linear import QuantLinear
from torch_pi2.ops.constants import wants_blocks
from torch_pi2.store.gguf import GgufModel
from torch_pi2.store.storefile import StoreReader

GOLDEN = Path(__file__).parents[1] / "data" / "gguf"
TOKENS = torch.tensor([[5, 77, 130, 9, 200, 31, 64, 250, 3, 18]])


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Name -> the model, its folder, and its float32 file."""
    root, known = tmp_path_factory.mktemp("gguf"), {}

    def of(name: str) -> tuple[Any, Path, Path]:
        if name not in known:
            model, folder, file = ggufs.tiny(name), root / name, root / f"{name}.gguf"
            model.save_pretrained(folder)
            ggufs.tokenizer(folder)
            known[name] = model, folder, ggufs.written(folder, file)
        return known[name]

    return of


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits.float()


@pytest.mark.slow
@pytest.mark.parametrize("name", ggufs.MODELS)
def test_there_and_back(made: Any, tmp_path: Path, name: str) -> None:
    """In float32 nothing is rounded, so that what comes back is the model; experts are, as neurons."""
    model, _, file = made(name)
    report = torch_pi2.import_gguf(file, tmp_path / "out")
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    off = (logits(again) - logits(model)).abs().max() / logits(model).abs().max()
    assert off < (0.1 if report.neurons else 1e-5)
    assert report.tokenizer == ""
    assert bool(report.rounded) == bool(report.neurons)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", "Q4_K"),
        ("llama", "Q6_K"),
        ("llama", "Q8_0"),
        ("llama3", "Q4_0"),
        ("qwen2", "Q5_K"),
        ("qwen2", "Q4_1"),
        ("gemma2", "Q5_0"),
        ("gemma3", "Q6_K"),
        ("phi3", "Q4_K"),
        ("qwen3", "IQ4_NL"),
        ("phi3", "Q5_1"),
        ("cohere2", "Q4_0"),
        ("glm4", "Q8_0"),
        ("olmo", "TQ2_0"),
        ("olmo", "TQ1_0"),
    ],
)
def test_rows_are_kept(made: Any, tmp_path: Path, name: str, kind: str) -> None:
    model, _, file = made(name)
    typed = tmp_path / "typed.gguf"
    values = ggufs.retyped(file, typed, kind)
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    assert (report.rounded, set(report.types), any(report.errors.values())) == ({}, {kind}, False)
    wanted = logits(ggufs.with_values(copy.deepcopy(model), file, values))
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize(("kind", "dtype"), [("Q4_0", torch.float32), ("BF16", torch.bfloat16)])
def test_float32_unless_most_weights_have_16_bits(made: Any, tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    _, _, file = made("llama")
    ggufs.retyped(file, tmp_path / "typed.gguf", kind)
    torch_pi2.import_gguf(tmp_path / "typed.gguf", tmp_path / "out")
    for chosen, wanted in ((None, dtype), (torch.float16, torch.float16)):
        model = torch_pi2.load(tmp_path / "out", dtype=chosen)
        assert {tensor.dtype for tensor in model.parameters()} <= {wanted, torch.uint8}
        assert model(TOKENS).logits.dtype == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS"])
def test_rounded_again(made: Any, tmp_path: Path, kind: str) -> None:
    """To what the report says, and as far off as it says."""
    _, _, file = made("llama")
    typed = tmp_path / "typed.gguf"
    values = ggufs.retyped(file, typed, kind)
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    to = "int4" if kind in ("Q2_K", "Q3_K") else "int8"
    assert set(report.rounded.values()) == {f"{kind} to {to}"}
    assert report.types == {}
    name = "model.layers.1.mlp.up_proj"
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32).get_submodule(name)
    wanted = torch.from_numpy(values["blk.1.ffn_up.weight"])
    off = float((again.dequantized() - wanted).norm() / wanted.norm())
    assert report.errors[name] == pytest.approx(off, rel=1e-3)
    assert 0 < off < (0.12 if to == "int4" else 0.01)


def test_experts_keep_gate_and_up(made: Any, tmp_path: Path) -> None:
    _, _, file = made("mixtral")
    typed = tmp_path / "typed.gguf"
    values = ggufs.retyped(file, typed, "Q4_0")
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    assert (report.weights, report.neurons) == ("int4+int8", 8)
    assert set(report.rounded) == {
        f"model.layers.{i}.mlp.experts.{e}.down_proj.weight" for i in range(2) for e in range(4)
    }
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    state = again.state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    stacks = [torch.from_numpy(values[f"blk.1.ffn_{part}_exps.weight"]) for part in ("gate", "up")]
    assert torch.equal(state, torch.cat(stacks, 1))


@pytest.mark.parametrize("name", ["arcee", "jais2", "nemotron"])
def test_zeros_of_layers_without_gate_are_skipped(made: Any, tmp_path: Path, name: str) -> None:
    """Up keeps its rows, and down is rounded to int8."""
    model, _, file = made(name)
    typed = tmp_path / "typed.gguf"
    values = ggufs.retyped(file, typed, "Q8_0")
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    assert (report.weights, report.neurons) == ("int8", 2)
    assert set(report.rounded) == {f"model.layers.{i}.mlp.down_proj.weight" for i in range(2)}
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    assert str(again).count("SparseFFN(256 -> 512 -> 256, relu2(up), exact, 0 hot, int8)") == 1  # (0-1): 2 x ...
    wanted = logits(ggufs.with_values(copy.deepcopy(model), file, values))
    assert float((logits(again) - wanted).norm() / wanted.norm()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3n", "nemotron_h", "nemotron_h_moe", "lfm2"])
def test_typed_files_of_other_layers(made: Any, tmp_path: Path, name: str) -> None:
    """Stacks of matrices, a second embedding, experts without gate, convolutions: what is rounded is rounded alone."""
    model, _, file = made(name)
    ggufs.retyped(file, tmp_path / "typed.gguf", "Q8_0")
    torch_pi2.import_gguf(tmp_path / "typed.gguf", tmp_path / "out")
    dense = load_dense(tmp_path / "out", dtype=torch.float32)
    mine = model.state_dict()
    off = {key: float((found - mine[key]).norm() / mine[key].norm()) for key, found in dense.state_dict().items()}
    assert max(off.values()) < 0.02
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    torch.testing.assert_close(logits(again), logits(dense), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "name"), [("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe")])
def test_text_of_models_that_see(made: Any, tmp_path: Path, arch: str, name: str) -> None:
    model, _, file = made(name)
    fields = gguf.GGUFReader(file).fields
    old = fields["general.architecture"].contents()
    said = {key: field.contents() for key, field in fields.items() if key.startswith(f"{old}.")}
    keys = {"general.architecture": arch, f"{arch}.rope.dimension_sections": [8, 12, 12, 0], **dict.fromkeys(said)}
    keys |= {key.replace(old, arch, 1): value for key, value in said.items()}
    if arch != "qwen2vl":
        keys[f"{arch}.n_deepstack_layers"] = 3
    torch_pi2.import_gguf(ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys), tmp_path / "out")
    off = logits(torch_pi2.load(tmp_path / "out", dtype=torch.float32)) - logits(model)
    assert float(off.abs().max() / logits(model).abs().max()) < (0.05 if "moe" in arch else 1e-5)
    engine = pytest.importorskip("llama_cpp").Llama(str(tmp_path / "a.gguf"), logits_all=True, verbose=False)
    engine.eval(TOKENS[0].tolist())
    theirs, ours = torch.from_numpy(engine.scores[: TOKENS.shape[1]].copy()), logits(model)[0]
    assert float((theirs - ours).abs().max() / ours.abs().max()) < 2e-3


def test_powerinfer(made: Any, tmp_path: Path) -> None:
    """ReLU instead of SiLU, down neuron by neuron, predictors: nothing is rounded of Q4_0, and zeros are skipped."""
    model, _, file = made("llama")
    typed = tmp_path / "typed.gguf"
    predictors = {
        f"blk.{i}.{name}.weight": torch.randn(shape)
        for i in range(2)
        for name, shape in (("fc1", (32, 256)), ("fc2", (512, 32)))
    }
    values = ggufs.powerinfer(file, typed, "Q4_0", predictors)
    report = torch_pi2.import_gguf(typed, tmp_path / "out")
    assert (report.rounded, report.neurons, report.predictors, report.weights) == ({}, 2, 4, "int4")
    again = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    relu = copy.deepcopy(model)
    for layer in relu.model.layers:
        layer.mlp.act_fn = torch.nn.ReLU()
    wanted = logits(ggufs.with_values(relu, file, values))
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("budget", [None, "40MB"])
def test_load_of_a_file(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: str | None) -> None:
    """Imported once; with a budget the neurons are in a store, and the tokens are those without."""
    _, _, file = made("llama")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    typed = tmp_path / "typed.gguf"
    ggufs.retyped(file, typed, "Q8_0")
    how: dict[str, Any] = {"dtype": torch.float32, "budget": budget}
    model = torch_pi2.load(typed, **how)
    first = logits(model)
    (folder,) = (tmp_path / "torch_pi2" / "gguf").iterdir()
    assert folder.name.startswith("typed-")
    assert (folder / "pi2" / "model.pi2").exists() == (budget is not None)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert torch.equal(logits(torch_pi2.load(str(typed), **how)), first)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
    wanted = logits(torch_pi2.load(typed, dtype=torch.float32))
    assert float((first - wanted).abs().max() / wanted.abs().max()) < (0.02 if budget else 1e-6)


def test_load_of_a_folder_with_a_file_in_capitals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was downloaded; several are refused."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "TINY.Q4_K_M.GGUF"
    file.write_bytes((GOLDEN / "tiny-llama.q4_k_m.gguf").read_bytes())
    torch_pi2.import_gguf(tmp_path / "model", tmp_path / "out")
    wanted = logits(torch_pi2.load(tmp_path / "out"))
    for given in (file, tmp_path / "model"):
        assert torch.equal(logits(torch_pi2.load(given)), wanted)
    with pytest.raises(ArtifactError, match=r"supported\(.*found a GGUF file"):
        torch_pi2.supported(tmp_path / "model")
    file.with_name("other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ArtifactError, match=r"expected one GGUF model, found TINY.Q4_K_M.GGUF, other.gguf"):
        torch_pi2.load(tmp_path / "model")


@pytest.mark.parametrize("magic", [b"GGUF", b"PWRI"])
def test_a_file_is_known_by_its_first_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, magic: bytes) -> None:
    """As some programs keep what they have downloaded: under its hash."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    whole = (GOLDEN / "tiny-llama.q4_k_m.gguf").read_bytes()
    (tmp_path / "sha256-01").write_bytes(magic + whole[4:])
    torch_pi2.import_gguf(GOLDEN / "tiny-llama.q4_k_m.gguf", tmp_path / "out")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "sha256-01")), logits(torch_pi2.load(tmp_path / "out")))
    for read in (torch_pi2.pack, torch_pi2.quantize):
        with pytest.raises(ArtifactError, match=r"the folder of a model, found a GGUF file\. Import it"):
            read(tmp_path / "sha256-01", tmp_path / "other")
    (tmp_path / "text").write_text("GGU")
    with pytest.raises(ArtifactError, match=r"the folder of a model, found a file, and no GGUF file\. Name"):
        torch_pi2.load(tmp_path / "text")


def test_floats_of_what_was_imported_are_not_there(tmp_path: Path) -> None:
    torch_pi2.import_gguf(GOLDEN / "tiny-llama.q4_k_m.gguf", tmp_path / "out")
    with pytest.raises(UnsupportedModelError, match=r"expected floats, found weights in torch_pi2's own form"):
        torch_pi2.quantize(tmp_path / "out", tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_saved_again_and_as_floats(tmp_path: Path) -> None:
    """The same bits, and the same as the dense model of the rows' numbers."""
    torch_pi2.import_gguf(GOLDEN / "tiny-llama.q4_k_m.gguf", tmp_path / "out")
    model = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    torch_pi2.save(model, tmp_path / "again")
    assert torch.equal(logits(torch_pi2.load(tmp_path / "again", dtype=torch.float32)), logits(model))
    dense = load_dense(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(logits(dense), logits(model), rtol=1e-4, atol=1e-4)
    state = model.state_dict()
    assert torch.equal(state["model.embed_tokens.weight"], dense.state_dict()["model.embed_tokens.weight"])
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert head.rows.data_ptr() == embedding.rows.data_ptr()


def test_tokenizer_and_template(made: Any, tmp_path: Path) -> None:
    _, folder, file = made("llama")
    torch_pi2.import_gguf(file, tmp_path / "out")
    one, other = (AutoTokenizer.from_pretrained(path) for path in (folder, tmp_path / "out"))
    for text in ("the cat sat", "Grüße, 你好 🙂\n\n  def", "<|user|>it's 1234</s>"):
        assert other(text)["input_ids"] == one(text)["input_ids"]
        assert other.decode(other(text)["input_ids"]) == one.decode(one(text)["input_ids"])
    said = [{"role": "user", "content": "hi"}]
    assert other.apply_chat_template(said, tokenize=False) == one.apply_chat_template(said, tokenize=False)
    assert (other.bos_token, other.eos_token) == ("<s>", "</s>")


def test_a_matrix_of_one_row_as_llama_cpp_writes_it(made: Any, tmp_path: Path) -> None:
    """Of what llama-quantize has written, a shared expert's gate is a vector."""
    _, _, file = made("qwen2_moe")
    keys = {"general.architecture": "qwen2moe"}
    changed = ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys, flat="ffn_gate_inp_shexp.weight")
    shapes = {tuple(t.shape) for t in gguf.GGUFReader(changed).tensors if "inp_shexp" in t.name}
    assert shapes == {(256,)}
    for path, name in ((file, "whole"), (changed, "flat")):
        torch_pi2.import_gguf(path, tmp_path / name)
    whole, flat = (torch_pi2.load(tmp_path / name, dtype=torch.float32) for name in ("whole", "flat"))
    assert torch.equal(logits(flat), logits(whole))


@pytest.mark.slow
@pytest.mark.parametrize("base", [10000.0, 5000.0])
def test_rotary_base_of_sliding_layers(made: Any, tmp_path: Path, base: float) -> None:
    """Which converters of today write; older files have none, and mean 10,000."""
    _, _, file = made("gemma3")
    keys = {"general.architecture": "gemma3", "gemma3.rope.freq_base_swa": base}
    torch_pi2.import_gguf(ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys), tmp_path / "out")
    torch_pi2.import_gguf(file, tmp_path / "before")
    found, before = (torch_pi2.load(tmp_path / name, dtype=torch.float32) for name in ("out", "before"))
    assert found.config.rope_parameters["sliding_attention"]["rope_theta"] == base
    assert torch.equal(logits(found), logits(before)) == (base == 10000.0)


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 0])
def test_gemma3_without_a_window(made: Any, tmp_path: Path, window: int | None) -> None:
    """llama.cpp has no sliding layers then, nor their rotary base."""
    model, _, file = made("gemma3")
    keys = {"general.architecture": "gemma3", "gemma3.attention.sliding_window": window}
    torch_pi2.import_gguf(ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys), tmp_path / "out")
    found = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    config = copy.deepcopy(model.config)
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    wanted = type(model)._from_config(config, dtype=torch.float32).eval()
    wanted.load_state_dict(model.state_dict())
    assert not torch.allclose(logits(wanted), logits(model), rtol=0.01)
    torch.testing.assert_close(logits(found), logits(wanted), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_ends_of_answers(made: Any, tmp_path: Path) -> None:
    """Tokens that are ends by their text, whatever else the file names; nothing that the file does not have."""
    _, _, file = made("llama")
    tokens = gguf.GGUFReader(file).fields["tokenizer.ggml.tokens"].contents()
    tokens[7], tokens[9] = "<|end|>", "<|eot_id|>"
    keys = {"tokenizer.ggml.tokens": tokens}
    for eos, eot, ends in (
        (2, None, [2, 7, 9]),
        (9, None, [9, 2, 7]),
        (None, None, [2, 7, 9]),
        (2, 286, [2, 286, 7, 9]),
    ):
        ids = {"tokenizer.ggml.eos_token_id": eos, "tokenizer.ggml.eot_token_id": eot}
        changed = ggufs.rewritten(file, tmp_path / "a.gguf", keys={**keys, **ids})
        torch_pi2.import_gguf(changed, tmp_path / "out")
        assert torch_pi2.load(tmp_path / "out").generation_config.eos_token_id == ends
    none = ["<unk>", "<s>", *(f"t{i}" for i in range(len(tokens) - 2))]
    keys = {"tokenizer.ggml.tokens": none, "tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.eos_token_id": None}
    keys["tokenizer.ggml.padding_token_id"] = None
    torch_pi2.import_gguf(ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys), tmp_path / "out")
    config = torch_pi2.load(tmp_path / "out").config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)


#: Model, what is said under which key (without the architecture; or which tensor is not, or more), and the message.
REFUSED: list[tuple[str, str, Any, str]] = [
    ("gemma2", "attention.sliding_window", 0, r"a window of one token or more, found gemma2\.att"),
    ("mixtral", "expert_used_count", 0, "expert_used_count in .*: expected from 1 to 4, as .*, found 0"),
    ("mixtral", "expert_used_count", 5, "expert_used_count in .*: expected from 1 to 4, as .*, found 5"),
    ("opt", "block_count", 2, "found 'opt'. Load the model's original checkpoint with transformers"),
    ("bert", "block_count", 2, "expected arcee, .*gemma, gemma2, gemma3.*, llama.*, found 'bert'"),
    ("llama", "block_count", None, "llama.block_count in .*: expected a whole number from 1 to"),
    ("llama", "block_count", 3, "block_count in .*: expected 2, as its tensors have it, found 3"),
    ("llama", "block_count", 1, "block_count in .*: expected 2, as its tensors have it, found 1"),
    ("llama", "block_count", [1, 2], r"expected a whole number from 1 to .*, found \[1, 2\]"),
    ("llama", "attention.head_count_kv", 0, "head_count_kv in .*: expected a whole number from 1 to"),
    ("llama", "attention.head_count", 0, "llama.attention.head_count in .*: expected a whole number from 1"),
    ("llama", "attention.head_count", 3, "attention.key_length in .*: expected 256, .*found 192"),
    ("llama", "attention.head_count_kv", 3, "attention.head_count_kv in .*: expected 128, .*found 192"),
    ("llama", "attention.layer_norm_rms_epsilon", None, "layer_norm_rms_epsilon in .*found 'nothing'"),
    ("llama", "embedding_length", 512, "embedding_length in .*: expected 256, .*found 512"),
    ("jais2", "attention.layer_norm_epsilon", None, "layer_norm_epsilon in .*found 'nothing'"),
    ("nemotron", "attention.layer_norm_rms_epsilon", 0.5, "'attention.layer_norm_rms_epsilon' 0.5"),
    (
        "nemotron",
        "rope.dimension_count",
        128,
        "rope.dimension_count in .*: expected a .* from 1 to 64, found 128",
    ),
    ("bitnet", "hidden_act", "gelu", "hidden_act silu or relu2, found 'gelu'"),
    ("olmo", "attention.layer_norm_epsilon", 1e-6, "norms with an epsilon of 1e-5, found another"),
    ("gemma3n", "attention.shared_kv_layers", None, "shared_kv_layers in .*found 'nothing'"),
    ("gemma3n", "attn_logit_softcapping", 50.0, "'attn_logit_softcapping' 50.0"),
    ("lfm2", "shortconv.l_cache", None, "shortconv.l_cache in .*found 'nothing'"),
    ("granite", "residual_scale", None, "residual_scale in .*found 'nothing'"),
    ("granite", "expert_shared_feed_forward_length", 256, "'expert_shared_feed_forward_length' 256"),
    ("llama", "attention.head_count_kv", [2, 1], r"head_count_kv in .*: expected a whole number .*, found \[2, 1\]"),
    ("llama", "feed_forward_length", [0, 0], r"feed_forward_length in .*: expected a whole number .*, found \[0, 0\]"),
    ("nemotron_h", "attention.head_count_kv", 2, "head_count_kv and feed_forward_length of 3 layers, found others"),
    ("nemotron_h", "ssm.time_step_rank", 0, "ssm.time_step_rank in .*: expected a whole number from 1 to"),
    ("nemotron_h_moe", "expert_group_count", 4, "experts without groups, found expert_group_count 4"),
    ("nemotron_h_moe", "moe_latent_size", 64, "'moe_latent_size' 64"),
    ("cohere2", "attention.sliding_window_pattern", 3, "sliding_window_pattern 4, or one of 4 layers, found 3"),
    ("llama", "logit_scale", 2.0, "expected metadata that is known, .*, found llama.'logit_scale' 2.0"),
    ("llama", "rope.scaling.attn_factor", 1.5, "'rope.scaling.attn_factor' 1.5"),
    ("llama", "pooling_type", 3, "'pooling_type' 3"),
    ("llama", "attention.sliding_window", 64, "'attention.sliding_window' 64"),
    ("llama", "tensor_data_layout", "reference", "'tensor_data_layout' 'reference'"),
    ("mixtral", "expert_weights_scale", 2.5, "'expert_weights_scale' 2.5"),
    ("mixtral", "expert_weights_norm", False, "'expert_weights_norm' False"),
    ("gemma3", "final_logit_softcapping", 30.0, "'final_logit_softcapping' 30.0"),
    ("llama", "rope.scaling.type", "longrope", "of type none, linear or yarn, found 'longrope'"),
    ("llama", "rope.scaling.factor", 0.5, "rope.scaling.factor 0.5"),
    ("llama", "rope.dimension_count", 32, "heads of one width, all of it rotated"),
    ("smallthinker", "attention.sliding_window", 2048, "a window of 4096 tokens, .*, found 2048"),
    ("smallthinker", "expert_gating_func", None, "expert_gating_func in .*found 'nothing'"),
    ("smallthinker", "expert_gating_func", 3, "expert_gating_func in .*from 1 to 2, found 3"),
    ("llama", "without", "blk.0.ffn_up.weight", "expected a tensor for model.layers.0.mlp.up_proj.weight"),
    ("llama", "without", "output_norm.weight", "expected a tensor for model.norm.weight"),
    ("llama", "more", "blk.0.ffn_gate_shexp.weight", "found blk.0.ffn_gate_shexp.weight as well"),
]


#: What converters write that changes nothing, or only what the configuration says anyway.
NEUTRAL: dict[str, dict[str, Any]] = {
    "llama": {
        "rope.scale_linear": 1.0,
        "rope.scaling.type": "none",
        "rope.scaling.attn_factor": 1.0,
        "rope.scaling.yarn_ext_factor": -1.0,
        "rope.dimension_sections": [0, 0, 0, 0],
        "pooling_type": 0,
        "logit_scale": 1.0,
        "attn_logit_softcapping": 0.0,
        "attention.clamp_kqv": 0.0,
        "attention.sliding_window": 0,
        "expert_count": 0,
        "expert_used_count": 0,
        "expert_gating_func": 1,
        "use_parallel_residual": False,
        "tensor_data_layout": "Meta AI original pth",
        "embedding_length_out": 256,
    },
    "mixtral": {"expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_shared_count": 0},
    "nemotron": {"attention.layer_norm_rms_epsilon": 1e-5},
    "granite": {  # Granite 4 without recurrent states
        "attention.head_count_kv": [2, 2],
        "ssm.conv_kernel": 4,
        "ssm.inner_size": 512,
        "expert_count": 0,
        "expert_shared_feed_forward_length": 512,
        "rope.scaling.finetuned": True,
    },
    "qwen2_moe": {"expert_weights_norm": False, "expert_shared_count": 1},
    "gemma3": {"attention.sliding_window_pattern": 6, "attention.key_length_swa": 64, "final_logit_softcapping": 0.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NEUTRAL)
def test_keys_that_change_nothing(made: Any, tmp_path: Path, name: str) -> None:
    _, _, file = made(name)
    with GgufModel(file) as model:
        arch, before = model.metadata["general.architecture"], configuration(model)
    keys = {f"{arch}.{key}": value for key, value in NEUTRAL[name].items()}
    with GgufModel(ggufs.rewritten(file, tmp_path / "a.gguf", keys=keys)) as model:
        assert configuration(model) == before


@pytest.mark.slow
def test_keys_of_older_files_and_caps_of_none(made: Any, tmp_path: Path) -> None:
    for name, keys, attribute, value in (
        ("llama", {"llama.rope.scale_linear": 4.0}, "rope_parameters", 4.0),
        ("gemma2", {"gemma2.final_logit_softcapping": 0.0}, "final_logit_softcapping", None),
        ("gemma2", {"gemma2.final_logit_softcapping": None}, "final_logit_softcapping", 30.0),
        ("gemma3n", {"gemma3n.final_logit_softcapping": 0.0}, "final_logit_softcapping", None),
        ("cohere2", {"cohere2.logit_scale": None}, "logit_scale", 1.0),
        ("cohere2", {"cohere2.logit_scale": 0.0}, "logit_scale", 1.0),
        ("nemotron_h_moe", {"nemotron_h_moe.expert_weights_norm": None}, "norm_topk_prob", False),
    ):
        with GgufModel(ggufs.rewritten(made(name)[2], tmp_path / "a.gguf", keys=keys)) as model:
            found = configuration(model)[attribute]
        assert (found["factor"] if isinstance(found, dict) else found) == value
    for said, kept in ((None, 0.0), (0.5, 0.5)):  # llama.cpp takes 1 for the other one
        keys = {"mistral3.rope.scaling.yarn_log_multiplier": said}
        with GgufModel(ggufs.rewritten(made("ministral3")[2], tmp_path / "a.gguf", keys=keys)) as model:
            rope = configuration(model)["rope_parameters"]
        assert (rope["mscale"], rope["mscale_all_dim"]) == (1.0, kept)
    keys = {f"mistral3.rope.scaling.{key}": None for key in ("type", "factor", "original_context_length")}
    with GgufModel(ggufs.rewritten(made("ministral3")[2], tmp_path / "a.gguf", keys=keys)) as model:
        assert configuration(model)["rope_parameters"]["original_max_position_embeddings"] == 128  # context_length


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key", "value", "message"), REFUSED)
def test_what_is_refused(made: Any, tmp_path: Path, name: str, key: str, value: Any, message: str) -> None:
    _, _, file = made("llama" if name in ("bert", "opt") else name)
    arch = "llama" if name == "mixtral" else name
    keys = {"general.architecture": arch, f"{arch}.{key}": value}
    change = {key: value} if key in ("without", "more") else {"keys": keys}
    changed = ggufs.rewritten(file, tmp_path / "a.gguf", **copy.deepcopy(change))
    with pytest.raises(Pi2Error, match=message):
        torch_pi2.import_gguf(changed, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["a.gguf"]


def test_docs_name_every_architecture() -> None:
    text = (Path(__file__).parents[2] / "docs" / "GGUF.md").read_text()
    assert not {family.arch for family in FAMILIES if f"`{family.arch}`" not in text}


@pytest.mark.parametrize("arch", ["rwkv6", "arwkv7"])
def test_what_transformers_does_not_have(made: Any, tmp_path: Path, arch: str) -> None:
    changed = ggufs.rewritten(made("llama")[2], tmp_path / "a.gguf", keys={"general.architecture": arch})
    with pytest.raises(UnsupportedModelError, match=rf"found '{arch}'\. transformers.*has no class for it; llama\.cpp"):
        torch_pi2.import_gguf(changed, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("slides", [[True, False, True], [True, True]])
def test_which_layers_slide(made: Any, tmp_path: Path, slides: list[bool]) -> None:
    """As new converters write it, layer by layer."""
    keys = {"general.architecture": "gemma2", "gemma2.attention.sliding_window_pattern": slides}
    file = ggufs.rewritten(made("gemma2")[2], tmp_path / "a.gguf", keys=keys)
    with GgufModel(file) as model:
        if len(slides) == 2:
            assert configuration(model)["layer_types"] == ["sliding_attention"] * 2
        else:
            with pytest.raises(UnsupportedModelError, match="sliding_window_pattern 2, or one of 2 layers, found"):
                configuration(model)


@pytest.mark.slow
def test_keys_of_shared_layers_are_left_out(tmp_path: Path) -> None:
    """Of Gemma 3n, whose last layers take the keys and values of earlier ones; files have their own as well."""
    model = ggufs.tiny(
        "gemma3n", num_hidden_layers=10, num_kv_shared_layers=5, activation_sparsity_pattern=[0.95] + [0.0] * 9
    )
    model.save_pretrained(tmp_path / "tiny")
    file = ggufs.written(tmp_path / "tiny", tmp_path / "a.gguf")
    more = ggufs.rewritten(file, tmp_path / "b.gguf", more="blk.7.attn_k.weight")
    for one, out in ((file, "out"), (more, "more")):
        torch_pi2.import_gguf(one, tmp_path / out)
        off = logits(torch_pi2.load(tmp_path / out, dtype=torch.float32)) - logits(model)
        assert float(off.abs().max() / logits(model).abs().max()) < 0.1
    with pytest.raises(UnsupportedModelError, match=r"blk\.4\.attn_k\.bias as well"):
        torch_pi2.import_gguf(ggufs.rewritten(file, tmp_path / "c.gguf", more="blk.4.attn_k.bias"), tmp_path / "c")


def test_arguments(made: Any, tmp_path: Path) -> None:
    _, _, file = made("llama")
    with pytest.raises(ConfigError, match=r"neurons=\.\.\."):
        torch_pi2.import_gguf(file, tmp_path / "out", neurons="some")
    assert list(tmp_path.iterdir()) == []


def test_beside_llama_cpp(tmp_path: Path) -> None:
    """A file of its quantiser, and what it makes of it. It rounds inputs to 8 bits, and so do we by default."""
    said = json.loads((GOLDEN / "tiny-llama.json").read_text())
    report = torch_pi2.import_gguf(GOLDEN / "tiny-llama.q4_k_m.gguf", tmp_path / "out")
    assert (report.rounded, set(report.types)) == ({}, {"Q4_K", "Q6_K"})
    theirs, ids = torch.tensor(said["logits"]), torch.tensor([said["tokens"]])
    floats = torch_pi2.load(tmp_path / "out", dtype=torch.float32, activations="float")
    rounded = torch_pi2.load(tmp_path / "out", dtype=torch.float32)
    for model, name in ((floats, "floats"), (rounded, "rounded")):  # the choice goes with the model
        torch_pi2.save(model, tmp_path / name)
        assert torch.equal(logits(torch_pi2.load(tmp_path / name, dtype=torch.float32)), logits(model))
    with torch.no_grad():
        exact, ours = floats(ids).logits[0], rounded(ids).logits[0]
    their_rounding = float((theirs - exact).norm() / exact.norm())
    assert 1e-3 < their_rounding < 0.03
    assert float((ours - exact).norm() / exact.norm()) < 1.5 * their_rounding
    assert float((ours - theirs).norm() / exact.norm()) < 2 * their_rounding
    assert torch.equal(exact.argmax(-1), theirs.argmax(-1))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text, tokens in said["texts"].items():
        assert tokenizer(text, add_special_tokens=False)["input_ids"] == tokens


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_dtypes_that_nothing_computes_in(tmp_path: Path, dtype: torch.dtype) -> None:
    torch_pi2.import_gguf(GOLDEN / "tiny-llama.q4_k_m.gguf", tmp_path / "out")
    with pytest.raises(DtypeError, match=r"load\(dtype=...\): expected float32 or bfloat16 or float16, found "):
        torch_pi2.load(tmp_path / "out", dtype=dtype)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"dtype": "float64"}))
    with pytest.raises(DtypeError, match=r"dtype of .*out: expected float32 or bfloat16 or float16, found float64"):
        torch_pi2.load(tmp_path / "out")


@pytest.mark.slow
def test_parts_of_a_model(made: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Split by the package gguf: what the whole file gives, from any of the parts."""
    _, _, file = made("qwen2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ggufs.retyped(file, tmp_path / "a.gguf", "Q8_0", split_max_tensors=8)
    ggufs.retyped(file, tmp_path / "whole.gguf", "Q8_0")
    parts = sorted(tmp_path.glob("a-*.gguf"))
    assert len(parts) == 4
    report = torch_pi2.import_gguf(parts[0], tmp_path / "out")
    whole = torch_pi2.import_gguf(tmp_path / "whole.gguf", tmp_path / "other")
    assert (report.types, report.bytes_in, report.tokenizer) == (whole.types, whole.bytes_in, "")
    names = [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*") if path.is_file()]
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name
    wanted = logits(torch_pi2.load(tmp_path / "other", dtype=torch.float32))
    for part in parts:
        assert torch.equal(logits(torch_pi2.load(part, dtype=torch.float32)), wanted)
    assert len(list((tmp_path / "torch_pi2" / "gguf").iterdir())) == 1
    parts[2].unlink()
    with pytest.raises(ArtifactError, match=r"a-00003-of-00004.gguf: expected part 3 of 4 of a model"):
        torch_pi2.load(parts[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "at"), [("Q8_0", 0), ("Q4_K", 2), ("Q6_K", 208), ("Q5_0", 0), ("TQ2_0", 64), ("TQ1_0", 52)]
)
def test_scales_that_are_no_numbers(made: Any, tmp_path: Path, kind: str, at: int) -> None:
    _, _, file = made("llama")
    typed = tmp_path / "typed.gguf"
    ggufs.retyped(file, typed, kind)
    tensor = next(one for one in gguf.GGUFReader(typed).tensors if one.name == "blk.1.ffn_up.weight")
    with typed.open("r+b") as changed:
        changed.seek(int(tensor.data_offset) + at)
        changed.write(b"\x00\x7e")
    with pytest.raises(NonFiniteError, match=r"blk.1.ffn_up.weight: expected numbers, found NaN"):
        torch_pi2.import_gguf(typed, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", ggufs.MODELS)
def test_float_files_beside_llama_cpp(made: Any, tmp_path: Path, name: str) -> None:
    """Its keys and values have 16 bits; nothing else is rounded there."""
    llama_cpp = pytest.importorskip("llama_cpp")
    if name == "bitnet":
        pytest.skip("the metadata's hidden_act is read by later versions than 0.3.36, which compute silu")
    model, folder, _ = made(name)
    shutil.copytree(folder, tmp_path / "tiny")  # llama.cpp looks for tokens of Phi-3 in what is called so
    ggufs.written(tmp_path / "tiny", tmp_path / "a.gguf")
    engine = llama_cpp.Llama(str(tmp_path / "a.gguf"), n_ctx=128, logits_all=True, verbose=False, n_threads=1)
    engine.eval(TOKENS[0].tolist())
    theirs, ours = torch.from_numpy(engine.scores[: TOKENS.shape[1]].copy()), logits(model)[0]
    assert float((theirs - ours).abs().max() / ours.abs().max()) < (
        6e-3 if name == "gemma3n" else 1.2e-3  # whose standard deviations are of n - 1 numbers there, 512 here
    )


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_embedding_rows_stay_in_the_file_unless_a_layer_computes_with_them(made: Any, tmp_path: Path) -> None:
    """Also where the output layer, which is tied to it, has its own copy in blocks; the bits are those of a store."""
    _, _, file = made("llama")
    typed = tmp_path / "typed.gguf"
    ggufs.retyped(file, typed, "Q8_0")
    torch_pi2.import_gguf(typed, tmp_path / "out", neurons="all")
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    model, stored = torch_pi2.load(tmp_path / "out"), torch_pi2.load(tmp_path / "packed")
    assert torch.equal(logits(model), logits(stored))
    assert [_is_in_file(one.get_input_embeddings().rows) for one in (model, stored)] == [True, False]
    torch_pi2.save(model, tmp_path / "out")  # over the file itself
    assert torch.equal(logits(torch_pi2.load(tmp_path / "out")), logits(model))


@pytest.mark.skipif(not wants_blocks("int8", 256, 256, True), reason="this CPU's kernels read rows in their order")
@pytest.mark.parametrize("family", ["llama", "gemma2"])  # the head of the second is tied to the embedding
def test_rows_are_in_the_file_as_kernels_read_them(made: Any, tmp_path: Path, family: str) -> None:
    """In blocks, mapped; in row order for float activations, in stores and in saved folders: the same numbers."""
    _, _, file = made(family)
    ggufs.retyped(file, tmp_path / "typed.gguf", "Q8_0")
    torch_pi2.import_gguf(tmp_path / "typed.gguf", tmp_path / "out", neurons="all")
    torch_pi2.pack(tmp_path / "out", tmp_path / "packed")
    model = torch_pi2.load(tmp_path / "out")
    torch_pi2.save(model, tmp_path / "saved")
    in_order, stored, saved = (
        torch_pi2.load(tmp_path / name, activations=how)
        for name, how in (("out", "float"), ("packed", "int8"), ("saved", "int8"))
    )
    assert torch.equal(logits(model), logits(stored))
    assert torch.equal(logits(model), logits(saved))
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    assert "lm_head" in layers
    for name, layer in layers.items():
        assert layer.blocks
        assert _is_in_file(layer.rows)
        other = in_order.get_submodule(name)
        assert (other.blocks, torch.equal(other.rows, layer.in_row_order())) == (False, True)
    with StoreReader(tmp_path / "packed" / "pi2" / "model.pi2") as store:
        assert not [name for name in store.specs if name.endswith(".blocks")]
    data = (weights := tmp_path / "out" / "pi2" / "weights.safetensors").read_bytes()
    with TensorReader(weights) as reader:
        tensor = "lm_head.blocks" if family == "gemma2" else "lm_head.weight"
        at = reader.offset(tensor) + reader.specs[tensor].nbytes // 2
    del model, in_order
    weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(ArtifactError, match=f"{tensor} has checksum"):
        torch_pi2.load(tmp_path / "out")


def _is_in_file(tensor: torch.Tensor) -> bool:
    at = tensor.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(number, 16) for number in line.split()[0].split("-"))
        if start <= at < stop:
            return "weights.safetensors" in line
    raise AssertionError("an address that is nowhere")
