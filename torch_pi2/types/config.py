"""``Config``: every setting of ``optimize``, each labelled lossless or lossy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from torch_pi2.base.fields import argument, check_fields, limited
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS, FLOAT, QUANTIZED
from torch_pi2.types.method import Method

#: ``auto`` picks per layer the cheapest of what the others offer.
METHODS = ("auto", *(method.value for method in Method))

#: What ``threshold`` compares with thresholds: |act(gate)|, alone or times what is known of the neuron's up and down,
#: or |up|, times what is known of its gate and down.
SCORES = ("gate", "norms", "output", "up", "auto")

#: How weights may be stored, and how they are rounded.
WEIGHTS = (FLOAT, *QUANTIZED)
QUANTIZATIONS = ("rtn", "weighted", "gptq")
#: Of linear layers outside FFNs, in a program that was exported.
LINEARS = ("float32", "int8", "int4")
#: Of keys and values there.
KV_FORMATS = ("float32", "float16", "int8")
#: In which methods an accelerator computes attention: none, those that read prompts there, or all that have hot parts.
HOT_ATTENTION = ("none", "prompts", "all")


@dataclass(frozen=True)
class Config:
    """How a model is made sparse. Functions that take a ``config`` take its fields as keywords, too.

    Attributes:
        method: how cold neurons are chosen. ``exact`` (lossless on ReLU-family activations: what is skipped is
            multiplied by zero), ``threshold`` (lossy: CATS, for SwiGLU and GeGLU models, no training),
            ``lowrank`` (lossy: a fitted predictor), ``signbit`` (lossy: a predictor made of the gate's signs, only
            calibrated), ``dense`` (every neuron), or ``auto``: per layer whichever
            of ``exact``/``threshold`` and ``lowrank`` reads fewer bytes (experts of a mixture: ``exact``/``threshold``,
            as no predictors are fitted to them then).
        hot_frequency: neurons that fire for at least this share of tokens are hot: computed densely, never
            predicted (lossless in itself). No neuron of an expert is.
        target_recall: where the search for each layer's recall starts; with ``signbit`` each layer's recall (lossy).
        tolerance: relative increase of the model's loss that predictors may cause, 0.01 = 1 % (lossy).
        sparsity: share of neurons that ``threshold`` skips in every layer that has no exact zeros (lossy).
        score: what decides which (lossy). ``gate``: ``|act(gate)|`` (CATS); ``norms``: times the norms of the neuron's
            down and up rows; ``output``: times the norm of its down row and the usual size of its up on calibration
            text; ``up``: ``|up|`` times the norm of its down row and the usual size of its ``act(gate)``, so that up is
            what is computed of all neurons, and gate and down of those above; ``auto``: in each layer whichever of
            these two does less to the output at its share (``output`` with ``lowrank`` and ``signbit``). But for
            ``gate`` each neuron has its own threshold then, for which GPUs have no kernels; experts of a mixture know
            ``gate`` alone, which ``auto`` is for them.
        max_loss: relative increase of the model's loss that thresholds may cause, 0.01 = 1 % (lossy): in the place of
            ``sparsity``, the share is the largest that calibration text which was kept back bears. None: ``sparsity``.
        weights: how weights of FFNs and other linear layers are stored. ``float``: as they are (lossless); ``int4``,
            ``int8``: integers in groups of 32 with a float16 scale, 4.5 and 8.5 bits per weight (lossy). Embeddings,
            norms and small layers stay float. Cannot be restored.
        activations: with quantised weights, ``int8`` rounds the inputs of linear layers, gate and up to 8 bits in
            groups of 32 (lossy, faster), ``float`` does not.
        quantization: how weights are rounded. ``rtn``: to nearest, with the scale of smallest squared error;
            ``weighted``: errors count as much as the input's mean square on calibration text (int4 only); ``gptq``:
            what a layer's outputs lose on calibration text is made small, one layer after the other (takes minutes;
            experts that hardly any of it reaches are rounded to nearest, which is said).
        calibration_tokens: no further batch is taken once this many tokens are there.
        batch_size, seq_len: shape of calibration batches; batch_size also bounds the batch statistics.
        seed: of every random choice.
    """

    method: str = limited(choices=METHODS, default="auto")
    hot_frequency: float = limited(0, 1.01, above=True, default=0.4)
    target_recall: float = limited(0, 1, above=True, below=True, default=0.9)
    tolerance: float = limited(above=True, default=0.01)
    sparsity: float = limited(0, 1, below=True, default=0.5)
    score: str = limited(choices=SCORES, default="gate")
    max_loss: float | None = limited(above=True, default=None)
    weights: str = limited(choices=WEIGHTS, default=FLOAT)
    activations: str = limited(choices=ACTIVATIONS, default=FLOAT)
    quantization: str = limited(choices=QUANTIZATIONS, default="rtn")
    calibration_tokens: int = limited(64, default=40_000)
    batch_size: int = limited(1, default=8)
    seq_len: int = limited(2, default=128)
    seed: int = limited(0, 1 << 62, default=0)

    def __post_init__(self) -> None:
        check_fields(self)
        if self.weights == FLOAT:
            for name, value in (("activations", FLOAT), ("quantization", "rtn")):
                if getattr(self, name) != value:
                    argument(getattr(self, name), f"Config.{name}").wrong(f"{value} with weights='float'")
        if self.quantization == "weighted" and self.weights == "int8":
            argument(self.quantization, "Config.quantization").wrong("rtn or gptq with int8")


class ConfigFields(TypedDict, total=False):
    """The fields of :class:`Config`, as keywords of the functions that take one."""

    method: str
    hot_frequency: float
    target_recall: float
    tolerance: float
    sparsity: float
    score: str
    max_loss: float | None
    weights: str
    activations: str
    quantization: str
    calibration_tokens: int
    batch_size: int
    seq_len: int
    seed: int


def configured(config: Config | None, fields: ConfigFields) -> Config:
    """``config``, or one of ``fields``. Raises ConfigError: both were given, or a field makes no sense."""
    if config is not None and fields:
        raise ConfigError(
            f"config and {', '.join(fields)}",
            expected="a Config, or its fields as keywords",
            found="both",
            fix=f"Pass dataclasses.replace(config, {', '.join(f'{name}=...' for name in fields)}) as config.",
        )
    return config or Config(**fields)
