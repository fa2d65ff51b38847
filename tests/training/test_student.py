"""Which models can be given ReLU, which dReLU, and who is refused with what words."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import tiny

import torch_pi2
from torch_pi2.errors import UnsupportedModelError
from torch_pi2.training.student import drelu_code, student_of

#: Family -> its FFN with ReLU. Gated and plain, fused and not, activations named by other fields.
RELU = {
    "llama": "relu(gate)*up",
    "gemma2": "relu(gate)*up",
    "phi3": "relu(gate)*up",
    "falcon": "relu(up)",
    "gpt2": "relu(up)",
    "nemotron": "relu2(up)",
    "drelu": "relu(gate)*relu(up)",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RELU)
def test_relu_by_the_name_in_its_configuration(name: str) -> None:
    dense = tiny(name)
    student, sites, code = student_of(dense, "relu-gate")
    assert {site.form for site in sites} == {RELU[name]}
    assert {site.form for site in torch_pi2.find_sites(student)} == {RELU[name]}
    assert code is None
    assert student.dtype == torch.float32
    ours, theirs = student.state_dict(), dense.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "llama-bias", "qwen3"])
def test_drelu_by_code_that_is_written(name: str) -> None:
    dense = tiny(name)
    if name == "llama-bias":
        dense.config.hidden_act = "silu"
        dense = type(dense)(dense.config)
    student, _, code = student_of(dense, "drelu")
    assert {site.form for site in torch_pi2.find_sites(student)} == {"relu(gate)*relu(up)"}
    assert code is not None
    assert student.config.auto_map["AutoModelForCausalLM"] == f"modeling_drelu.{type(student).__name__}"
    assert student.config.model_type.startswith("drelu_")
    ours, theirs = student.state_dict(), dense.state_dict()
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


def test_experts_are_refused() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **more))
    with pytest.raises(
        UnsupportedModelError,
        match=r"training of a MixtralForCausalLM: expected feed-forward layers without experts, found experts: model\.",
    ):
        student_of(model, "relu-gate")


def test_an_activation_that_no_field_names_is_refused() -> None:
    model = transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(
        UnsupportedModelError,
        match=r"activation of BloomForCausalLM: expected an FFN that follows hidden_act or .* found no such field",
    ):
        student_of(model, "relu-gate")


@pytest.mark.parametrize(
    ("name", "found"), [("gpt2", r"gelu_tanh\(up\) in .*: no gate"), ("phi3", "other names than gate_proj")]
)
def test_ffns_of_another_form_have_no_drelu(name: str, found: str) -> None:
    dense = tiny(name)
    with pytest.raises(
        UnsupportedModelError, match=f"drelu in .*: expected a model of transformers .*, found .*{found}"
    ):
        drelu_code(dense, torch_pi2.find_sites(dense))
