"""``torch_pi2.export_gguf``: a dense checkpoint as a GGUF file, for llama.cpp and what is built on it."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_pi2.base.arguments import checked
from torch_pi2.base.evaluating import fresh_settings
from torch_pi2.base.files import claimed, not_written
from torch_pi2.base.progress import bar
from torch_pi2.checkpoint.gguf.families import Family, configuration, family_for, llama3_divisors, rows_in_file
from torch_pi2.checkpoint.gguf.source import gguf_package, stack_name, tensor_names
from torch_pi2.checkpoint.gguf.tokenizer import add_tokenizer
from torch_pi2.checkpoint.quantize import converted
from torch_pi2.errors import ArtifactError, UnsupportedModelError, check_choice
from torch_pi2.formats import GGUF_TYPES
from torch_pi2.ops.quantized import check_quantizable
from torch_pi2.rewrite.skeleton import model_config, places, skeleton
from torch_pi2.store.folder import check_float, read_config
from torch_pi2.store.gguf import GgufFile
from torch_pi2.store.names import expert_matrix, stored_name
from torch_pi2.store.source import Checkpoint

_CHUNK_BYTES = 16 << 20
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass
class GgufReport:
    """What :func:`export_gguf` did.

    Attributes:
        type: of the matrices. file_bytes: size of the file. tensors: type -> how many. seconds: wall time.
        tokenizer: why the file has none; empty: it has.
    """

    type: str
    file_bytes: int = 0
    tensors: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    tokenizer: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Out:
    """A tensor of the file: which of the checkpoint's it is made of, rows first."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    type: str


@checked
@fresh_settings()
def export_gguf(
    folder: str | Path,
    file: str | Path,
    *,
    type: str = "f16",
    trust_remote_code: bool = False,
    progress: bool = False,
) -> GgufReport:
    """Write the float checkpoint in ``folder`` (or a model that ``optimize`` wrote, dense) as a GGUF file.

    Vectors and routers of experts are float32. Predictors, plans and thresholds have no place in a GGUF file: the
    model is the dense one.

    Args:
        type: of matrices: ``f32``, ``f16``, ``bf16``, ``q8_0`` or ``q4_0`` (rounded to nearest; lossy).

    Raises:
        UnsupportedModelError: an architecture, or something in its configuration, that the file cannot say.
        ArtifactError: damage, or the file cannot be written; then there is none. NonFiniteError, DtypeError: a weight.
        LibraryMissingError: no package gguf.
    """
    check_choice("export_gguf(type=...)", type, GGUF_TYPES, "Choose one of these.")
    gguf = gguf_package()
    folder, file = Path(folder), Path(file)
    check_float(folder, read_config(folder))
    start, report = time.perf_counter(), GgufReport(type)
    config = model_config(folder, trust_remote_code=trust_remote_code)
    family = family_for(config.model_type)
    try:
        with Checkpoint(folder) as checkpoint, claimed(file) as temporary:
            _check_whole(checkpoint, folder, trust_remote_code)
            outs = _layout(checkpoint, config, family, type)
            writer = gguf.GGUFWriter(temporary, family.arch)
            try:
                _add_metadata(writer, folder, config, family, type, gguf)
                report.tokenizer = add_tokenizer(writer, folder, config.vocab_size)
                _write(gguf, writer, checkpoint, config, family, outs, progress)
            finally:
                writer.close()
            with open(temporary, "rb+") as made:
                os.fsync(made.fileno())
            _check_said(temporary, config)
            report.file_bytes = temporary.stat().st_size
            temporary.replace(file)
    except OSError as error:
        raise not_written(file, error) from error
    for out in outs:
        report.tensors[out.type] = report.tensors.get(out.type, 0) + 1
    report.seconds = time.perf_counter() - start
    return report


#: What a file need not say: names, training, and how answers end, which the tokenizer's part says.
_UNSAID = (
    *("_name_or_path", "architectures", "attention_dropout", "dtype", "initializer_range", "transformers_version"),
    *("use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits", "router_aux_loss_coef"),
    *("resid_pdrop", "embd_pdrop", "pretraining_tp", "model_type", "hidden_act", "max_window_layers"),
    *("auto_map", "quantization_config", "router_jitter_noise", "original_max_position_embeddings"),
)


def _check_said(file: Path, config: Any) -> None:
    """Raises UnsupportedModelError: what is read back of the file is another configuration."""
    from transformers import CONFIG_MAPPING

    with GgufFile(file) as made:
        said = configuration(made)
    kind = CONFIG_MAPPING[said.pop("model_type")]
    ours, theirs = config.to_dict(), kind(**said).to_dict()
    for name in (ours.keys() & theirs.keys()).difference(_UNSAID):
        same = ours[name] == theirs[name] or (name == "head_dim" and ours[name] is None)
        if isinstance(ours[name], float) and isinstance(theirs[name], float):
            same = math.isclose(ours[name], theirs[name], rel_tol=1e-6)
        if name == "rope_parameters":
            same = _rounded(ours[name]) == _rounded(theirs[name])
        if name == "sliding_window" and not same:
            same = ours[name] is None or ours[name] >= config.max_position_embeddings
        if not same:
            raise _refuse(name, f"{theirs[name]!r}, which is what would be read", repr(ours[name]))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items() if name != "partial_rotary_factor" or one != 1.0}
    return float(f"{value:.6g}") if isinstance(value, int | float) else value


def _check_whole(checkpoint: Checkpoint, folder: Path, trust_remote_code: bool) -> None:
    """Raises ArtifactError: a parameter of the model that the checkpoint has not, or of another shape."""
    with torch.device("meta"):
        model = skeleton(folder, trust_remote_code=trust_remote_code)
    for names in places(model):
        if ".experts." in names[0]:
            continue  # one by one in checkpoints
        known = (stored_name(checkpoint, name) for name in names)
        stored = next((name for name in known if name in checkpoint), "")
        owner, _, local = names[0].rpartition(".")
        wanted = tuple(getattr(model.get_submodule(owner), local).shape)
        found = checkpoint.spec(stored).shape if stored else None
        if found != wanted:
            raise ArtifactError(
                f"{names[0]} in {folder}",
                expected=str(list(wanted)),
                found="nothing" if found is None else str(list(found)),
                fix="The checkpoint is not whole, or config.json is of another model.",
            )


def _refuse(what: str, expected: str, found: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"a GGUF file: {what}", expected=expected, found=found, fix="Convert the checkpoint with llama.cpp's script."
    )


def _layout(checkpoint: Checkpoint, config: Any, family: Family, kind: str) -> list[_Out]:
    """What the file has, from what the checkpoint has. Raises UnsupportedModelError: a tensor without a name there."""
    names = tensor_names(family, config.num_hidden_layers)
    stacks: dict[str, list[str]] = {}
    for name in sorted(checkpoint.names(), key=_in_order):
        if (expert := expert_matrix(name)) is not None:
            block, _, role = expert
            known: str | None = stack_name(block, role)
        else:
            base, dot, suffix = name.rpartition(".")
            found = names.get_name(base)
            known = f"{found}{dot}{suffix}" if found and suffix in ("weight", "bias") else None
        if known == "output.weight" and config.tie_word_embeddings:
            continue
        if known is None:
            raise _refuse(name, f"a tensor that {family.arch} files have", "none")
        stacks.setdefault(known, []).append(name)
    outs = []
    for known, sources in stacks.items():
        shape = checkpoint.spec(sources[0]).shape
        shape = (len(sources), *shape) if "_exps." in known else shape
        plain = len(shape) == 1 or "ffn_gate_inp" in known
        quantised = kind in ("q8_0", "q4_0") and not plain
        if quantised and shape[-1] % 32:
            raise _refuse(sources[0], f"rows of a multiple of 32 for {kind}", str(shape[-1]))
        outs.append(_Out(known, tuple(sources), shape, "f32" if plain else kind))
    return outs


def _in_order(name: str) -> list[Any]:
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _add_metadata(writer: Any, folder: Path, config: Any, family: Family, kind: str, gguf: Any) -> None:
    """Raises UnsupportedModelError: something in ``config`` that llama.cpp computes otherwise."""
    for attribute, wanted in family.fixed.items():
        found = getattr(config, attribute, wanted)
        if found != wanted and not (attribute == "sliding_window" and (found or 0) >= config.max_position_embeddings):
            raise _refuse(attribute, repr(wanted), repr(found))
    for attribute in ("use_sliding_window", "sliding_window"):
        if attribute not in family.all_keys.values() and getattr(config, attribute, None):
            raise _refuse(attribute, "none", repr(getattr(config, attribute)))
    writer.add_name(folder.resolve().name)
    writer.add_file_type(getattr(gguf.LlamaFileType, "ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"))
    said = {key: getattr(config, attribute, None) for key, attribute in family.all_keys.items()}
    width = said["attention.key_length"] or config.hidden_size // config.num_attention_heads
    said |= {"attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width}
    for key, value in said.items():
        if isinstance(value, float):
            writer.add_float32(f"{family.arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{family.arch}.{key}", int(value))
    _add_rope(writer, config, family)


def _add_rope(writer: Any, config: Any, family: Family) -> None:
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get("full_attention", rope))
    kind = rope.get("rope_type", "default")
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if getattr(config, "partial_rotary_factor", 1.0) != 1.0 or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise _refuse("rotary positions", "of whole heads", "of a part of them")
    if kind == "linear":
        writer.add_string(f"{family.arch}.rope.scaling.type", "linear")
        writer.add_float32(f"{family.arch}.rope.scaling.factor", float(rope["factor"]))
    elif kind not in ("default", "llama3"):
        raise _refuse("rotary positions", "default, linear or llama3", repr(kind))


def _write(
    gguf: Any,
    writer: Any,
    checkpoint: Checkpoint,
    config: Any,
    family: Family,
    outs: list[_Out],
    progress: bool,
) -> None:
    types = {out.name: gguf.GGMLQuantizationType[out.type.upper()] for out in outs}
    divisors = _divisors(config)
    if divisors is not None:
        writer.add_tensor_info("rope_freqs.weight", divisors.shape, np.dtype(np.float32), divisors.nbytes)
    for out in outs:
        block, size = gguf.GGML_QUANT_SIZES[types[out.name]]
        stored = (*out.shape[:-1], out.shape[-1] // block * size)
        plain = out.type in ("f32", "f16")
        dtype = np.dtype(np.float32 if out.type == "f32" else np.float16 if out.type == "f16" else np.uint8)
        writer.add_tensor_info(
            out.name, out.shape if plain else stored, dtype, int(np.prod(stored)), None if plain else types[out.name]
        )
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        step()
    into = writer.fout[0]
    if divisors is not None:
        _write_one(writer, into, [divisors])
    for out in bar(outs, "write tensors", progress, delay=2):
        _write_one(writer, into, _parts(gguf, checkpoint, config, family, out, types[out.name]))


def _write_one(writer: Any, into: Any, parts: Any) -> None:
    writer.write_padding(into, into.tell())
    for part in parts:
        part.tofile(into)
    writer.write_padding(into, into.tell())


def _divisors(config: Any) -> np.ndarray[Any, Any] | None:
    """``rope_freqs.weight`` of Llama 3.1. Raises UnsupportedModelError: a rule with other numbers than its."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    if rope.get("rope_type") != "llama3":
        return None
    if {key: rope.get(key) for key in _LLAMA3} != _LLAMA3:
        raise _refuse("rotary positions", f"llama3 with {_LLAMA3}", str(rope))
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    made: np.ndarray[Any, Any] = llama3_divisors(width // 2, float(rope["rope_theta"]), rope).numpy()
    return made


def _parts(
    gguf: Any, checkpoint: Checkpoint, config: Any, family: Family, out: _Out, of: Any
) -> Iterator[np.ndarray[Any, Any]]:
    """Bytes of a tensor, some rows at a time."""
    for name in out.sources:
        shape = checkpoint.spec(name).shape
        if len(shape) == 1:
            values = checkpoint.read(name).float()
            order = _order(out.name, shape[0], config, family)
            values = converted(values if order is None else values[order], torch.float32, name)
            yield (values + (family.norm_offset if out.name.endswith("norm.weight") else 0.0)).numpy()
            continue
        order = _order(out.name, shape[0], config, family)
        step = max(1, _CHUNK_BYTES // (4 * shape[1]))
        whole = checkpoint.read(name)[order] if order is not None else None
        for start in range(0, shape[0], step):
            stop = min(shape[0], start + step)
            values = checkpoint.read(name, (start, stop)) if whole is None else whole[start:stop]
            if out.type in ("q8_0", "q4_0"):
                check_quantizable(name, values, "int8")
            kind = {"f16": torch.float16, "bf16": torch.bfloat16}.get(out.type, torch.float32)
            converted(values, kind, name)  # raises for what it cannot hold
            yield gguf.quants.quantize(values.float().numpy(), of)


def _order(name: str, rows: int, config: Any, family: Family) -> torch.Tensor | None:
    """Which row of the model each row of the file is; None: the same."""
    kind = family.permuted_part(name)
    if kind is None:
        return None
    heads = config.num_attention_heads if kind == "q" else config.num_key_value_heads
    return rows_in_file(rows, heads).argsort()
