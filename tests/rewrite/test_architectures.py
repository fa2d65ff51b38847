"""Every architecture against its dense self: sites, logits, ``generate``, restore, ``save_pretrained``."""

from __future__ import annotations

import copy

import pytest
import torch
from rewriting import assert_same_state, count_op_calls, make_plan
from tiny_models import BUILDERS, EXPECTED, HIDDEN, INTERMEDIATE, LAYERS, VOCAB, tiny

from torch_pi2.graph import find_sites
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import replacement_of
from torch_pi2.rewrite.rewrite import restore, rewrite

ARCHITECTURES = sorted(BUILDERS)


def logits(model, ids_BT, mask_BT=None):
    return model(input_ids=ids_BT, attention_mask=mask_BT).logits


def relative(found, wanted) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sites(name):
    expected = EXPECTED[name]
    sites = find_sites(tiny(name))
    assert [s.layer for s in sites] == list(range(LAYERS))
    assert [s.key for s in sites] == [expected.owner, expected.owner.replace(".0", ".1")]
    for site in sites:
        assert (site.activation, site.gated, site.activation_on_up) == (
            expected.activation,
            expected.gated,
            expected.on_up,
        )
        assert (site.hidden, site.intermediate) == (HIDDEN, INTERMEDIATE)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.no_grad()
def test_equal_to_dense(name, tmp_path):
    """Logits to 1e-5 of the largest, the same text, and an exact way back."""
    dense = tiny(name)
    model = copy.deepcopy(dense)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    plan = make_plan(model)
    ids_BT = torch.randint(3, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[0, :4] = mask_BT[1, :1] = 0  # left padding
    padded_BT = ids_BT.masked_fill(mask_BT == 0, 0)
    wanted, wanted_padded = logits(dense, ids_BT), logits(dense, padded_BT, mask_BT)

    for method in ("dense", "exact"):
        for layer in plan.layers:
            layer.method = method
        rewrite(model, plan)
        assert count_op_calls(lambda: logits(model, ids_BT)) == LAYERS
        place = EXPECTED[name].owner + (".fc1" if EXPECTED[name].way == "chain" else "")
        assert type(replacement_of(model.get_submodule(place))) is SparseFFN
        assert relative(logits(model, ids_BT), wanted) < 1e-5
        assert relative(logits(model, padded_BT, mask_BT)[mask_BT == 1], wanted_padded[mask_BT == 1]) < 1e-5
        if method == "dense":
            assert_same_state(restore(model), state)
            assert torch.equal(logits(model, ids_BT), wanted)

    options = {"attention_mask": mask_BT, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(padded_BT, do_sample=False, **options)
    assert greedy.shape == (3, 14)
    assert torch.equal(greedy, dense.generate(padded_BT, do_sample=False, **options))
    sampled = []
    for m in (model, dense):
        torch.manual_seed(7)
        sampled.append(m.generate(padded_BT, do_sample=True, temperature=2.0, top_k=20, **options))
    assert torch.equal(*sampled)

    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(logits(again, ids_BT), wanted)
    assert_same_state(restore(model), state)
    assert torch.equal(logits(model, ids_BT), wanted)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama-relu", "opt", "phi3"])
def test_half_precision(name, dtype):
    """Against a float32 model with the same rounded weights: no further away than the dense half model, doubled."""
    exact = tiny(name, std=0.1).to(dtype).float()
    dense = copy.deepcopy(exact).to(dtype)
    model = copy.deepcopy(dense)
    rewrite(model, make_plan(model))
    ids_BT = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    wanted = logits(exact, ids_BT)
    assert relative(logits(model, ids_BT).float(), wanted) < 2 * relative(logits(dense, ids_BT).float(), wanted)
