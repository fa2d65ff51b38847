"""Folders of ours in transformers' own functions: the tokens of ``torch_pi2.load``, or a refusal by name."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from fake_hub import FakeHub
from safetensors import safe_open
from tiny_tokenizers import TEXT, byte_tokenizer
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralForCausalLM,
    pipeline,
)

import torch_pi2
import torch_pi2.hf
from torch_pi2.checkpoint.save_load import load_dense
from torch_pi2.errors import ArtifactError, ConfigError, DeviceError, DtypeError, UnsupportedModelError
from torch_pi2.store.folder import HF_FILE
from torch_pi2.types.offload import OffloadConfig

Settings = torch_pi2.Pi2QuantizationConfig
IDS = torch.arange(3, 11)[None]
BUDGET = {"budget": "1GiB"}
PROMPT = "def f("


def opened(folder: str | Path, settings: Any = None, **kwargs: Any) -> Any:
    if settings is not None:  # None itself would erase what config.json says
        kwargs["quantization_config"] = settings
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def tokens(model: Any, **how: Any) -> list[int]:
    found = model.generate(IDS, **{"max_new_tokens": 12, "do_sample": False} | how)[0].tolist()
    assert len(set(found[8:])) > 2, "nothing that a wrong model would not say, too"
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``float``, and made of it ``saved``, ``int4``, ``store``, ``float-store``, ``predicted``."""
    base = tmp_path_factory.mktemp("hf")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    ids = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ids, hidden_act="relu", initializer_range=0.3)).eval()
    tokenizer = byte_tokenizer(TEXT)
    tokenizer.chat_template = "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}"
    model.save_pretrained(base / "float")
    tokenizer.save_pretrained(base / "float")
    torch_pi2.quantize(base / "float", base / "int4")
    torch_pi2.pack(base / "int4", base / "store")
    torch_pi2.pack(base / "float", base / "float-store")
    torch_pi2.save(torch_pi2.optimize(model), base / "saved", tokenizer)
    torch_pi2.synthetic(base / "predicted", sizes | heads | {"model_type": "llama"}, rank=16, active=0.3)
    return base


CASES = {
    "int4": {},
    "int4, int8 inputs": {"activations": "int8"},
    "store": {},
    "store, budget": BUDGET,
    "float-store": {},
    "float-store, budget": BUDGET,
    "predicted": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_tokens_of_load(root: Path, tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, settings = root / case.partition(",")[0], CASES[case]
    loaded = torch_pi2.load(folder, **settings)
    model = opened(folder, Settings(**settings) if settings else None)
    assert type(model) is type(loaded)
    assert model.dtype == loaded.dtype
    assert not model.training
    assert tokens(model) == tokens(loaded)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, loaded(IDS).logits)
    if "budget" in settings:
        assert torch_pi2.stats(model)["budget"].total == 1 << 30
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    model.save_pretrained(tmp_path / "out")
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("model")]
    again = opened(tmp_path / "out", Settings(**settings) if settings else None)
    assert tokens(again) == tokens(loaded)
    assert tokens(torch_pi2.load(tmp_path / "out", **settings)) == tokens(loaded)


def test_a_folder_of_float_weights_is_what_is_asked_for(root: Path) -> None:
    dense = opened(root / "saved")
    assert not hasattr(dense, "torch_pi2")
    assert type(dense.model.layers[0].mlp).__name__ == "LlamaMLP"
    sparse = opened(root / "saved", Settings())
    assert sparse.torch_pi2.plan.layers
    with torch.no_grad():
        assert torch.equal(sparse(IDS).logits, torch_pi2.load(root / "saved")(IDS).logits)
    assert "quantization_config" not in json.loads((root / "saved" / "config.json").read_text())
    with pytest.raises(ArtifactError, match=r"plan.json: expected a file, found nothing"):
        opened(root / "float", Settings())


_WITHOUT = """
import sys
sys.modules["torch_pi2"] = None  # as if it were not installed
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        print(type(AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)).__name__)
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_without_us_nothing_opens_at_random(root: Path) -> None:
    names = ["int4", "store", "float-store", "predicted", "saved"]
    command = [sys.executable, "-c", _WITHOUT, *(str(root / name) for name in names)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *refused, dense = done.stdout.splitlines()
    assert dense == "LlamaForCausalLM"  # with the weights of an ordinary checkpoint
    assert len(refused) == 4
    assert all(line.startswith("OSError Error no file named model.safetensors") for line in refused), refused
    assert done.stderr.count("Unknown quantization type, got torch_pi2") == 4


def test_what_is_said_of_a_folder(root: Path, tmp_path: Path) -> None:
    for name, weights in (("int4", "int4"), ("store", "int4"), ("float-store", "float32"), ("predicted", "int4")):
        config = json.loads((root / name / "config.json").read_text())
        dtype = "bfloat16" if name == "predicted" else "float32"
        assert config["quantization_config"] == {"quant_method": "torch_pi2", "weights": weights, "dtype": dtype}
        with safe_open(root / name / HF_FILE, "pt") as file:
            assert not list(file.keys())
            assert file.metadata() == {"format": "pt", "pi2_format": "torch_pi2.transformers"}
        # it is of the folder, and no model of ours has it, which may be dense or become so
        assert not hasattr(load_dense(root / name).config, "quantization_config")
        assert not hasattr(torch_pi2.load(root / name).config, "quantization_config")
    load_dense(root / "int4").save_pretrained(tmp_path / "dense")
    assert not hasattr(opened(tmp_path / "dense"), "torch_pi2")


def test_settings(root: Path, tmp_path: Path) -> None:
    folder, wanted = root / "store", tokens(torch_pi2.load(root / "store"))
    reads = {"policy": "sieve", "engine": "pread"}
    for settings in (BUDGET | {"offload": reads}, Settings(budget=1 << 30, offload=OffloadConfig(**reads))):
        model = opened(folder, settings)
        assert model.torch_pi2.store.config.policy == "sieve"
        assert tokens(model) == wanted
    with pytest.raises(ConfigError, match=r"budgit=.* Did you mean budget\?"):
        opened(folder, {"budgit": "1GiB"})
    with pytest.raises(ConfigError, match=r"Pi2QuantizationConfig\(context\): expected a whole number"):
        Settings(context="many")
    with pytest.raises(ConfigError, match=r"expected a Pi2QuantizationConfig.* found a BitsAndBytesConfig"):
        opened(folder, BitsAndBytesConfig(load_in_8bit=True))
    with pytest.raises(ConfigError, match=r"budget for .*: expected at least [\d.]+ MiB"):
        opened(folder, Settings(budget=1000))
    with pytest.raises(ConfigError, match="expected a folder with a neuron store"):
        opened(root / "int4", Settings(**BUDGET))
    # for programs that pass nothing
    shutil.copytree(folder, tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["quantization_config"] |= {"budget": "900MiB", "context": 64}
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    assert torch_pi2.stats(opened(tmp_path / "own"))["budget"].total == 900 << 20
    passed = torch_pi2.stats(opened(tmp_path / "own", Settings(**BUDGET)))["budget"]
    assert (passed.total, passed.piece_tokens) == (1 << 30, 64)
    opened(tmp_path / "own").save_pretrained(tmp_path / "again")  # how to open it is of this machine
    assert "budget" not in (tmp_path / "again" / "config.json").read_text()


def test_arguments_of_from_pretrained(root: Path) -> None:
    folder, wanted = root / "store", tokens(torch_pi2.load(root / "store"))
    half = torch_pi2.load(folder, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, "bfloat16"):
        assert tokens(opened(folder, dtype=dtype)) == tokens(half)
    assert opened(folder, dtype="auto").dtype == torch.float32
    eager = opened(folder, attn_implementation="eager")
    assert {module.config._attn_implementation for module in eager.modules() if hasattr(module, "config")} == {"eager"}
    assert tokens(eager) == wanted
    assert tokens(LlamaForCausalLM.from_pretrained(folder)) == wanted
    assert tokens(opened(folder, config=AutoConfig.from_pretrained(folder))) == wanted
    assert tokens(opened(folder.parent, subfolder=folder.name)) == wanted
    _, info = opened(folder, output_loading_info=True)
    assert not any(info.values())
    quantizer = opened(folder).hf_quantizer
    for place in ("auto", {"": "cpu"}, {"": torch.device("cpu")}, None):
        assert quantizer.update_device_map(place) is None
    for place in ({"": torch.device("cuda:0")}, {"": 0}, {"": "disk"}):
        with pytest.raises(DeviceError, match=r"expected cpu or auto, found .*gpu_memory"):
            quantizer.update_device_map(place)
    with pytest.raises(DtypeError, match=r"dtype of .*store: expected float32 or bfloat16 or float16, found float64"):
        opened(folder, dtype=torch.float64)
    for kind in (AutoModel, MistralForCausalLM):
        with pytest.raises(UnsupportedModelError, match=r"a LlamaForCausalLM.*found a (LlamaModel|MistralForCausalLM)"):
            kind.from_pretrained(folder)


@pytest.mark.parametrize("missing", [HF_FILE, "pi2/model.pi2", "pi2"])
def test_a_folder_with_something_missing(root: Path, tmp_path: Path, missing: str) -> None:
    folder = tmp_path / "moved"
    shutil.copytree(root / "store", folder)
    assert tokens(opened(folder)) == tokens(torch_pi2.load(root / "store"))
    path = folder / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    about = {HF_FILE: f"{HF_FILE}: expected a safetensors file, found nothing"}
    with pytest.raises(ArtifactError, match=about.get(missing, "expected model.pi2 or weights.safetensors, found nei")):
        opened(folder)


def test_a_damaged_file_of_no_tensors(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "int4", tmp_path / "int4")
    file = tmp_path / "int4" / HF_FILE
    whole = file.read_bytes()
    for content in (b"", whole[:-1], whole + b"x", b"\xff" * len(whole)):
        file.write_bytes(content)
        with pytest.raises(ArtifactError, match=f"{HF_FILE}: expected "):
            opened(tmp_path / "int4")


def test_a_damaged_folder(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "store", tmp_path / "store")
    store = tmp_path / "store" / "pi2" / "model.pi2"
    data = bytearray(store.read_bytes())
    data[len(data) // 2] ^= 255
    store.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model.pi2: expected a whole safetensors file, found damage"):
        opened(tmp_path / "store")
    config = json.loads((root / "store" / "config.json").read_text())
    for name, value, said in (
        ("bits", 4, "expected one of activations"),
        ("dtype", "load", "expected float32 or bfloat16 or float16, found 'load'"),
    ):
        more = {"quantization_config": config["quantization_config"] | {name: value}}
        (tmp_path / "store" / "config.json").write_text(json.dumps(config | more))
        with pytest.raises(ConfigError, match=rf"Pi2QuantizationConfig\({name}=...\): {said}"):
            opened(tmp_path / "store")


def test_save_pretrained_keeps_what_it_does_not_write(root: Path, tmp_path: Path) -> None:
    model, out = opened(root / "int4"), tmp_path / "out"
    AutoTokenizer.from_pretrained(root / "int4").save_pretrained(out)
    opened(root / "float").save_pretrained(out)
    model.save_pretrained(out)
    assert not list(out.glob("model*.safetensors")), "dense weights of another model"
    assert tokens(opened(out)) == tokens(model)
    assert AutoTokenizer.from_pretrained(out)(PROMPT).input_ids
    assert tokens(opened(torch_pi2.save(model, tmp_path / "saved"))) == tokens(model)
    for name, value in (("state_dict", {"a": torch.ones(1)}), ("variant", "fp16"), ("push_to_hub", True)):
        with pytest.raises(ConfigError, match=rf"save_pretrained\({name}="):
            model.save_pretrained(tmp_path / "refused", **{name: value})
    with pytest.raises(ConfigError, match=r"save_pretrained\(state_dict="):
        model.save_pretrained(tmp_path / "refused", True, {"a": torch.ones(1)})
    assert not (tmp_path / "refused").exists()
    with pytest.raises(ConfigError, match="save_pretrained's folders: expected two separate ones"):
        opened(root / "store", Settings(**BUDGET)).save_pretrained(root / "store")


def test_a_restored_model_is_an_ordinary_one(root: Path, tmp_path: Path) -> None:
    model = torch_pi2.restore(opened(root / "saved", Settings()))
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    with torch.no_grad():
        assert torch.equal(opened(tmp_path / "dense")(IDS).logits, opened(root / "float")(IDS).logits)
    saved = torch_pi2.save(opened(root / "float-store"), tmp_path / "saved")
    assert tokens(torch_pi2.load(saved)) == tokens(torch_pi2.load(root / "float-store"))


def test_the_model_is_one_of_transformers(root: Path) -> None:
    loaded, model = torch_pi2.load(root / "store", **BUDGET), opened(root / "store", Settings(**BUDGET))
    wanted = tokens(loaded)
    assert tokens(model, num_beams=3) == tokens(loaded, num_beams=3)
    drawn = []
    for one in (loaded, model):
        torch.manual_seed(1)
        drawn.append(tokens(one, do_sample=True, temperature=0.9, top_k=50))
    assert drawn[0] == drawn[1]
    assert tokens(copy.deepcopy(model)) == wanted
    in_memory = opened(root / "store")
    assert tokens(pickle.loads(pickle.dumps(in_memory))) == wanted
    assert tokens(in_memory.to("cpu")) == wanted
    assert (in_memory.is_quantized, in_memory.hf_quantizer.is_trainable) == (True, False)
    compiled = torch.compile(in_memory, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS).logits, in_memory(IDS).logits)


def test_pipeline(root: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(root / "store")
    ids = tokenizer(PROMPT, return_tensors="pt")
    loaded = torch_pi2.load(root / "store")
    wanted = tokenizer.decode(loaded.generate(**ids, max_new_tokens=8, do_sample=False)[0])
    talk = [{"role": "user", "content": "hello"}]
    said = loaded.generate(
        **tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True),
        max_new_tokens=8,
        do_sample=False,
    )[0]
    for how in ({}, {"device": "cpu"}, {"device": -1}, {"model_kwargs": {"quantization_config": BUDGET}}):
        pipe = pipeline("text-generation", model=str(root / "store"), **how)
        assert pipe.model.torch_pi2.plan.layers
        assert pipe(PROMPT, max_new_tokens=8, do_sample=False)[0]["generated_text"] == wanted
        answer = pipe(talk, max_new_tokens=8, do_sample=False)[0]["generated_text"][-1]["content"]
        assert answer == tokenizer.decode(said[-8:], skip_special_tokens=True)


@pytest.mark.slow
def test_transformers_serve(root: Path, tmp_path: Path) -> None:
    """transformers' own server and OpenAI's client; the budget is in config.json."""
    shutil.copytree(root / "store", tmp_path / "store")
    config = json.loads((tmp_path / "store" / "config.json").read_text())
    config["quantization_config"] |= BUDGET
    (tmp_path / "store" / "config.json").write_text(json.dumps(config))
    tokenizer, loaded = AutoTokenizer.from_pretrained(root / "store"), torch_pi2.load(root / "store")
    talk: Any = [{"role": "user", "content": "hello"}]
    ids = tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    wanted = tokenizer.decode(
        loaded.generate(**ids, max_new_tokens=6, do_sample=False)[0][-6:], skip_special_tokens=True
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    arguments = ["serve", "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"]
    server = subprocess.Popen(
        [sys.executable, "-m", "torch_pi2.hf", *arguments],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 120
        while server.poll() is None and time.monotonic() < until:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).read()
                break
            except OSError:
                time.sleep(0.5)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        name = str(tmp_path / "store")
        answer = client.chat.completions.create(model=name, messages=talk, max_tokens=6, temperature=0)
        assert answer.choices[0].message.content == wanted
        assert name in [model.id for model in client.models.list()]
    finally:
        server.terminate()
        _, said = server.communicate(timeout=60)
    assert server.returncode in (0, -15), said


_HUB = """
import sys
import torch
import torch_pi2.hf
from transformers import AutoModelForCausalLM

folder, name, push, *budget = sys.argv[1:]
settings = {"quantization_config": {"budget": budget[0]}} if budget else {}
if push == "push":
    AutoModelForCausalLM.from_pretrained(folder, **settings).push_to_hub(name)
model = AutoModelForCausalLM.from_pretrained(name, **settings)
print(model.generate(torch.arange(3, 11)[None], max_new_tokens=12, do_sample=False)[0].tolist())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "settings"), [("int4", {}), ("store", BUDGET)])
def test_the_hub(root: Path, tmp_path: Path, folder: str, settings: dict[str, str]) -> None:
    def run(push: str, **more: str) -> list[int]:
        command = [sys.executable, "-c", _HUB, str(root / folder), "me/model", push, *settings.values()]
        done = subprocess.run(command, env=environment | more, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        found: list[int] = json.loads(done.stdout.splitlines()[-1])
        return found

    wanted = tokens(torch_pi2.load(root / folder))
    with FakeHub() as hub:
        known = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
        environment = os.environ | known
        assert run("push") == wanted
        assert hub.repos["me/model"].keys() >= {"config.json", HF_FILE, "README.md"}
        assert "pi2/model.pi2" in hub.repos["me/model"] or folder == "int4"
    assert run("read", HF_HUB_OFFLINE="1") == wanted  # all of it is in the cache


_BUDGET = """
import ctypes, gc, json, sys
import torch, torch_pi2.hf
from transformers import AutoModelForCausalLM
from benchmarks import cap

tiny, folder, budget = sys.argv[1:]
torch.set_num_threads(2)

def use(model, tokens):
    model.generate(torch.arange(tokens)[None] * 7 % 1000, max_new_tokens=8, do_sample=False, pad_token_id=0)

use(AutoModelForCausalLM.from_pretrained(tiny, quantization_config={"budget": "1GiB"}), 40)  # libraries are there
gc.collect()
ctypes.CDLL(None).malloc_trim(0)
cap.reset_peak()
base = cap.peak_rss_bytes()
use(AutoModelForCausalLM.from_pretrained(folder, quantization_config={"budget": int(budget)}), 400)
print(cap.peak_rss_bytes() - base)
"""


@pytest.mark.slow
def test_a_budget_is_kept(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 2048}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    for name, sizes in (("tiny", "tiny"), ("large", shape)):
        torch_pi2.synthetic(tmp_path / f"{name}-plain", sizes, weights="int8", rank=64)
        torch_pi2.pack(tmp_path / f"{name}-plain", tmp_path / name)
    budget = torch_pi2.stats(torch_pi2.load(tmp_path / "large", budget="1GiB"))["budget"].smallest
    assert budget < (tmp_path / "large" / "pi2" / "model.pi2").stat().st_size, "all would fit"
    command = [sys.executable, "-c", _BUDGET, str(tmp_path / "tiny"), str(tmp_path / "large"), str(budget)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) <= budget + (4 << 20)


@pytest.mark.slow
def test_modelling_code_of_its_own(tmp_path: Path) -> None:
    """The trained example, whose class is in its folder."""
    trained = Path(__file__).parents[2] / "examples" / "models" / "drelu-stdlib-5m"
    torch_pi2.pack(trained, tmp_path / "store", weights="int4", trust_remote_code=True)
    wanted = torch_pi2.load(tmp_path / "store", trust_remote_code=True)
    model = opened(tmp_path / "store", trust_remote_code=True)
    assert type(model).__name__ == "DReLULlamaForCausalLM"
    assert tokens(model) == tokens(wanted)
    model.save_pretrained(tmp_path / "out")
    assert tokens(opened(tmp_path / "out", trust_remote_code=True)) == tokens(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("neurons", ["auto", "all"])
def test_an_imported_gguf_file(tmp_path: Path, neurons: str) -> None:
    """Formats of its own, a quantised embedding, neurons of two formats: the tokens of torch_pi2.load, saved again."""
    golden = Path(__file__).parents[1] / "data" / "gguf" / "tiny-llama.q4_k_m.gguf"
    torch_pi2.import_gguf(golden, tmp_path / "in", neurons=neurons)
    ids = torch.tensor([[5, 77, 130]])
    how = {"max_new_tokens": 6, "do_sample": False}
    wanted = torch_pi2.load(tmp_path / "in").generate(ids, **how)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "in")
    assert torch.equal(model.generate(ids, **how), wanted)
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").generate(ids, **how), wanted)
