"""Layout of quantised rows in plain torch (``csrc/include/pi2/types.h``), for references and checks.

A row of n values is stored in groups of 32 (the last padded with zeros): the integers of all groups, then a float16
scale per group; a value is its integer times its group's scale.

* ``int4``: 16 bytes a group; byte k holds value k in its low and value k + 16 in its high half, each plus 8.
* ``int8``: 32 bytes a group, signed.

For rows in ggml's blocks see ``csrc/kernels/scalar/ggml.h``.
"""

import torch

from torch_pi2.formats import FORMATS, GGML, GROUP, formats_of, has_two_formats, row_bytes


def values(rows: torch.Tensor, weights: str, columns: int) -> torch.Tensor:
    """Values of quantised rows, uint8 ``[..., row_bytes]`` -> float32 ``[..., columns]``; exact."""
    if weights in GGML:
        blocks = rows.contiguous().unflatten(-1, (-1, FORMATS[weights].block_bytes))
        read = {"q4_k": _k, "q5_k": _k, "q6_k": _q6_k, "tq2_0": _tq2_0}.get(weights, _small)
        return read(blocks, FORMATS[weights].bits).flatten(-3)
    groups = -(-columns // GROUP)
    split = groups * FORMATS[weights].group_bytes
    stored = rows[..., :split].contiguous()
    scale_G = rows[..., split:].contiguous().view(torch.float16).float()
    if weights == "int4":
        stored = stored.unflatten(-1, (groups, GROUP // 2))
        integers = torch.cat((stored & 15, stored >> 4), -1).float() - 8
    else:
        integers = stored.view(torch.int8).unflatten(-1, (groups, GROUP)).float()
    return (integers * scale_G[..., None]).flatten(-2)[..., :columns]


def row_of_neurons(neuron_rows: torch.Tensor, row: int, weights: str, hidden: int) -> tuple[torch.Tensor, str]:
    """Row ``row`` of every neuron, a view ``[I, bytes]`` (floats: ``[I, H]``), and its format."""
    if not has_two_formats(weights):
        return neuron_rows[:, row], weights
    first, down = formats_of(weights)
    start, stop = row * row_bytes(first, hidden), neuron_rows.shape[1]
    if stop - start == row_bytes(down, hidden):
        return neuron_rows[:, start:], down
    return neuron_rows[:, start : start + row_bytes(first, hidden)], first


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """``x`` rounded as int8 activations, float32: steps of magnitude / 127 by 32; all NaN where one is not finite."""
    n = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -n % GROUP)).unflatten(-1, (-1, GROUP))
    largest = padded.abs().amax(-1, keepdim=True)
    inverse = torch.full_like(largest, 127.0) / largest  # 127 / tensor would be a reciprocal times 127: two roundings
    usable = inverse.isfinite() & largest.isfinite()
    steps = torch.where(usable, torch.round(padded * inverse), 0.0)
    scale = torch.where(largest.isfinite(), largest / 127, torch.nan)
    return (steps * scale).flatten(-2)[..., :n]


def _floats(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _halves(nibbles: torch.Tensor) -> torch.Tensor:
    """Low halves of ``[..., n]`` bytes, then the high ones: ``[..., 2, n]``."""
    return torch.stack((nibbles & 15, nibbles >> 4), -2)


def _bits(stored: torch.Tensor, each: int) -> torch.Tensor:
    """``each`` bits of ``[..., n]`` bytes at a time, lowest first: ``[..., 8 / each, n]``."""
    shift = torch.arange(0, 8, each, dtype=torch.uint8, device=stored.device)
    return stored[..., None, :] >> shift[:, None] & (1 << each) - 1


def _small(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """q4_1, q5_0, q5_1: ``[..., B, bytes]`` -> ``[..., B, 1, 32]``."""
    centred = blocks.shape[-1] == FORMATS["q5_0"].block_bytes
    at = 2 if centred else 4
    scale = _floats(blocks[..., :2])
    numbers = _halves(blocks[..., -GROUP // 2 :]).flatten(-2)
    if bits == 5:
        numbers = numbers | _bits(blocks[..., at : at + 4], 1).transpose(-1, -2).flatten(-2) << 4
    if centred:
        return (scale * (numbers.float() - 16))[..., None, :]
    return (scale * numbers.float() + _floats(blocks[..., 2:4]))[..., None, :]


def _k(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """q4_k, q5_k: ``[..., B, bytes]`` -> ``[..., B, 8, 32]``."""
    d, least = _floats(blocks[..., :2]), _floats(blocks[..., 2:4])
    low_scale, low_min, rest = blocks[..., 4:16].split(4, -1)
    scale = torch.cat((low_scale & 63, rest & 15 | (low_scale >> 6) << 4), -1).float()
    mins = torch.cat((low_min & 63, rest >> 4 | (low_min >> 6) << 4), -1).float()
    numbers = _halves(blocks[..., -128:].unflatten(-1, (4, GROUP))).flatten(-3, -2)
    if bits == 5:
        numbers = numbers | _bits(blocks[..., 16:48], 1) << 4
    return (d * scale)[..., None] * numbers.float() - (least * mins)[..., None]


def _tq2_0(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., B, bytes]`` -> ``[..., B, 8, 32]``."""
    numbers = _bits(blocks[..., :64].unflatten(-1, (2, GROUP)), bits).flatten(-3, -2)
    return _floats(blocks[..., 64:])[..., None] * (numbers.float() - 1)


def _q6_k(blocks: torch.Tensor, bits: int) -> torch.Tensor:
    """``[..., B, bytes]`` -> ``[..., B, 16, 16]``."""
    numbers = _halves(blocks[..., :128].unflatten(-1, (2, 64))).unflatten(-1, (2, GROUP)).flatten(-3, -2)
    numbers = numbers | _bits(blocks[..., 128:192].unflatten(-1, (2, GROUP)), 2) << 4
    scale = _floats(blocks[..., 208:]) * blocks[..., 192:208].contiguous().view(torch.int8).float()
    centred: torch.Tensor = numbers.flatten(-3).unflatten(-1, (16, 16)).float() - 32
    return scale[..., None] * centred
