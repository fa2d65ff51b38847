"""Firing frequencies of a synthetic layer's neurons, and gate rows that produce them.

**The law.** The neuron of rank u in (0, 1] fires for a share ``p(u) = min(0.95, c u^-s)`` of tokens: a few hot neurons
and a long tail. ``c`` sets the mean; ``s`` makes 43 % of the neurons give 80 % of the activations, as measured in one
ReGLU block of LLaMA2-70B (PowerInfer, arXiv 2312.12456).

**The mechanism.** A token's normalised input is ``x = (d + n) / sqrt(2)``: d a fixed vector of +-1, n standard normal
and different for every token. A gate row is ``w = beta d / H + g`` with ``|g| = 1`` orthogonal to d, so that ``sqrt(2)
w x`` is normal with mean beta and deviation 1, and ``beta = Phi^-1(p)`` makes it positive for a share p of tokens.

**Locality.** Ids are grouped into topics of ``TOPIC_IDS``, whose embeddings share part of their noise: ``n = sqrt(c)
n_topic + sqrt(1 - c) n_id``. With c = ``LOCALITY`` and ``TOPIC_TOKENS`` tokens per topic on average, in a layer with 10
% active neurons, each token needs 2.4 % that none of the five previous tokens needed, which together needed 25 %; "LLM
in a flash" (arXiv 2312.11514) measured 2.4 % and 24 % for OPT-6.7B. A FIFO cache of half the neurons then holds 94 % of
the needed ones (PowerInfer-2, arXiv 2406.06282, reports 95 %).

**The predictor.** ``g = sqrt(1 - rho^2) U V + rho e``: V ``[r, H]`` is shared by the layer's neurons, and e is
invisible to a predictor of rank r. A constant of 3 deviations lifts values above zero before the predictor's relu, and
the bias subtracts it again.
"""

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_pi2.base.dtypes import DTYPES
from torch_pi2.base.package import needed
from torch_pi2.errors import ConfigError
from torch_pi2.formats import FLOATS, row_bytes
from torch_pi2.predict.lowrank import LowRankRows
from torch_pi2.types.method import PredictorCard

#: This share of a block's neurons makes ``_ACTIVATIONS`` of its activations.
_NEURONS, _ACTIVATIONS = 0.43, 0.80
#: Largest frequency of a neuron.
_MOST = 0.95
#: Shared part c of the noise in a topic, ids per topic, and mean length of a topic in tokens.
LOCALITY, TOPIC_IDS, TOPIC_TOKENS = 0.4, 128, 64
#: rho: part of a gate row that the predictor cannot represent, besides rounding.
RESIDUAL = 0.1
#: Deviations by which the predictor's hidden values are lifted above zero.
_LIFT = 3.0
#: Format of the predictor.
_WEIGHTS = "int4"
#: Recall of the predictor at its threshold.
_RECALL = 0.96
#: Tokens to set the threshold; as many others measure the predictor.
_TOKENS = 192


def power_law(neurons: int, active: float) -> torch.Tensor:
    """``[neurons]`` float64 frequencies, descending, with mean ``active`` (0 < active < 0.95)."""
    u = (torch.arange(neurons, dtype=torch.float64) + 0.5) / neurons

    def law(s: float) -> torch.Tensor:
        low, high = 0.0, 1.0
        for _ in range(50):
            c = (low + high) / 2
            low, high = (c, high) if float((c * u**-s).clamp_max(_MOST).mean()) < active else (low, c)
        return (low * u**-s).clamp_max(_MOST)

    # if many fire, no law reaches 80 %; use nearly the most that is possible
    most = min(1.0, _NEURONS * _MOST / active)
    wanted = min(_ACTIVATIONS, 0.9 * most + 0.1 * _NEURONS)
    low, high = 0.0, 8.0
    for _ in range(30):
        s = (low + high) / 2
        p = law(s)
        low, high = (s, high) if float(p[: int(_NEURONS * neurons)].sum() / p.sum()) < wanted else (low, s)
    return law(low)


def direction(hidden: int, generator: torch.Generator) -> torch.Tensor:
    """``d [H]``: +1 or -1."""
    return torch.randint(0, 2, (hidden,), generator=generator).float() * 2 - 1


def embedding_noise(ids: int, hidden: int, locality: float, generator: torch.Generator) -> torch.Tensor:
    """Noise ``[ids, hidden]`` of unit variance; the first id begins a topic."""
    own = torch.randn((ids, hidden), generator=generator)
    if locality == 0:
        return own
    topic = torch.randn((-(-ids // TOPIC_IDS), hidden), generator=generator).repeat_interleave(TOPIC_IDS, 0)[:ids]
    return math.sqrt(locality) * topic + math.sqrt(1 - locality) * own


class TokenStream:
    """Random ids, topic by topic or independent: text of random weights repeats itself, which flatters any cache."""

    def __init__(self, vocabulary: int, *, topics: bool, generator: torch.Generator) -> None:
        self.vocabulary, self.topics, self._generator = vocabulary, topics, generator
        self._topic = -1

    def draw(self, tokens: int) -> torch.Tensor:
        """The next int64 ``[tokens]``."""
        if not self.topics:
            return torch.randint(self.vocabulary, (tokens,), generator=self._generator)
        return torch.tensor([self._next() for _ in range(tokens)])

    def _next(self) -> int:
        def below(n: int) -> int:
            return int(torch.randint(n, (), generator=self._generator))

        if self._topic < 0 or below(TOPIC_TOKENS) == 0:
            self._topic = below(-(-self.vocabulary // TOPIC_IDS))
        first = self._topic * TOPIC_IDS
        return first + below(min(TOPIC_IDS, self.vocabulary - first))


class GateMaker:
    """Gate rows of one layer, in format ``weights``, and, if ``rank``, their int4 predictor. ``d``: the direction
    ``[H]``. ``p``: firing frequencies ``[I]``.
    """

    def __init__(
        self, d: torch.Tensor, p: torch.Tensor, weights: str, generator: torch.Generator, *, rank: int = 512
    ) -> None:
        self.d, self.weights, self._generator = d, weights, generator
        self.beta = torch.special.ndtri(p).float()
        hidden = len(d)
        self.rank = min(rank, hidden - 1)
        self._scores, self._fires, self._b, self._bias = (list[torch.Tensor]() for _ in range(4))
        if self.rank:
            # 2 T inputs like those of the layers
            n = torch.randn((2 * _TOKENS, hidden), generator=generator)
            self._x = (d + n - (n @ d)[:, None] * (d / hidden)) / math.sqrt(2)
            v = torch.randn((self.rank, hidden), generator=generator) / math.sqrt(hidden)
            v -= (v @ d)[:, None] * (d / hidden)
            rows = torch.ops.pi2.quantize(v + _LIFT * d / hidden, _WEIGHTS)
            self._v, self._a = v, rows
            self._z = torch.relu(self._x @ self._float(rows, hidden, _WEIGHTS).T)
            self._mean_z = self._float(rows, hidden, _WEIGHTS) @ d / math.sqrt(2)

    @staticmethod
    def _float(rows: torch.Tensor, columns: int, weights: str) -> torch.Tensor:
        if weights in FLOATS:
            return rows.view(DTYPES[weights]).float()
        return torch.ops.pi2.dequantize(rows, weights, columns, torch.float32)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Gate rows of neurons ``[start, stop)`` as stored, uint8; call it in order."""
        hidden, count = len(self.d), stop - start
        offset = self.beta[start:stop, None] * (self.d / hidden)
        if not self.rank:
            g = torch.randn((count, hidden), generator=self._generator)
        else:
            u = torch.randn((count, self.rank), generator=self._generator)
            u /= u.norm(dim=1, keepdim=True)
            g = torch.randn((count, hidden), generator=self._generator).mul_(RESIDUAL / math.sqrt(hidden))
            g.addmm_(u, self._v, alpha=math.sqrt(1 - RESIDUAL**2))
        g -= (g @ self.d)[:, None] * (self.d / hidden)
        g /= g.norm(dim=1, keepdim=True)
        g += offset
        if self.weights in FLOATS:
            rows = g.to(DTYPES[self.weights]).view(torch.uint8)
        else:
            rows = torch.ops.pi2.quantize(g, self.weights)
        if self.rank:
            gate = self._float(rows, hidden, self.weights)
            self._fires.append(self._x @ gate.T > 0)
            self._b.append(torch.ops.pi2.quantize(u, _WEIGHTS))
            b = self._float(self._b[-1], self.rank, _WEIGHTS)
            # both terms from rounded rows, so that rounding shifts no neuron's threshold
            self._bias.append(gate @ self.d / math.sqrt(2) - b @ self._mean_z)
            self._scores.append(torch.addmm(self._bias[-1], self._z, b.T))
        return rows

    def predictor(self, first_cold: int, rows: int = 3) -> LowRankRows:
        """The predictor, after all rows were made, measured on neurons from ``first_cold`` on, of ``rows`` rows."""
        scores = torch.cat(self._scores, 1)[:, first_cold:]
        fires = torch.cat(self._fires, 1)[:, first_cold:]
        firing = scores[:_TOKENS][fires[:_TOKENS]].sort().values
        threshold = float(firing[int((1 - _RECALL) * len(firing))]) if len(firing) else 0.0
        predicted, fires = scores[_TOKENS:] >= threshold, fires[_TOKENS:]
        hits = int((predicted & fires).sum())
        hidden, neurons = len(self.d), len(self.beta)
        made = LowRankRows(self._a, torch.cat(self._b), torch.cat(self._bias), _WEIGHTS, hidden, threshold)
        made.card = PredictorCard(
            recall=hits / max(1, int(fires.sum())),
            precision=hits / max(1, int(predicted.sum())),
            predicted_active=float(predicted.float().mean()) if predicted.numel() else 0.0,
            bytes=sum(t.nbytes for t in made.tensors().values()),
            cost_share=made.macs / (rows * hidden * neurons),
            rank=self.rank,
        )
        return made


def random_rows(count: int, columns: int, weights: str, deviation: float, generator: torch.Generator) -> torch.Tensor:
    """``count`` rows as stored, uint8, of independent numbers with mean near 0 and standard ``deviation``.

    Floats are normal. Quantised numbers are uniform, which is cheap: random bytes and one scale with a random sign per
    group. The signs cancel the mean of -8..7 (int4) or -128..127 (int8), half a step below zero, which would dominate a
    model after a few layers. Rows that do not end with a whole group are quantised from normal numbers.
    """
    if weights in FLOATS or columns % 32:
        values_NK = torch.randn((count, columns), generator=generator) * deviation
        if weights not in FLOATS:
            return torch.ops.pi2.quantize(values_NK, weights)
        return values_NK.to(DTYPES[weights]).view(torch.uint8)
    groups = columns // 32
    total = row_bytes(weights, columns)
    values = total - 2 * groups
    words = torch.randint(-(2**63), 2**63 - 1, (count, -(-values // 8)), generator=generator, dtype=torch.int64)
    rows = torch.empty((count, total), dtype=torch.uint8)
    rows[:, :values] = words.view(torch.uint8)[:, :values]
    spread = math.sqrt((16**2 - 1) / 12) if weights == "int4" else math.sqrt((256**2 - 1) / 12)
    sign_NG = torch.randint(0, 2, (count, groups), generator=generator, dtype=torch.int8) * 2 - 1
    rows[:, values:].view(torch.float16).copy_(sign_NG * (deviation / spread))
    return rows


#: Sizes by name. ``llama-1b`` has the sizes of TinyLlama-like benchmarks (2048, 8192, 16 layers), not of a published
#: model; ``llama-13b`` has those of Llama-2-13B, ``llama-70b`` those of Llama-3-70B; ``smallthinker-4b`` and
#: ``gpt-oss-20b`` those of SmallThinker-4B-A0.6B and gpt-oss-20b, in the form of Qwen3-MoE.
SHAPES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("shapes.json").read_text())
#: Configuration and causal model classes of transformers, by ``model_type``.
CLASSES = {name: name.capitalize() for name in ("llama", "mistral", "qwen2", "mixtral", "olmoe", "arcee", "jais2")}
CLASSES |= {"qwen3_moe": "Qwen3Moe", "nemotron_h": "NemotronH", "bitnet": "BitNet", "rwkv7": "RWKV7"}
_COMMON = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16"}
_COMMON |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def build_config(shape: str | Mapping[str, Any], zeros: bool = False, **more: Any) -> Any:
    """A transformers configuration of ``shape`` (a name in ``SHAPES`` or configuration values), updated with ``more``.
    ``zeros``: of ReLU (relu2 where the class has that), not SiLU. Raises ConfigError: unknown name or model type, or
    mismatched sizes. LibraryMissingError: no transformers.
    """
    with needed("transformers", "hf"):
        import transformers
    if isinstance(shape, str) and shape not in SHAPES:
        expected, fix = f"{', '.join(SHAPES)}, or a dict of configuration values", "Choose one of these."
        raise ConfigError("shape", expected=expected, found=repr(shape), fix=fix)
    values = {"model_type": "llama"} | dict(SHAPES[shape] if isinstance(shape, str) else shape)
    kind = values.pop("model_type")
    if kind not in CLASSES:
        fix = "Synthetic models are of these."
        raise ConfigError("shape's model_type", expected=", ".join(CLASSES), found=repr(kind), fix=fix)
    if kind == "rwkv7":
        importlib.import_module("torch_pi2.layers.rwkv7")
    squared = {"rwkv7": "sqrelu", **dict.fromkeys(("arcee", "jais2", "nemotron_h", "bitnet"), "relu2")}
    act = {"mlp_hidden_act" if kind == "nemotron_h" else "hidden_act": squared.get(kind, "relu")}
    values |= act if zeros else dict.fromkeys(act, "silu")
    config_class = transformers.CONFIG_MAPPING[kind]
    try:
        return config_class(**(_COMMON | values | more), architectures=[f"{CLASSES[kind]}ForCausalLM"])
    except (TypeError, ValueError, ZeroDivisionError) as error:
        expected, fix = f"values of a {CLASSES[kind]}Config", "Correct the sizes."
        raise ConfigError("shape", expected=expected, found=str(error).splitlines()[0], fix=fix) from error
