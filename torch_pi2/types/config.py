"""``Config``: every setting of ``optimize``, each labelled lossless or lossy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from inspect import signature
from typing import Any

from torch_pi2.base.fields import argument, check_fields, limited, to_json
from torch_pi2.errors import ConfigError
from torch_pi2.formats import ACTIVATIONS, FLOAT, QUANTIZED
from torch_pi2.types.method import Fitted, Method, find_method

#: ``auto`` picks the cheapest per layer.
METHODS = ("auto", *(method.value for method in Method if method is not Method.CUSTOM))
ALL = (*METHODS, Method.CUSTOM.value)

#: The score for ``threshold``: |act(gate)|, alone or weighted by statistics of the neuron's up and down, or
#: |up|, weighted by those of its gate and down.
SCORES = ("gate", "output", "up", "auto")

#: Formats of weights, and how weights are rounded.
WEIGHTS = (FLOAT, *QUANTIZED)
QUANTIZATIONS = ("rtn", "gptq")
#: Formats of linear layers outside FFNs in an exported program.
LINEARS = ("float32", "int8", "int4")
#: Formats of its KV cache.
KV_FORMATS = ("float32", "float16", "int8")
#: Exported methods with attention on an accelerator: none, or those for prompts.
HOT_ATTENTION = ("none", "prompts")


@dataclass(frozen=True)
class Config:
    """How a model is made sparse. Functions that take a ``config`` also take its fields as keywords.

    Attributes:
        method: how cold neurons are selected. ``exact`` (lossless on ReLU-family activations: skipped neurons are
            multiplied by zero), ``threshold`` (lossy: CATS, for SwiGLU and GeGLU models, no training), ``lowrank``
            (lossy: a fitted low-rank predictor), ``signbit`` (lossy: a predictor from the gate's signs, only
            calibrated), ``dense`` (every neuron), or ``auto``: per layer whichever of ``exact``/``threshold`` and
            ``lowrank`` reads fewer bytes (for experts ``exact``/``threshold``, without predictors). Or a
            ``torch_pi2.SparseMethod`` (lossy), the name of a registered one or ``FILE.py:CLASS``, which is made without
            arguments, or a mapping of patterns of layers to these, of which the first that matches counts
            (``{"*.layers.0.*": Mine(0.8), "*": Mine(0.4)}``; layers that none matches stay dense).
        hot_frequency: neurons that fire for at least this share of tokens are hot: computed densely, never predicted
            (lossless in itself). Experts have no hot neurons.
        target_recall: start of the search for each layer's recall; with ``signbit`` each layer's recall (lossy).
        tolerance: relative increase of the model's loss that predictors may cause, 0.01 = 1 % (lossy).
        sparsity: share of neurons that ``threshold`` skips in every layer that has no exact zeros (lossy).
        score: which neurons ``threshold`` skips (lossy). ``gate``: by ``|act(gate)|`` (CATS). ``output``: times the
            norm of its down row and the typical size of its up on calibration text. ``up``: ``|up|`` times the norm of
            its down row and the typical size of its ``act(gate)``; up is computed for all neurons, gate and down only
            above the threshold. ``auto``: per layer whichever of these two changes the output less at its share
            (``output`` with ``lowrank`` and ``signbit``). With all but ``gate`` each neuron has its own threshold, for
            which there are no GPU kernels; experts support ``gate`` only, which ``auto`` selects for them.
        max_loss: relative increase of the model's loss that thresholds may cause, 0.01 = 1 % (lossy). It replaces
            ``sparsity``: the largest share within that loss on held-out calibration text is used. None: ``sparsity``.
        weights: format of the weights of FFNs and other linear layers. ``float``: unchanged (lossless); ``int4``,
            ``int8``: integers in groups of 32 with a float16 scale, 4.5 and 8.5 bits per weight (lossy). Embeddings,
            norms and small layers stay float. Cannot be restored.
        activations: with quantised weights, ``int8`` rounds the inputs of linear layers, gate and up to 8 bits in
            groups of 32 (lossy, faster), ``float`` does not.
        quantization: how weights are rounded. ``rtn``: to nearest, with the scale of smallest squared error;
            ``gptq``: GPTQ, which minimises the error of each layer's outputs on calibration text (takes minutes;
            experts that get almost no tokens are rounded to nearest, with a warning).
        calibration_tokens: calibration stops after the batch that reaches this many tokens.
        batch_size, seq_len: shape of calibration batches; batch_size also bounds the batch statistics.
        seed: of every random choice.
    """

    method: Any = "auto"
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
    #: Pattern of layers -> the method in Python that was given as ``method``, which is "custom" then.
    _custom: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        method = self.method
        if method not in ALL:
            given = method if isinstance(method, Mapping) else {"*": method}
            object.__setattr__(self, "_custom", {pattern: _custom_of(value) for pattern, value in given.items()})
            object.__setattr__(self, "method", Method.CUSTOM.value)
        elif method == Method.CUSTOM and not self._custom:
            find_method(method)
        check_fields(self)
        if self.weights == FLOAT:
            for name, value in (("activations", FLOAT), ("quantization", "rtn")):
                if getattr(self, name) != value:
                    argument(getattr(self, name), f"Config.{name}").wrong(f"{value} with weights='float'")


def _custom_of(value: Any) -> Any:
    """The method itself, or one of the class of this name. Raises ConfigError: there is none."""
    made = value
    if isinstance(value, str):
        kind = find_method(value)
        parts = signature(kind).parameters.values()
        needed = [p.name for p in parts if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if needed:
            fix = "Give them defaults, or pass an object of the class in Python."
            what, expected = f"method {value}", "a class that is made without arguments"
            raise ConfigError(what, expected=expected, found=f"one that needs {', '.join(needed)}", fix=fix)
        made = kind()
    if not isinstance(made, Fitted):
        argument(value, "Config.method").wrong("the name of a method, or a torch_pi2.SparseMethod")
    return made


def method_for(config: Config, key: str) -> Any:
    """The method of layer ``key``, of the first pattern that matches it, or None."""
    return next((method for pattern, method in config._custom.items() if fnmatchcase(key, pattern)), None)


def check_registered(config: Config) -> None:
    """Raises ConfigError: files cannot name a method of ``config``."""
    for method in config._custom.values():
        method.check_registered()


def check_patterns(config: Config, keys: Sequence[str]) -> None:
    """Raises ConfigError: a pattern of ``config.method`` matches none of the layers ``keys``."""
    for pattern in config._custom if keys else ():
        if not any(fnmatchcase(key, pattern) for key in keys):
            argument(pattern, "Config.method", "See torch_pi2.find_sites.").wrong(f"a layer's name, such as {keys[0]}")


def described(config: Config) -> dict[str, Any]:
    """For files: the fields, and the name and settings of methods in Python, by pattern."""
    own = {p: {"name": m.name or type(m).__name__, "settings": m.settings()} for p, m in config._custom.items()}
    return to_json(config) | ({"custom": own} if own else {})


def configured(config: Config | None, fields: dict[str, Any]) -> Config:
    """``config``, or one made from ``fields``. Raises ConfigError: both were given, or a field is invalid."""
    if config is not None and fields:
        fix = f"Pass dataclasses.replace(config, {', '.join(f'{name}=...' for name in fields)}) as config."
        expected = "a Config, or its fields as keywords"
        raise ConfigError(f"config and {', '.join(fields)}", expected=expected, found="both", fix=fix)
    return config or Config(**fields)
