"""A small GGUF file as a value that JSON could have, and any such value as a file: for tests that spoil it."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import torch

from torch_pi2.store.gguf import TYPES

#: In place of a metadata value: an array in an array, and a kind that there is not.
_WRONG = {"\0deep\0": struct.pack("<IIQ", 9, 9, 1), "\0digits\0": struct.pack("<I", 13)}
_HIDDEN, _INNER, _VOCABULARY = 32, 64, 16
_MATRICES = {
    "token_embd": (_VOCABULARY, _HIDDEN, "Q8_0"),
    "blk.0.attn_q": (_HIDDEN, _HIDDEN, "Q4_0"),
    "blk.0.attn_k": (_HIDDEN, _HIDDEN, "F16"),
    "blk.0.attn_v": (_HIDDEN, _HIDDEN, "Q5_1"),
    "blk.0.attn_output": (_HIDDEN, _HIDDEN, "BF16"),
    "blk.0.ffn_gate": (_INNER, _HIDDEN, "IQ4_NL"),
    "blk.0.ffn_up": (_INNER, _HIDDEN, "Q4_1"),
    "blk.0.ffn_down": (_HIDDEN, _INNER, "MXFP4"),
}
_VECTORS = ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")
_CODES = {of.name: code for code, of in TYPES.items()}
_ALIGNMENT = 32


def small_file() -> bytes:
    """A Llama of one block, a type for each of its matrices, in a form that can be spoiled field by field."""
    return file_of(small_document())


def small_document() -> dict[str, Any]:
    """``version``, ``metadata`` by name, and of ``tensors`` their shape, type and place."""
    tensors: dict[str, Any] = {}
    at = 0
    for name, (rows, columns, of) in _MATRICES.items():
        tensors[f"{name}.weight"] = {"shape": [columns, rows], "type": _CODES[of], "offset": at}
        at += -(-rows * TYPES[_CODES[of]].row_bytes(columns) // _ALIGNMENT) * _ALIGNMENT
    for name in _VECTORS:
        tensors[f"{name}.weight"] = {"shape": [_HIDDEN], "type": 0, "offset": at}
        at += 4 * _HIDDEN
    llama = {
        "context_length": 64,
        "embedding_length": _HIDDEN,
        "block_count": 1,
        "feed_forward_length": _INNER,
        "attention.head_count": 2,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
        "attention.value_length": 16,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.dimension_count": 16,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 2.0,
        "rope.scaling.original_context_length": 32,
        "attention.causal": True,
    }
    metadata = {
        "general.architecture": "llama",
        "general.alignment": _ALIGNMENT,
        "general.name": "small",
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(_VOCABULARY)],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 3,
        **{f"llama.{name}": value for name, value in llama.items()},
    }
    return {"version": 3, "metadata": metadata, "tensors": tensors}


def file_of(document: Any) -> bytes:
    """Whatever ``document`` has, as well as a file can say it; numbers that it cannot are the largest that it can.

    Numbers of tensors are those of bytes counting up, where scales are small.
    """
    said = document if isinstance(document, dict) else {}
    parts = [b"GGUF", _whole(said.get("version"), 4)]
    metadata, tensors = said.get("metadata"), said.get("tensors")
    for many in (tensors, metadata):
        parts.append(_whole(len(many) if isinstance(many, dict) else many, 8))
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        parts.append(_text(name) + _value(value))
    for name, about in tensors.items() if isinstance(tensors, dict) else ():
        about = about if isinstance(about, dict) else {}
        shape = about.get("shape")
        parts.append(_text(name) + _whole(len(shape) if isinstance(shape, list) else shape, 4))
        parts += [_whole(one, 8) for one in (shape if isinstance(shape, list) else ())]
        parts.append(_whole(about.get("type"), 4) + _whole(about.get("offset"), 8))
    header = b"".join(parts)
    return header + bytes(-len(header) % _ALIGNMENT) + _data()


def _data() -> bytes:
    """Of all tensors of :func:`small_document`, finite in each type."""
    made = b""
    for rows, columns, name in (*_MATRICES.values(), *((1, _HIDDEN, "F32") for _ in _VECTORS)):
        size = rows * TYPES[_CODES[name]].row_bytes(columns)
        numbers = torch.arange(size, dtype=torch.int64).remainder(56).to(torch.uint8)  # no exponent of ones
        made += numbers.numpy().tobytes() + bytes(-size % _ALIGNMENT)
    return made


def _whole(value: Any, size: int) -> bytes:
    most = (1 << (8 * size)) - 1
    fits = isinstance(value, int | float) and math.isfinite(value) and abs(value) <= most
    return (int(value) & most if fits else most).to_bytes(size, "little")


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(value: Any) -> bytes:
    """A metadata value with its kind."""
    if isinstance(value, str):
        return _WRONG.get(value) or struct.pack("<I", 8) + _text(value)
    if isinstance(value, list) and str(value[0]) in _WRONG:
        return _WRONG[value[0]]
    if isinstance(value, list):
        kinds: dict[type, tuple[int, Callable[[Any], bytes]]] = {
            str: (8, _text),
            list: (9, lambda _: bytes(12)),
        }
        kind, write = kinds.get(type(value[0]), (4, lambda one: _whole(one, 4)))
        return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(write(one) for one in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, int):
        small = -(1 << 31) <= value < 1 << 31
        return struct.pack("<Ii", 5, value) if small else struct.pack("<I", 10) + _whole(value, 8)
    return _WRONG["\0digits\0"]
