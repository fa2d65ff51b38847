"""A GGUF file as a checkpoint: tensors under transformers' names, as floats or as stored rows."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_pi2.base.package import needed
from torch_pi2.base.reading import Closing
from torch_pi2.base.tensorfile import Spec
from torch_pi2.checkpoint.gguf.families import ArchMetadata, Family, arch_number, family_of
from torch_pi2.checkpoint.stored import Packed
from torch_pi2.errors import ArtifactError, NonFiniteError
from torch_pi2.formats import ROWS
from torch_pi2.store.gguf import GgufModel, GgufTensor, TensorType
from torch_pi2.store.source import expert_matrix

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Types that our formats represent exactly, with scales elsewhere, or with the integers that nibbles index.
_SPLIT = {"Q4_0": "int4", "Q8_0": "int8", "IQ4_NL": "int8", "TQ1_0": "tq2_0"}
#: The integers that the sixteen nibbles of IQ4_NL index.
_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_SCALE_BYTES = 2
#: Ends of the names of vectors and stacks of vectors that are matrices in files: of one column, or a row per group.
_BARE = (".ssm_a", ".ssm_d")
_VECTORS = (*_BARE, ".ssm_norm.weight")
#: RWKV-7's mixes of a token and the one before, in one tensor.
_MIXES = re.compile(r"model\.layers\.(\d+)\.attn\.x_([rwkvag])")
#: One-row matrices, which llama.cpp's converter writes as vectors.
_ONE_ROW = ".ffn_gate_inp_shexp.weight"


def own_format(type_name: str) -> str | None:
    """Our format that keeps rows of a GGUF type bit for bit, or None."""
    found = _SPLIT.get(type_name, type_name.lower())
    return found if found in ROWS else None


def own_rows(rows: torch.Tensor, of: TensorType) -> torch.Tensor:
    """Rows converted to their type's :func:`own_format`."""
    if of.name not in _SPLIT:
        return rows
    if of.name == "TQ1_0":  # as exact: ternary numbers with one scale to a block, in other bits
        types, quants = gguf_package().GGMLQuantizationType, gguf_package().quants
        return torch.from_numpy(quants.quantize(quants.dequantize(rows.numpy(), types.TQ1_0), types.TQ2_0))
    blocks = rows.unflatten(1, (-1, of.block_bytes))
    scales, integers = blocks[..., :_SCALE_BYTES], blocks[..., _SCALE_BYTES:]
    if of.name == "IQ4_NL":
        nibbles = torch.cat((integers & 15, integers >> 4), -1)
        integers = torch.tensor(_LEVELS, dtype=torch.int8)[nibbles.int()].view(torch.uint8)
    return torch.cat((integers.flatten(1), scales.flatten(1)), 1)


def gguf_package() -> Any:
    """The package ``gguf``: tensor names and dequantisation. Raises LibraryMissingError."""
    with needed("gguf", "gguf"):
        import gguf
    return gguf


def tensor_names(family: Family, blocks: int) -> Any:
    """Maps transformers' module names to those in a file. Raises as :func:`gguf_package`."""
    gguf = gguf_package()
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    return gguf.get_tensor_name_map(arch, blocks)


def gguf_name(names: Any, family: Family, parameter: str) -> str | None:
    """A parameter's name in the file, by :func:`tensor_names`."""
    other = parameter
    for ours, theirs in family.names.items():
        other = other.replace(ours, theirs)
    for name in (parameter, other):
        module, _, part = name.rpartition(".")
        if part in ("weight", "bias") and (known := names.get_name(module)):
            return f"{known}.{part}"
        if known := names.get_name(name):  # no weight of a module, but for its name in files
            return known if known.endswith(_BARE) else f"{known}.weight"
    return None


def stack_name(block: int, role: str) -> str:
    """The tensor that stacks one matrix of all experts of a block."""
    return f"blk.{block}.ffn_{role}_exps.weight"


class GgufCheckpoint(Closing):
    """A GGUF file (``folder``: the file, or any of its parts), with the interface of
    :class:`torch_pi2.store.source.Checkpoint`. Raises ArtifactError: damage. UnsupportedModelError: an unknown
    architecture.
    """

    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path)
        self.file = GgufModel(path)
        with self.opening():
            self.family = family_of(self.file)
            self.about, self.by_neuron = self.family.model_type, self.family.by_neuron
            said = self.file.metadata.get(f"{self.family.arch}.hidden_act")
            activation = said or self.family.fixed.get("hidden_act", self.family.fixed.get("hidden_activation"))
            exact = self.family.arch == "gemma3n" or any("_exps." in one for one in self.file.tensors)
            self.zeros = exact or activation not in ("silu", "gelu_pytorch_tanh", "gelu_new")
            blocks = arch_number(self.file, self.family, "block_count")
            blocks = max(blocks, ArchMetadata(self.file, self.family.arch).number("decoder_block_count", 0))
            self._names = tensor_names(self.family, min(blocks, len(self.file.tensors)))
            self.used = {"rope_freqs.weight"}  # which the configuration is read from
            for name, tensor in self.file.tensors.items():
                if name.endswith(_ONE_ROW) and len(tensor.shape) == 1:
                    self.file.tensors[name] = replace(tensor, shape=(1, *tensor.shape))

    def close(self) -> None:
        self.file.close()

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.file.tensors.values())

    def _find(self, name: str) -> tuple[GgufTensor, int, int] | None:
        """The tensor with parameter ``name``, and its range of rows there."""
        found = expert_matrix(name)
        if found is not None:
            block, expert, role = found
            tensor = self.file.tensors.get(stack_name(block, role))
            if tensor is None or len(tensor.shape) != 3 or expert >= tensor.shape[0]:
                return None
            first = expert * tensor.shape[1]
            return tensor, first, first + tensor.shape[1]
        mix = _MIXES.fullmatch(name)
        if mix and (tensor := self.file.tensors.get(f"blk.{mix[1]}.time_mix_lerp_fused.weight")) is not None:
            return tensor, (row := "rwkvag".index(mix[2])), row + 1
        base, _, suffix = name.rpartition(".")
        module, _, number = base.rpartition(".")
        if number.isdigit() and (known := self._names.get_name(module)):  # one matrix of a stack
            tensor = self.file.tensors.get(f"{known}.{suffix}")
            if tensor is None or len(tensor.shape) != 3 or int(number) >= tensor.shape[0]:
                return None
            return tensor, int(number) * tensor.shape[1], (int(number) + 1) * tensor.shape[1]
        known = gguf_name(self._names, self.family, name)
        if known and self.family.by_neuron:
            known = known.replace("ffn_down.", "ffn_down_t.")
        tensor = self.file.tensors.get(known) if known else None
        return None if tensor is None else (tensor, 0, tensor.rows)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def _tensor(self, name: str) -> tuple[GgufTensor, int, int]:
        found = self._find(name)
        if found is None:
            expected, fix = f"a tensor for {name}", "The file is not whole, or its metadata is of another model."
            raise ArtifactError(str(self.folder), expected=expected, found=f"{len(self.file.tensors)} others", fix=fix)
        self.used.add(found[0].name)
        return found

    def packed(self, name: str) -> Packed | None:
        """Type and format of matrix ``name``; None: floats."""
        of = self._tensor(name)[0].type
        if of.name in (*_FLOATS, "F64"):
            return None
        own, bits = own_format(of.name), 8 * of.block_bytes / of.block
        return Packed(of.name, bits, own or ("int4" if bits < 4 else "int8"), own is not None, own is not None)

    def spec(self, name: str) -> Spec:
        """Shape and dtype of the numbers; quantised ones are float32."""
        tensor, start, stop = self._tensor(name)
        shape = (stop - start, tensor.columns) if len(tensor.shape) > 1 else tensor.shape
        shape = shape[::-1] if _is_by_neuron(tensor) else shape
        if tensor.name.endswith(_VECTORS):
            shape = (stop * tensor.columns,)
        if tensor.name.endswith(("conv1d.weight", "conv.weight")):
            shape = (stop, 1, tensor.columns)
        if _MIXES.fullmatch(name):
            shape = (1, 1, tensor.columns)
        if tensor.name.endswith(".time_mix_r_k.weight"):
            width = arch_number(self.file, self.family, "wkv.head_size")
            shape = (tensor.columns // width, width)
        return Spec(shape, _FLOATS.get(tensor.type.name, torch.float32))

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``[start, stop)`` of ``name`` in the model's order, uint8 as stored; of down by neuron, its columns."""
        tensor, first, _ = self._tensor(name)
        order = self._order(tensor)
        if order is None:
            return self.file.read_rows(tensor.name, first + start, first + stop)
        wanted = order[start:stop]
        low, high = int(wanted.min()), int(wanted.max()) + 1
        return self.file.read_rows(tensor.name, low, high)[wanted - low]

    def own_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """The same rows in :func:`own_format`'s layout. Raises NonFiniteError: NaN or infinite scales."""
        tensor, _, _ = self._tensor(name)
        rows = self.rows(name, start, stop)
        scales = rows.unflatten(1, (-1, tensor.type.block_bytes))[..., slice(*_SCALES[tensor.type.name])]
        _check_finite(scales.contiguous().view(torch.float16), tensor.name)
        return own_rows(rows, tensor.type)

    def _order(self, tensor: GgufTensor) -> torch.Tensor | None:
        """Row in the file of each row of the model; None: the same order."""
        permuted = re.search(r"\.attn_([qk])\.", tensor.name) if self.family.permuted else None
        if permuted is None:
            return None
        heads = arch_number(self.file, self.family, "attention.head_count")
        if permuted[1] == "k" and f"{self.family.arch}.attention.head_count_kv" in self.file.metadata:
            heads = arch_number(self.file, self.family, "attention.head_count_kv")
        rows = tensor.shape[0]
        if rows % (2 * heads):
            expected, fix = f"rows of {heads} heads", "The file's metadata is of another model; get it again."
            raise ArtifactError(f"{tensor.name} of {self.folder}", expected=expected, found=str(rows), fix=fix)
        # the halves of a head are interleaved
        return torch.arange(rows).unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(-1)

    def read(self, name: str, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """Parameter ``name``, or its rows ``[start, stop)``, exactly (16-bit floats in their dtype)."""
        tensor, first, last = self._tensor(name)
        spec = self.spec(name)
        if 1 in (len(spec.shape), len(tensor.shape)):
            order = self._order(tensor)
            values = _values(self.file.read_rows(tensor.name, 0, tensor.rows), tensor).flatten()
            values = values if order is None else values[order]
            if tensor.name.endswith(".ssm_a"):
                values = _check_finite((-values).log(), tensor.name)
            offset = self.family.norm_offset if tensor.name.endswith("norm.weight") else 0.0
            return (values - offset).view(spec.shape)[slice(*(rows or (0, None)))]
        if _is_by_neuron(tensor):
            return _values(self.rows(name, 0, last), tensor).T[slice(*(rows or (0, None)))]
        start, stop = rows or (0, last - first)
        return _values(self.rows(name, start, stop), tensor).view(-1, *spec.shape[1:])

    def read_into(self, name: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Fill ``tensor`` with rows of ``name`` from ``row`` on, some at a time."""
        whole = _is_by_neuron(self._tensor(name)[0])  # its rows are columns of the file's tensor
        step = len(tensor) if whole else max(1, (8 << 20) // max(1, 4 * tensor[0].numel()))
        for start in range(0, len(tensor), step):
            stop = min(len(tensor), start + step)
            tensor[start:stop] = self.read(name, (row + start, row + stop))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        raise NotImplementedError("only stacks of experts are read so, and experts are single here")

    def check_float(self, name: str) -> None:
        """Every tensor of a GGUF file can be read as floats. Raises ArtifactError: there is no such tensor."""
        self._tensor(name)

    def unused(self) -> list[str]:
        """Tensors that were not read, but for keys and values of layers that take those of earlier ones."""
        blocks = arch_number(self.file, self.family, "block_count")
        shared = ArchMetadata(self.file, self.family.arch).number("attention.shared_kv_layers", 0)
        own = range(blocks - shared, blocks)
        late = {f"blk.{block}.attn_{part}.weight" for block in own for part in ("k", "v", "k_norm")}
        late |= {f"blk.0.time_mix_v{part}.weight" for part in range(3)}  # which the first layer of RWKV-7 has not
        late |= {"dec.blk.0.cross_attn_rel_b.weight"}  # which T5 has not used
        return sorted(set(self.file.tensors) - self.used - set(self.predictors()) - late)

    def predictors(self) -> list[str]:
        """Tensors of PowerInfer's predictors, which are left out."""
        found = [name for name in self.file.tensors if re.fullmatch(r"blk\.\d+\.fc[12]\.weight", name)]
        return sorted(found) if self.family.by_neuron else []


#: Type -> byte range of the float16 scales in a block.
_SCALES = dict.fromkeys(("Q4_0", "Q8_0", "IQ4_NL", "Q5_0"), (0, 2)) | {"Q4_1": (0, 4), "Q5_1": (0, 4)}
_SCALES |= {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "TQ1_0": (52, 54), "TQ2_0": (64, 66)}


def _check_finite(values: torch.Tensor, name: str) -> torch.Tensor:
    if bool(values.isfinite().all()):
        return values
    fix = "The file is damaged; get it again."
    raise NonFiniteError(f"values of {name}", expected="numbers", found="NaN or an infinity", fix=fix)


def _is_by_neuron(tensor: GgufTensor) -> bool:
    return tensor.name.endswith(".ffn_down_t.weight")


def _values(rows: torch.Tensor, tensor: GgufTensor) -> torch.Tensor:
    """The numbers of a tensor's rows, float32 unless they are 16-bit floats. Raises as :func:`gguf_package`."""
    name = tensor.type.name
    if name in _FLOATS:
        return _check_finite(rows.view(_FLOATS[name]), tensor.name)
    if (own := own_format(name)) is not None:
        return torch.ops.pi2.dequantize(own_rows(rows, tensor.type), own, tensor.columns, torch.float32)
    gguf = gguf_package()
    try:
        made = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name])
    except (KeyError, NotImplementedError, ValueError) as error:
        expected, fix = "a type that the package gguf can read", "Quantise the model to another type."
        raise ArtifactError(tensor.name, expected=expected, found=name, fix=fix) from error
    return torch.from_numpy(np.ascontiguousarray(made)).view(len(rows), -1)
