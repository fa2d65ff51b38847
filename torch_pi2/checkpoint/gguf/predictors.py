"""PowerInfer's predictors in a GGUF file, converted to our low-rank predictors, with their recall on the user's text.

A block has two matrices, ``fc1`` and ``fc2``: neuron i is computed if ``(fc2 relu(fc1 x))_i`` is at least
``powerinfer.sparse_threshold`` (https://github.com/SJTU-IPADS/PowerInfer, ``llm_build_ffn_sparse`` in llama.cpp). There
x is the hidden state *before* the norm of the feed-forward layer; our predictors see ``norm.weight * x / rms(x)``. With
``fc1 / norm.weight`` in place of ``fc1``, our score is theirs divided by ``rms(x)``, since ReLU commutes with positive
factors. The neurons are the same if the threshold is 0; other thresholds cannot be expressed.
"""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.modules import evaluating
from torch_pi2.base.progress import bar
from torch_pi2.checkpoint.gguf.source import GgufCheckpoint
from torch_pi2.checkpoint.sparse import LoadSettings, load_sparse
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.fitting.train import measure
from torch_pi2.layers.ffn import SparseFFN
from torch_pi2.layers.of_model import called_modules, sparse_layers
from torch_pi2.ops.activations import ACTIVATIONS
from torch_pi2.ops.quantized import quantize
from torch_pi2.ops.rows import row_of_neurons
from torch_pi2.predict.file import save_predictors
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.profiling.data import Batch, calibration_batches
from torch_pi2.profiling.recorder import real_tokens
from torch_pi2.profiling.samples import Samples
from torch_pi2.store.folder import PI2_FOLDER
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.plan import Plan
from torch_pi2.types.site import FFNSite
from torch_pi2.types.stats import pack_bits

#: Tokens on which recall is measured.
_TOKENS = 2048
_FORMAT = "int8"


def import_predictors(checkpoint: GgufCheckpoint, folder: Path, data: Any, progress: bool) -> dict[str, float]:
    """Write the file's predictors into ``folder``, where it was imported to, and a plan that uses them.

    Args:
        data: as for :func:`torch_pi2.profiling.data.batches`; text is read with the folder's tokenizer.

    Returns:
        Layer key -> recall: the share of neurons firing on ``data`` that are predicted.

    Raises:
        UnsupportedModelError: no predictors, or ones that ours cannot express. ArtifactError: some are missing, or of
            other sizes. CalibrationError: too little ``data``, or text without a tokenizer.
    """
    pi2 = folder / PI2_FOLDER
    plan = Plan.load(pi2)
    _check_there(checkpoint)
    predictors = {layer.site.key: _predictor(checkpoint, layer.site) for layer in plan.layers}
    model = load_sparse(folder, plan, {}, LoadSettings(progress=progress))
    text = calibration_batches(model, data, None, Config(calibration_tokens=_TOKENS))
    samples = _samples(model, text, progress)
    layers = []
    for layer in plan.layers:
        predictor = predictors[layer.site.key]
        predictor.card = measure(predictor, samples[layer.site.key], layer.site)
        layers.append(replace(layer, method=Method.LOWRANK, expected_active=predictor.card.predicted_active))
    save_predictors(pi2, predictors, plan.model_hash)
    replace(plan, layers=layers).save(pi2)
    return {key: predictor.card.recall for key, predictor in predictors.items() if predictor.card}


def _check_there(checkpoint: GgufCheckpoint) -> None:
    threshold = checkpoint.file.metadata.get("powerinfer.sparse_threshold", 0)
    found = ""
    if not checkpoint.predictors():
        found = "no blk.0.fc1.weight"
    elif threshold != 0:
        found = f"powerinfer.sparse_threshold {threshold}, which is for the input before the norm"
    if found:
        what = f"import_gguf(predictors=...) of {checkpoint.folder}"
        expected = "PowerInfer's predictors, with a threshold of 0"
        fix = "Leave predictors out: the exact gate needs none."
        raise UnsupportedModelError(what, expected=expected, found=found, fix=fix)


def _predictor(checkpoint: GgufCheckpoint, site: FFNSite) -> LowRankRows:
    fc1_rH, fc2_Ir = checkpoint.predictor(site.layer)
    if fc1_rH.shape[1] != site.hidden or fc2_Ir.shape != (site.intermediate, len(fc1_rH)):
        what = f"predictor of block {site.layer} in {checkpoint.folder}"
        expected, fix = f"fc1 [r, {site.hidden}] and fc2 [{site.intermediate}, r]", "Get the file again."
        raise ArtifactError(what, expected=expected, found=f"{list(fc1_rH.shape)} and {list(fc2_Ir.shape)}", fix=fix)
    norm_H = checkpoint.read(f"model.layers.{site.layer}.post_attention_layernorm.weight").float()
    if zeros := int((norm_H == 0).sum()):
        what = f"predictor of block {site.layer} in {checkpoint.folder}"
        found = f"{zeros} of its {site.hidden} weights are 0, and what the predictor saw there is lost"
        fix = "Leave predictors out: the exact gate needs none."
        raise UnsupportedModelError(what, expected="a norm that lets every number through", found=found, fix=fix)
    a, b = (quantize(f"predictor of block {site.layer}", w, _FORMAT) for w in (fc1_rH / norm_H, fc2_Ir))
    return LowRankRows(a, b, torch.zeros(site.intermediate), _FORMAT, site.hidden)


def _samples(model: Any, text: list[Batch], progress: bool) -> dict[str, Samples]:
    """Inputs of each layer on ``text``, and which of its neurons fire by their recomputed gates."""
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    batch = text[0]

    def look(layer: SparseFFN, args: tuple[torch.Tensor, ...]) -> None:
        site = layer.site
        x_TH = args[0].reshape(-1, site.hidden)
        x_TH = x_TH[real_tokens(site.key, batch, len(x_TH))[0]]
        rows, kind = row_of_neurons(layer.in_row_order(), 0, layer.weights, site.hidden)
        gate_TI = torch.ops.pi2.linear(x_TH.float(), rows.contiguous(), None, kind, False)
        seen[site.key].append((x_TH, pack_bits(ACTIVATIONS[site.activation](gate_TI) != 0)))

    sizes = {layer.site.key: layer.site.intermediate for layer in sparse_layers(model)}
    called = called_modules(model)
    for layer in sparse_layers(model):
        called[layer].register_forward_pre_hook(lambda _, args, layer=layer: look(layer, args))
    with evaluating(model):
        for batch in bar(text, "predictors", progress, unit="batch"):
            batch.call(model)
    return {
        key: Samples(torch.cat([x for x, _ in parts]), torch.cat([bits for _, bits in parts]), sizes[key])
        for key, parts in seen.items()
    }
