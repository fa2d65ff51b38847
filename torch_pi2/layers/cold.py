"""The part of a predictor that a layer keeps: rows of its cold neurons, in plan order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from torch_pi2.base.memory import new_tensor
from torch_pi2.errors import ConfigError, DtypeError, ShapeError
from torch_pi2.formats import QUANTIZED, row_bytes
from torch_pi2.layers.checks import check_shape
from torch_pi2.layers.linear import wants_blocks
from torch_pi2.ops.linear import ROWS, to_blocks
from torch_pi2.predict import PER_NEURON
from torch_pi2.predict.lowrank import LowRank
from torch_pi2.predict.signbit import SignBit, sign_bytes
from torch_pi2.types.method import PREDICTED, Method
from torch_pi2.types.site import FFNSite

#: Tensors of a low-rank predictor, in the order in which ``torch.ops.pi2.predict_lowrank`` takes them.
PREDICTOR_TENSORS = LowRank.tensor_names


class Cold(NamedTuple):
    """``tensors`` by name, without those that this form has not; ``weights``: kind of a low-rank one in quantised rows,
    else ""; ``margin`` of sign bits, None: another form.

    ``in_blocks``: quantised rows are in blocks of 16. To fill the first of them b may have rows before those of cold
    neurons, which mean nothing; there is a bias then.
    """

    tensors: dict[str, torch.Tensor]
    weights: str = ""
    margin: float | None = None
    in_blocks: bool = False


def cold_part(
    site: FFNSite,
    method: str,
    cold: torch.Tensor,
    predictor: Mapping[str, torch.Tensor] | None,
    int8_activations: bool = False,
) -> Cold:
    """What a layer whose ``cold`` neurons (int64) are chosen by ``method`` needs of a predictor in original order.

    ``int8_activations``: it is computed with these.

    Raises:
        ConfigError: there is none. ShapeError, DtypeError: it is of another layer, or was not made by us.
    """
    if not len(cold) or method not in PREDICTED:
        return Cold({})
    if method == Method.SIGNBIT:
        return _signs(site, cold, predictor)
    if predictor is not None and "a" in predictor and predictor["a"].dtype == torch.uint8:
        return _quantised(site, cold, predictor, int8_activations)
    return _lowrank(site, cold, predictor)


def _lowrank(site: FFNSite, cold: torch.Tensor, lowrank: Mapping[str, torch.Tensor] | None) -> Cold:
    missing = [name for name in PREDICTOR_TENSORS[:4] if lowrank is None or name not in lowrank]
    if lowrank is None or missing:
        raise ConfigError(
            f"predictor of {site.key}",
            expected=f"tensors {', '.join(PREDICTOR_TENSORS[:4])} (and bias), as its plan says 'lowrank'",
            found="none" if lowrank is None else f"no {', '.join(missing)}",
            fix="Fit predictors (torch_pi2.fit) and pass them, or plan without them.",
        )
    rank = lowrank["a"].shape[0]
    wanted = {
        "a": ((rank, site.hidden), torch.int8),
        "a_scale": ((rank,), torch.float32),
        "b": ((site.intermediate, rank), torch.int8),
        "b_scale": ((site.intermediate,), torch.float32),
        "bias": ((site.intermediate,), torch.float32),
    }
    tensors: dict[str, torch.Tensor] = {}
    for name, (shape, dtype) in wanted.items():
        tensor = lowrank.get(name)
        if tensor is not None:
            check_shape(f"predictor {name} of {site.key}", tensor, shape)
            if tensor.dtype != dtype:
                raise DtypeError(
                    f"predictor {name} of {site.key}",
                    expected=str(dtype),
                    found=str(tensor.dtype),
                    fix="Use a predictor made by torch_pi2.fit.",
                )
            tensors[name] = (tensor[cold] if name in PER_NEURON else tensor.clone()).contiguous()
    return Cold(tensors)


def _quantised(site: FFNSite, cold: torch.Tensor, lowrank: Mapping[str, torch.Tensor], int8_activations: bool) -> Cold:
    """A low-rank one in quantised rows, whose format their length tells."""
    a, b = lowrank["a"], lowrank["b"]
    kinds = [k for k in QUANTIZED if a.dim() == 2 and a.shape[1] == row_bytes(k, site.hidden)]
    if not kinds:
        wanted = " or ".join(f"[r, {row_bytes(k, site.hidden)}]" for k in QUANTIZED)
        raise ShapeError(
            f"predictor a of {site.key}",
            expected=f"uint8 {wanted}",
            found=str(list(a.shape)),
            fix="It was made for another layer.",
        )
    check_shape(f"predictor b of {site.key}", b, (site.intermediate, row_bytes(kinds[0], len(a))))
    bias = lowrank.get("bias")
    if bias is not None:
        check_shape(f"predictor bias of {site.key}", bias, (site.intermediate,))
    kind, rank = kinds[0], len(a)
    found = {} if bias is None else {"bias": bias[cold]}
    filled = torch.cat((cold.new_zeros(-len(cold) % ROWS), cold))
    sizes = ((rank, site.hidden), (len(filled), rank))
    if not all(wants_blocks(kind, rows, columns, int8_activations) for rows, columns in sizes):
        return Cold({"a": a.clone(), "b": b[cold]} | found, kind)
    if bias is None:
        found["bias"] = torch.zeros(len(cold))
    b = b[filled]
    both = new_tensor((a.numel() + b.numel(),), torch.uint8)  # either alone is often too small for huge pages
    for name, rows, columns, memory in zip("ab", (a, b), (site.hidden, rank), both.split([a.numel(), b.numel()])):
        found[name] = memory.view(rows.shape).copy_(to_blocks(rows, kind, columns))
    return Cold(found, kind, None, True)


def _signs(site: FFNSite, cold: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None) -> Cold:
    if tensors is None or not set(SignBit.tensor_names) <= set(tensors):
        raise ConfigError(
            f"predictor of {site.key}",
            expected=f"tensors {', '.join(SignBit.tensor_names)}, as its plan says 'signbit'",
            found="none" if tensors is None else ", ".join(sorted(tensors)) or "none",
            fix="Fit predictors (torch_pi2.fit with method='signbit') and pass them, or plan without them.",
        )
    whole = SignBit.from_tensors(tensors, None)
    wanted = (site.intermediate, sign_bytes(site.hidden))
    check_shape(f"predictor signs of {site.key}", whole.signs, wanted)
    return Cold({"signs": whole.signs[cold].contiguous()}, margin=whole.margin)
