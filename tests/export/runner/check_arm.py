"""``make test-arm``: the runner built for 64-bit ARM, under qemu, against the one of this machine, on one bundle.

The bundle has layers of our delegate, so its kernels for ARM compute as well: on a CPU that has every extension and on
plain armv8-a.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runner_http import Server, client
from tiny_bundle import TEXT
from tiny_tokenizers import byte_tokenizer

import torch_pi2
from torch_pi2.export.api import export

BUILD = Path(__file__).parents[3] / "build"
HERE, ARM = BUILD / "runner" / "pi2" / "pi2_runner", BUILD / "runner-arm" / "pi2"
LOADER = [ARM / "ld-linux-aarch64.so.1", "--library-path", ARM, ARM / "pi2_runner"]
TOKENS = 16


@pytest.fixture(scope="module", params=["Llama", "Mixtral"])
def bundle(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    import transformers

    torch.manual_seed(0)
    tokenizer = byte_tokenizer(TEXT)
    config = getattr(transformers, f"{request.param}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="relu",
        initializer_range=0.2,
        max_position_embeddings=64,
        eos_token_id=None,
    )
    model = torch_pi2.optimize(getattr(transformers, f"{request.param}ForCausalLM")(config).eval(), method="exact")
    return export(model, tmp_path_factory.mktemp("arm") / "bundle", tokenizer=tokenizer, max_tokens=64, batches=(1,))


def generate(command: list[object], bundle: Path, logits: Path, cpu: str | None) -> dict[str, Any]:
    options = [bundle, "--prompt", "def f1(x", "--max-new-tokens", TOKENS, "--json", "--logits", logits]
    environment = {} if cpu is None else {"QEMU_CPU": cpu, "PATH": os.environ["PATH"]}
    result = subprocess.run([*map(str, [*command, *options])], capture_output=True, env=environment)
    assert result.returncode == 0, result.stderr.decode()
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.parametrize("cpu", ["max", "cortex-a53"])
def test_answers_on_arm_are_those_of_this_machine(bundle: Path, tmp_path: Path, cpu: str) -> None:
    here = generate([HERE], bundle, tmp_path / "here.npy", None)
    arm = generate(["qemu-aarch64-static", *LOADER], bundle, tmp_path / "arm.npy", cpu)
    assert arm["sequences"] == here["sequences"]
    assert arm["store"]["wanted"] > 0
    np.testing.assert_allclose(np.load(tmp_path / "arm.npy"), np.load(tmp_path / "here.npy"), atol=1e-4)


def test_it_answers_over_http_on_arm(bundle: Path, tmp_path: Path) -> None:
    here = generate([HERE], bundle, tmp_path / "here.npy", None)["sequences"][0]["text"]
    with Server(shutil.which("qemu-aarch64-static"), *LOADER, bundle, "--http", "0", "--cpus", "auto") as made:
        asked: dict[str, Any] = {"model": bundle.name, "prompt": "def f1(x", "max_tokens": TOKENS}
        assert client(made).completions.create(**asked).choices[0].text == here
        chunks = client(made).completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == here


def test_damage_is_refused_on_arm_too(bundle: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(bundle, tmp_path / "bundle"))
    (damaged / "model.pi2").write_bytes((bundle / "model.pi2").read_bytes()[:-1])
    command = ["qemu-aarch64-static", *LOADER, damaged, "--prompt", "d"]
    result = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert result.returncode == 2
    assert f"{damaged / 'model.pi2'}: expected " in result.stderr
    assert "it is cut. " in result.stderr
