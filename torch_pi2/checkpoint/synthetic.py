"""``torch_pi2.synthetic``: writes a checkpoint with random weights and the sizes of a real model, to measure speed.

The neurons fire as often as published measurements say (:mod:`torch_pi2.store.synthetic`). Every embedding row is a
fixed direction d of +-1 plus equally strong noise. The blocks add little, and norms pass it on, so every layer sees
``(d + n) / sqrt(2)`` with noise n that differs between tokens.
"""

import copy
import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.fields import checked
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.tensorfile import Spec, TensorWriter
from torch_pi2.errors import ConfigError
from torch_pi2.formats import FLOATS, QUANTIZED, row_bytes
from torch_pi2.graph.find import search
from torch_pi2.ops import load as load_library
from torch_pi2.ops.activations import norm, of_all
from torch_pi2.predict.file import FittedPredictors, save_predictors
from torch_pi2.store import synthetic as drawn
from torch_pi2.store.folder import PI2_FOLDER, check_replaceable, declare
from torch_pi2.store.weights import WEIGHTS_FILE, metadata, neuron_specs
from torch_pi2.types.config import Config
from torch_pi2.types.method import Method
from torch_pi2.types.plan import LayerPlan, Plan
from torch_pi2.types.site import FFNSite

#: Output of a block relative to the noise of the embedding: 64 blocks change the stream by 16 %.
_BLOCK = 0.02
#: Rows made at a time.
_CHUNK = 2048
_LAW = "p(u) = min(0.95, c u^-s), 43 % of neurons make 80 % of activations (PowerInfer, arXiv 2312.12456)"


@checked
@fresh_settings()
def synthetic(
    folder: str | Path,
    shape: str | Mapping[str, Any] = "mistral-7b",
    *,
    active: float = 0.1,
    weights: str = "int4",
    predictor: str | None = "lowrank",
    rank: int = 512,
    hot_frequency: float | None = None,
    layers: int | None = None,
    locality: float = drawn.LOCALITY,
    distinct_layers: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> dict[str, Any]:
    """Write a synthetic model to ``folder``; returns its description (also in its config.json).

    Memory stays at some hundred MB whatever the size. Norms and embedding are bfloat16 and everything else is
    quantised, or everything is float. Layers are ReGLU (relu2 where the class has that), or with ``active=1`` of SiLU.

    Args:
        shape: a name in ``torch_pi2.store.synthetic.SHAPES``, or configuration values with ``model_type`` llama,
            mistral, qwen2, mixtral, qwen3_moe, olmoe, arcee, jais2, nemotron_h, bitnet or rwkv7. Routers choose all
            experts about equally often.
        active: mean share of neurons that fire for a token, in every layer. 1: all of them, as in SwiGLU, without a
            predictor (``predictor=None``).
        weights: ``int4``, ``int8``, or ``float32``, ``bfloat16`` or ``float16``, which quantise nothing.
        predictor: ``lowrank`` (of ``rank``, in int4), or None for the exact gate.
        hot_frequency: neurons that fire for at least this share of tokens are hot (default: that of Config).
        layers: another number of layers than the shape's.
        locality: part of the noise that tokens of one topic share (:mod:`torch_pi2.store.synthetic`); 0: none.
        distinct_layers: number of layers whose feed-forward weights are generated; the others are copies, each stored
            separately, with the size and the reads of the whole model in less time.

    Raises:
        ConfigError: an invalid setting. ArtifactError: the folder cannot be written, or holds other files.
            LibraryMissingError: transformers is not installed.
    """
    load_library()
    for name, value, good, expected in (
        ("active", active, 0 < active <= 0.9 or active == 1, "more than 0, at most 0.9, or 1"),
        ("weights", weights, weights in (*QUANTIZED, *FLOATS), " or ".join((*QUANTIZED, *FLOATS))),
        ("predictor", predictor, predictor in ("lowrank", None), "lowrank or None"),
        ("predictor", predictor, predictor is None or active < 1, "None where every neuron is computed (active=1)"),
        ("rank", rank, rank >= 1, "at least 1"),
        ("locality", locality, 0 <= locality < 1, "0 or more, less than 1"),
        ("distinct_layers", distinct_layers, distinct_layers is None or distinct_layers >= 1, "at least 1"),
    ):
        if not good:
            raise ConfigError(f"synthetic({name}=...)", expected=expected, found=repr(value), fix="Correct it.")
    label: dict[str, Any] = {"synthetic": "random weights: speed means something, quality does not"}
    label["shape"], ranked = shape if isinstance(shape, str) else dict(shape), predictor == "lowrank"
    label |= {"active": active, "weights": weights, "predictor": predictor, "rank": rank if ranked else 0}
    label["predictor_weights"] = "int4" if ranked else None
    label["hot_frequency"] = Config().hot_frequency if hot_frequency is None else hot_frequency
    label |= {"law": _LAW if active < 1 else None, "residual": drawn.RESIDUAL, "locality": locality, "seed": seed}
    label |= {} if distinct_layers is None else {"distinct_layers": distinct_layers}
    more = ({} if layers is None else {"num_hidden_layers": layers}) | ({"dtype": weights} if weights in FLOATS else {})
    config = drawn.build_config(shape, active < 1, **more, torch_pi2_synthetic=label)
    if layers is not None and config.num_hidden_layers != layers:
        expected, fix = f"{config.num_hidden_layers}, the kinds that the shape lists", "Change layers_block_type."
        raise ConfigError("synthetic(layers=...)", expected=expected, found=repr(layers), fix=fix)
    folder = Path(folder).resolve()
    check_replaceable(folder)
    with replacing_folder(folder) as staging:
        config.save_pretrained(staging)
        _Writer(config, label, progress).write(staging / PI2_FOLDER)
        declare(staging)
    return label


class _Writer:
    def __init__(self, config: Any, label: dict[str, Any], progress: bool) -> None:
        from transformers import AutoModelForCausalLM

        self.config, self.label, self.progress = config, label, progress
        self.kind = str(label["weights"])
        self.dtype = DTYPES.get(self.kind, torch.bfloat16)  # of float tensors
        self.hidden = config.hidden_size
        with torch.device("meta"):
            self._model: nn.Module = AutoModelForCausalLM.from_config(config)
        self._generator = torch.Generator().manual_seed(int(label["seed"]))
        self._d = drawn.direction(self.hidden, self._generator)
        self._swiglu = label["active"] == 1
        self._p: dict[int, torch.Tensor] = {}  # number of neurons -> how often they fire

    def _frequencies(self, neurons: int) -> torch.Tensor:
        if neurons not in self._p:  # of SwiGLU half of the gates are positive
            half = torch.full((neurons,), 0.5, dtype=torch.float64)
            self._p[neurons] = half if self._swiglu else drawn.power_law(neurons, float(self.label["active"]))
        return self._p[neurons]

    def _n_hot(self, site: FFNSite) -> int:
        if site.experts is not None:  # it would depend on how often the expert is chosen
            return 0
        hot = int((self._frequencies(site.intermediate) >= float(self.label["hot_frequency"])).sum())
        return site.intermediate if self._swiglu else hot

    def write(self, folder: Path) -> None:
        sites = search(self._model, on_meta=True).sites
        if self.label["predictor"] is not None and any(of_all(site.activation) for site in sites):
            expected = f"None: {sites[0].form} needs all that fire"
            raise ConfigError("synthetic(predictor=...)", expected=expected, found="lowrank", fix="Correct it.")
        in_sites = {name for site in sites for name in site.parameter_names}
        linears = {name: module for name, module in self._model.named_modules() if isinstance(module, nn.Linear)}
        linears = {name: linear for name, linear in linears.items() if f"{name}.weight" not in in_sites}
        elsewhere = in_sites | {f"{name}.weight" for name in linears}
        kept, values = self._model.state_dict(), [*self._model.named_parameters(), *self._model.named_buffers()]
        floats = {name: tuple(t.shape) for name, t in values if name not in elsewhere and name in kept}
        text = json.dumps([self.label, self.config.to_dict()], sort_keys=True, default=str)
        model_hash = hashlib.sha256(f"torch_pi2.synthetic {text}".encode()).hexdigest()
        specs = {name: Spec(shape, self.dtype) for name, shape in floats.items()}
        in_floats = self.kind in FLOATS
        for name, linear in linears.items():
            quantised = Spec((linear.out_features, row_bytes(self.kind, linear.in_features)), torch.uint8)
            specs[f"{name}.weight"] = Spec(tuple(linear.weight.shape), self.dtype) if in_floats else quantised
        for site in sites:
            specs |= neuron_specs(site, self.kind)
        widths = {} if in_floats else {name: linear.in_features for name, linear in linears.items()}
        about = metadata(self.kind, model_hash, widths, {site.key: "owner" for site in sites})
        about |= {"synthetic": json.dumps(self.label)}
        predictors = FittedPredictors()
        with TensorWriter(folder / WEIGHTS_FILE, specs, about, progress=self.progress) as out:
            for name, shape in floats.items():
                for row, tensor in self._float(name, shape):
                    out.write(name, tensor.to(self.dtype), row=row)
            for name, linear in linears.items():
                rows, columns = linear.weight.shape
                deviation = (_BLOCK if name.endswith(("o_proj", "out_proj")) else 1) / math.sqrt(columns)
                for start in range(0, rows, _CHUNK):
                    count = min(_CHUNK, rows - start)
                    made = drawn.random_rows(count, columns, self.kind, deviation, self._generator)
                    out.write_bytes(f"{name}.weight", made.flatten(), start * made.shape[1])
            alike: dict[Any, list[FFNSite]] = defaultdict(list)
            for site in sites:
                group = alike[site.intermediate, site.up.expert]
                group.append(site)
                twin = group[(len(group) - 1) % int(self.label.get("distinct_layers", len(sites)))].key
                if twin == site.key:
                    self._write_site(site, out, predictors)
                    continue
                out.copy(f"{site.key}.bundles", f"{twin}.bundles")
                if twin in predictors:
                    predictors[site.key] = copy.deepcopy(predictors[twin])  # safetensors takes no shared memory
        layers = [self._layer_plan(site, predictors) for site in sites]
        Plan(layers, model_hash, {"planner": "synthetic", "synthetic": self.label}).save(folder)
        if predictors:
            save_predictors(folder, predictors, model_hash)

    def _float(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, torch.Tensor]]:
        if name.endswith(("embed_tokens.weight", "embeddings.weight")):
            for start in range(0, shape[0], _CHUNK):
                rows = (min(_CHUNK, shape[0] - start), shape[1])
                yield start, drawn.embedding_noise(*rows, float(self.label["locality"]), self._generator) + self._d
        elif name.endswith("bias"):
            yield 0, torch.randn(shape, generator=self._generator) * 0.1 * ("attn" in name)
        elif name.endswith(".gate.weight"):
            # orthogonal to d, which all tokens have, and of one length: experts are chosen about equally often
            router = torch.randn(shape, generator=self._generator)
            router -= (router @ self._d)[:, None] * (self._d / self.hidden)
            yield 0, router / router.norm(dim=1, keepdim=True)
        else:  # none of RWKV-7's mixes with the token before: layers see what embeddings say
            yield 0, torch.full(shape, float("x_" not in name and not name.endswith("r_k")))

    def _write_site(self, site: FFNSite, out: TensorWriter, predictors: FittedPredictors) -> None:
        p_I = self._frequencies(site.intermediate)
        gate = drawn.GateMaker(self._d, p_I, self.kind, self._generator, rank=int(self.label["rank"]))
        # second moment of h: about 1/4 for relu(gate) up where it is not zero, about 1/8 for silu(gate) up
        moment = 1 / 8 if self._swiglu else float(self.label["active"]) / 4
        if not site.gated:  # relu2(up), up normal with deviation 1 / sqrt(2)
            up_SI = torch.special.ndtri(torch.rand(64, 1, generator=self._generator)) + gate.beta
            moment = float((up_SI / math.sqrt(2)).relu().pow(4).mean())
        eps = norm(site.activation)
        moment = 1.0 if eps else moment
        down, rows = _BLOCK / math.sqrt(moment * site.intermediate), site.rows_per_neuron
        for start in range(0, site.intermediate, _CHUNK):
            count = min(_CHUNK, site.intermediate - start)
            neuron_rows = torch.empty((count, rows, row_bytes(self.kind, self.hidden)), dtype=torch.uint8)
            neuron_rows[:, 0] = gate.rows(start, start + count)
            for row, deviation in ((-2, 1 / math.sqrt(self.hidden)), (-1, down))[3 - rows :]:
                neuron_rows[:, row] = drawn.random_rows(count, self.hidden, self.kind, deviation, self._generator)
            out.write(f"{site.key}.bundles", neuron_rows, row=start)
        for name in neuron_specs(site, self.kind):
            if ".bias_" in name:
                value = float(eps > 0 and name.endswith("up"))  # of the norm
                out.write(name, torch.full(out.specs[name].shape, value, dtype=out.specs[name].dtype))
        if gate.rank and self._n_hot(site) < site.intermediate:
            predictors[site.key] = gate.predictor(self._n_hot(site), rows)

    def _layer_plan(self, site: FFNSite, predictors: FittedPredictors) -> LayerPlan:
        order = torch.arange(site.intermediate, dtype=torch.int32)  # made in order of frequency
        predictor, n_hot = predictors.get(site.key), self._n_hot(site)
        method = Method.EXACT if predictor is None else Method.LOWRANK
        if n_hot == site.intermediate:
            method = Method.DENSE
        share = float(self._frequencies(site.intermediate)[n_hot:].mean()) if n_hot < site.intermediate else 1.0
        if predictor is not None and predictor.card is not None:
            share = predictor.card.predicted_active
        return LayerPlan(site, method, n_hot, order, 0.0, share)
