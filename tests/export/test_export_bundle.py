"""``torch_pi2.export(model, folder)``: ExecuTorch computes what the model does, and where the weights are."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import HIDDEN, NEURONS, ROOM, bundle_of, decoder_methods, drawn_model, one_layer
from tiny_models import _hf, randomise, tiny
from torch import nn

import torch_pi2
from torch_pi2.errors import ConfigError, Pi2Error, UnsupportedModelError
from torch_pi2.export import api
from torch_pi2.export.decoder import Lanes, check_traced, method_spec
from torch_pi2.export.delegated import (
    cold_part,
    delegated_copy,
    exported_layers,
    prepare_rest,
    registered,
    split_hot_cold,
)
from torch_pi2.export.describe import describe_program
from torch_pi2.export.hot import HotChunks, chunks_per_batch, hot_chunks
from torch_pi2.export.manifest import Manifest
from torch_pi2.export.partitioner import lower
from torch_pi2.export.program import trace
from torch_pi2.export.run import Bundle
from torch_pi2.export.settings import ExportSettings
from torch_pi2.export.store import write_store
from torch_pi2.layers.of_model import sparse_layers
from torch_pi2.store.storefile import StoreReader
from torch_pi2.types.plan import Bucket, HardwarePlan, PromptPlan

PROMPT = [7, 30, 201, 5, 90, 11]


def optimized(**config: Any) -> nn.Module:
    return torch_pi2.optimize(one_layer(**config))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """With XNNPACK in the place of an accelerator, one chunk for a sequence and two for two."""
    return bundle_of(tmp_path_factory, "split", optimized, batches=(1, 2), hot={1: 1, 2: 2})


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """In float32, without an accelerator."""
    return bundle_of(tmp_path_factory, "plain", optimized, batches=(1,))


def int4() -> nn.Module:
    return torch_pi2.optimize(one_layer(), weights="int4", activations="int8")


@pytest.fixture(scope="module")
def thresholds(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """SwiGLU, of which half of the neurons are below thresholds of their own, in 4 bit, linear layers too."""
    return bundle_of(tmp_path_factory, "thresholds", with_thresholds, batches=(1,))


def with_thresholds() -> nn.Module:
    text = torch.randint(3, 250, (64, 24), generator=torch.Generator().manual_seed(0))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": NEURONS, "num_hidden_layers": 1, "vocab_size": 256}
    model = drawn_model("Llama", **sizes, pad_token_id=None)
    config = {"score": "output", "weights": "int4", "activations": "int8", "calibration_tokens": 1500}
    return torch_pi2.optimize(model, text, torch_pi2.Config(method="threshold", **config))


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    found = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A sign-bit predictor, and an accelerator that has more neurons than are hot in the plan."""
    return bundle_of(tmp_path_factory, "predicted", with_predictor, batches=(1,), hot={1: 1})


def with_predictor() -> nn.Module:
    text = torch.randint(3, 250, (64, 24), generator=torch.Generator().manual_seed(0))
    config = torch_pi2.Config(method="signbit", target_recall=0.7, hot_frequency=0.3, calibration_tokens=1500)
    return torch_pi2.optimize(one_layer(), text, config)


@pytest.mark.slow
def test_an_accelerator_may_have_predicted_neurons(predicted: tuple[nn.Module, Path]) -> None:
    """They are computed by it whatever the predictor says, and the delegate follows the predictor for the others."""
    model, folder = predicted
    ffn = sparse_layers(model)[0]
    assert 0 < ffn.n_hot < 512
    assert ffn.has_predictor
    layers = exported_layers(model)
    with registered(layers) as key, torch.no_grad():
        lanes = Lanes(delegated_copy(model, layers, key), 1, ROOM)
        split = lanes.variant()
        split_hot_cold(split.model, [(hot_chunks(ffn, 1), 512)])
        decoder_methods(lanes, (1,))["forward"](torch.tensor([PROMPT]), torch.tensor([0]))
        wanted = decoder_methods(split, (1,))["decode_b1"](torch.tensor([[40]]), torch.tensor([[6]]))[0, 0]
    with Bundle(folder) as bundle, torch.no_grad():
        found = bundle.logits([*PROMPT, 40], len(PROMPT))[1]
        whole = model(torch.tensor([[*PROMPT, 40]])).logits[0, -1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(found, whole, rtol=0, atol=1e-3 * float(wanted.abs().max()))  # the predictor misses some


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("split", "thresholds"))]
)
def test_greedy_text_and_logits_are_the_models(kind: str, request: pytest.FixtureRequest) -> None:
    model, folder = request.getfixturevalue(kind)
    expected = greedy(model, PROMPT, 30)
    assert len(set(expected)) > 5  # a text that says something
    with Bundle(folder) as bundle:
        assert bundle.generate(PROMPT, 30).sequences[0].ids == expected
        logits = bundle.logits(PROMPT)
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1]
    torch.testing.assert_close(logits[-1].reshape(-1), wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.slow
def test_best_of_two_forks_the_prompt(split: tuple[nn.Module, Path]) -> None:
    with Bundle(split[1]) as bundle:
        one, two = bundle.generate(PROMPT, 12, num_return_sequences=2).sequences
    assert one.ids == two.ids == greedy(split[0], PROMPT, 12)


@pytest.mark.slow
def test_accelerator_and_delegate_share_the_neurons(split: tuple[nn.Module, Path]) -> None:
    manifest = Manifest.load(split[1])
    assert {name: m.hot_chunks for name, m in manifest.methods.items()} == {
        "forward": (),
        "decode_b1": (1,),
        "decode_b2": (2,),
        "fork": (),
    }
    calls = {
        n: m["delegates"].get("Pi2Backend", 0) for n, m in describe_program(split[1] / "model.pte")["methods"].items()
    }
    said = {name for name in calls if name.startswith(("get_", "use_", "enable_"))}
    assert calls == {"forward": 1, "decode_b1": 2, "decode_b2": 2, "fork": 0} | dict.fromkeys(said, 0)
    with Bundle(split[1]) as bundle:
        bundle.generate(PROMPT, 5)
        found = bundle.stats()
    assert found["wanted"] == NEURONS + 4 * (NEURONS - 512)  # the first chunk is never wanted when decoding


def test_no_weight_of_a_feed_forward_layer_is_in_the_program(plain: tuple[nn.Module, Path]) -> None:
    model, folder = plain
    dense = one_layer()
    method = method_spec("decode_b1", Lanes(dense, 1, ROOM), ROOM)
    dense_pte = b"".join(lower(trace({"decode_b1": method}, "dense"), "dense").pieces)
    size = (folder / "model.pte").stat().st_size
    ffn = 3 * NEURONS * HIDDEN * 4
    assert ffn > 0.8 * len(dense_pte)
    assert size < 0.25 * len(dense_pte)
    middle = sparse_layers(model)[0].neuron_rows[NEURONS // 2].numpy().tobytes()
    assert middle in (folder / "model.pi2").read_bytes()
    assert middle not in (folder / "model.pte").read_bytes()


@pytest.mark.slow
def test_quantised_linears_stay_ours(thresholds: tuple[nn.Module, Path]) -> None:
    methods = describe_program(thresholds[1] / "model.pte")["methods"]
    assert methods["decode_b1"]["operators"]["pi2::linear.out"] == 3  # q, o and the head: k and v are too small
    manifest = Manifest.load(thresholds[1])
    assert (manifest.model.weights, manifest.model.linears) == ("int4", "int4")
    assert manifest.lossy == (
        "cold neurons chosen by threshold",
        "neurons in int4",
        "linear layers in int4",
        "inputs of layers in int8",
    )


@pytest.mark.slow
def test_int4_linears_of_a_float_model_reach_xnnpack(tmp_path: Path) -> None:
    model = optimized()
    torch_pi2.export(model, tmp_path / "b", max_tokens=ROOM, batches=(1,), linears="int4")
    named = describe_program(tmp_path / "b" / "model.pte")["named_bytes"]
    projections = HIDDEN * (64 + 32 + 32 + 64)
    assert 4 * projections > named - 4 * 256 * HIDDEN / 7  # not as floats: that would be 49,152 alone
    with Bundle(tmp_path / "b") as bundle:
        found = bundle.logits(PROMPT)[-1].reshape(-1)
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0, -1]
    assert 1e-6 < float((found - wanted).norm() / wanted.norm()) < 0.35  # lossy, and not something else


def test_any_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(24), nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24))).eval()
    x = torch.randn(3, 24)
    model = torch_pi2.optimize(block, [(torch.randn(80, 24),)], torch_pi2.Config(method="exact"))
    torch_pi2.export(model, tmp_path / "b", args=(x,), dynamic_shapes=({0: torch.export.Dim("rows", max=8)},))
    with Bundle(tmp_path / "b") as bundle, torch.no_grad():
        for rows in (1, 3, 7):
            x = torch.randn(rows, 24)
            torch.testing.assert_close(bundle(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_model_over_a_store_is_exported_from_it(tmp_path: Path) -> None:
    model = torch_pi2.optimize(tiny("llama-relu"))
    torch_pi2.save(model, tmp_path / "sparse")
    torch_pi2.pack(tmp_path / "sparse", tmp_path / "store")
    stored = torch_pi2.load(tmp_path / "store", budget="400MB")
    one = write_store(tmp_path / "a.pi2", exported_layers(model), model.torch_pi2.plan)
    two = write_store(tmp_path / "b.pi2", exported_layers(stored), stored.torch_pi2.plan)
    assert (tmp_path / "a.pi2").read_bytes() == (tmp_path / "b.pi2").read_bytes()
    assert one.places == two.places
    with StoreReader(tmp_path / "a.pi2") as reader:
        assert reader.verify() > one.ffn_bytes > 0


#: Rotary embeddings that are others in longer sequences: from 65 tokens on, and (not in a bundle) beyond all positions.
LONG: dict[str, dict[str, Any]] = {
    "longrope": {
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 4.0, 8.0, 16.0]},
    },
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
}


def architecture(name: str) -> nn.Module:
    if name in LONG:
        torch.manual_seed(0)
        built = _hf("Phi3" if name == "longrope" else "Llama", **LONG[name], max_position_embeddings=128)
        return randomise(built, std=0.3).eval()
    return tiny(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama", "mistral", "qwen3", "gemma", "phi3", "opt", "falcon", *LONG],
)
def test_architectures_compute_the_same_in_lanes(name: str) -> None:
    """Before lowering: a prompt in either lane, then a token, against the model's own cache; and traced, at the end."""
    model = torch_pi2.optimize(architecture(name), config=torch_pi2.Config(method="exact"))
    layers = exported_layers(model)
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    with registered(layers) as key, torch.no_grad():
        lanes = Lanes(delegated_copy(model, layers, key), 2, 64)
        methods = decoder_methods(lanes, (2,))
        for lane in (0, 1):
            found = methods["forward"](ids[:, :8], torch.tensor([lane * 64]))
        torch.testing.assert_close(found[:, -1], model(ids[:, :8]).logits[:, -1], rtol=1e-4, atol=1e-4)
        token, place = ids[:, 8:].repeat(2, 1), torch.full((2, 1), 8)
        step = methods["decode_b2"](token, place)
        torch.testing.assert_close(step[1, -1], model(ids).logits[0, -1], rtol=1e-4, atol=1e-4)
        decode = name in ("llama", "longrope")
        names = ["forward", "decode_b2"][: 2 if decode else 1]
        traced = trace({method: method_spec(method, lanes, 20) for method in names}, name)
        check_traced(lanes, traced, max_prompt=20, smooth=True, decode=decode)
        assert not any(rows.any() for rows in (lanes.key_0, lanes.value_0))  # nothing is left of it
    targets = [str(node.target) for node in traced["forward"].graph.nodes]
    assert sum(target.startswith("pi2.delegate_ffn") for target in targets) == len(layers)


@pytest.mark.slow
def test_a_16_bit_model_computes_in_float32() -> None:
    """But for neurons and embeddings, which stay as they are: the numbers of the model with these weights."""
    model = exact(one_layer().bfloat16())
    layers = exported_layers(model)
    ids = torch.tensor([PROMPT])
    with registered(layers) as key, torch.no_grad():
        private = delegated_copy(model, layers, key)
        prepare_rest(private, "float32")
        kinds = {name: tensor.dtype for name, tensor in private.state_dict().items()}
        assert kinds.pop("model.embed_tokens.weight") == torch.bfloat16
        assert set(kinds.values()) == {torch.float32}
        forward = decoder_methods(Lanes(private, 1, ROOM), (1,))["forward"]
        found = forward(ids, torch.tensor([0]))[0, -1]
        wanted = torch_pi2.restore(model).float()(ids).logits[0, -1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


def test_hot_chunks_and_the_cold_part_are_the_layer() -> None:
    model = optimized()
    ffn = sparse_layers(model)[0]
    x = torch.randn(5, HIDDEN)
    hot = hot_chunks(ffn, 2)
    assert [len(up.weight) for up in hot.up] == [512, 512]
    with torch.no_grad():
        torch.testing.assert_close(hot(x) + cold_part(ffn, x, 1024), ffn(x), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(hot.first(1)(x) + cold_part(ffn, x, 512), ffn(x), rtol=1e-4, atol=1e-4)
    assert isinstance(hot, HotChunks)


def test_chunks_follow_what_a_batch_fires() -> None:
    text = torch.randint(3, 250, (64, 24), generator=torch.Generator().manual_seed(0))
    model = torch_pi2.optimize(one_layer(), text, torch_pi2.Config(method="exact", calibration_tokens=1500))
    layers, stats = sparse_layers(model), model.torch_pi2.stats
    found = chunks_per_batch(layers, (1, 2, 4, 64), stats, hot_frequency=0.6)
    assert [of_layer for (of_layer,) in found.values()] == sorted(of_layer for (of_layer,) in found.values())
    assert found[1] < found[64] == [2]  # 64 tokens together fire nearly all: 1,100 neurons are two chunks, rounded
    by_plan = HardwarePlan(
        {},
        None,
        1 << 30,
        64,
        (Bucket(1, (600,), (512,), (0,)), Bucket(2, (1200,), (1024,), (0,))),
        PromptPlan((0,)),
    )
    assert chunks_per_batch(layers, (1, 2, 4), stats, hardware=by_plan) == {1: [1], 2: [2], 4: [2]}
    on_the_cpu = replace(by_plan, buckets=(Bucket(1, (600,), (0,), (0,)),))
    assert chunks_per_batch(layers, (1, 4), None, hardware=on_the_cpu) == chunks_per_batch(layers, (1, 4), None)
    assert chunks_per_batch(layers, (1, 4), None, {1: 2, 4: 9}) == {1: [2], 4: [3]}
    with pytest.raises(ConfigError, match=r"hot=.*1 or more chunks for each batch size of \[1, 4\], found None for 4"):
        chunks_per_batch(layers, (1, 4), None, {1: 1})


def test_ignored_fields_of_a_generation_config_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model: Any = optimized()
    model.generation_config.no_repeat_ngram_size = 2
    model.generation_config.repetition_penalty = 1.5  # is applied
    api._save_small(model, None, tmp_path)
    logged = [record.getMessage() for record in caplog.records if record.getMessage().startswith("export: ")]
    assert logged == ["export: generation_config.json has no_repeat_ngram_size, which bundles do not apply"]


def test_export_leaves_the_model_and_an_earlier_bundle_whole(
    plain: tuple[nn.Module, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = optimized()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    out = Path(shutil.copytree(plain[1], tmp_path / "b"))
    earlier = {path.name: path.read_bytes() for path in out.iterdir()}

    def fail(*_: Any) -> Any:
        raise RuntimeError("no space")

    monkeypatch.setattr(api, "_write_program", fail)
    with pytest.raises(RuntimeError, match="no space"):
        torch_pi2.export(model, out, max_tokens=ROOM)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == earlier
    assert model.torch_pi2 is not None
    after = model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert greedy(model, PROMPT, 3)


def exact(model: nn.Module) -> nn.Module:
    return torch_pi2.optimize(model, config=torch_pi2.Config(method="exact"))


def gpt_neo() -> nn.Module:
    """Local attention that no name in its configuration tells."""
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    config = GPTNeoConfig(**sizes, vocab_size=64, window_size=8, max_position_embeddings=64, activation_function="relu")
    return exact(randomise(GPTNeoForCausalLM(config).eval()))


class OverTokens(nn.Module):
    """Every token has something of all others: nothing that keys and values can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(1, keepdim=True) / 2


def not_causal() -> nn.Module:
    model = one_layer()
    model.model.norm = OverTokens()
    return exact(model)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64}
    return exact(T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval())


def refusals() -> list[Any]:
    x = torch.randn(80, 24)
    mlp = nn.Sequential(nn.Sequential(nn.Linear(24, 70), nn.ReLU(), nn.Linear(70, 24)))
    few = {"max_tokens": 48, "batches": (1,)}
    many = {"max_tokens": 100, "batches": (1,)}
    long = (
        "at most 64: Phi3ForCausalLM computes its attention otherwise in longer .* found 100. Export with max_tokens=64"
    )
    return [
        pytest.param(one_layer, {}, ConfigError, "found a dense model", id="dense"),
        pytest.param(optimized, {"hot": {8: 1}}, ConfigError, "chunks for the batch sizes in batches", id="hot"),
        pytest.param(optimized, {"dynamic_shapes": {}}, ConfigError, "the example inputs that they", id="shapes"),
        pytest.param(optimized, {"max_tokens": 65}, ConfigError, "at most 64, the positions", id="positions"),
        pytest.param(optimized, few | {"tokenizer": "gpt2"}, ConfigError, "found str", id="tokenizer"),
        pytest.param(int4, few | {"linears": "int8"}, ConfigError, "those of the model are in int4", id="quantised"),
        pytest.param(lambda: torch_pi2.optimize(mlp, [(x,)]), {}, ConfigError, "example inputs", id="no args"),
        pytest.param(gpt_neo, few, UnsupportedModelError, "its attention is of another kind", id="local"),
        pytest.param(lambda: exact(architecture("longrope")), many, ConfigError, long, id="longrope"),
        pytest.param(not_causal, few, UnsupportedModelError, "its attention is of another kind", id="not causal"),
        pytest.param(t5, few, UnsupportedModelError, "an encoder and a decoder", id="encoder"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "tpu"}, "'xnnpack', or 'qnn:SM8650'"),
        ({"linears": "int3"}, r"linears=.*float32 or int8 or int4"),
        ({"kv": "int4"}, r"kv=.*float32 or float16 or int8"),
        ({"batches": ()}, "batch sizes of 1 or more"),
        ({"max_tokens": 2}, "3 or more, found 2"),
        ({"precision": "fp16"}, r"precision=.*the default, as target is no NPU, found .fp16"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExportSettings(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "settings", "error", "message"), refusals())
def test_what_is_refused(make: Any, settings: Any, error: type[Pi2Error], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        torch_pi2.export(make(), tmp_path / "b", **settings)
    assert list(tmp_path.iterdir()) == []
