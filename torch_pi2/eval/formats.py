"""What quantisation costs on a text: the same model in several formats, dense and sparse, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from torch import nn

from torch_pi2.api import fit, optimize, profile
from torch_pi2.base.arguments import checked
from torch_pi2.eval.loss import bits_per_byte
from torch_pi2.eval.work import work
from torch_pi2.types.config import Config, ConfigFields, configured
from torch_pi2.types.method import PREDICTED, Method


@dataclass(frozen=True)
class FormatLoss:
    """One form of the model.

    Attributes:
        weights, activations, method: see :class:`torch_pi2.types.config.Config`.
        bits_per_byte: loss on the text. change: relative to the float dense model. change_by_sparsity: relative to the
            dense model of the same format (0 where it is dense).
        rows_used: share of FFN matrix rows used; None for the float dense model, which counts nothing.
    """

    weights: str
    activations: str
    method: str
    bits_per_byte: float
    change: float
    change_by_sparsity: float
    rows_used: float | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@checked
def compare_formats(
    make: Callable[[], nn.Module],
    tokenizer: Any,
    text: str,
    calibration: Any,
    config: Config | None = None,
    *,
    formats: Sequence[tuple[str, str]] = (("int8", "float"), ("int4", "float"), ("int4", "int8")),
    window: int = 256,
    max_tokens: int | None = None,
    progress: bool = False,
    **fields: Unpack[ConfigFields],
) -> list[FormatLoss]:
    """Loss on ``text`` of the float dense model, and of every format dense and with ``config.method``.

    Profile and predictors are made once, from the float weights, and shared: the differences are the formats'.

    Args:
        make: returns a fresh dense model with the same weights each time; quantising cannot be undone.
        text: nothing may have been fitted to it; calibration, config, fields: as in :func:`torch_pi2.optimize`.
        formats: pairs of weights and activations.

    Raises:
        Pi2Error: see :func:`torch_pi2.optimize` and :func:`torch_pi2.eval.loss.bits_per_byte`.
    """
    wanted = configured(config, fields)

    def loss(model: nn.Module) -> float:
        return bits_per_byte(
            model, tokenizer, text, window=window, max_tokens=max_tokens, progress=progress
        ).bits_per_byte

    model = make()
    base = loss(model)
    rows = [FormatLoss("float", "float", "dense", base, 0.0, 0.0, None)]
    settings: dict[str, Any] = {"tokenizer": tokenizer, "progress": progress}
    stats = profile(model, calibration, config=wanted, **settings)
    predictors = None
    if wanted.method in ("auto", *PREDICTED):
        predictors = fit(model, calibration, stats=stats, config=wanted, **settings)
    del model
    methods = list(dict.fromkeys(("dense", wanted.method)))
    for weights, activations in (("float", "float"), *formats):
        dense = base
        for method in methods:
            if weights == "float" and method == Method.DENSE:
                continue
            chosen = replace(wanted, method=method, weights=weights, activations=activations)
            given = predictors if method == wanted.method else None
            made = optimize(make(), calibration, chosen, stats=stats, predictors=given, **settings)
            with work() as done:
                found = loss(made)
            dense = found if method == Method.DENSE else dense
            rows.append(
                FormatLoss(weights, activations, method, found, found / base - 1, found / dense - 1, done.rows_used)
            )
            del made
    return rows
