"""``torch_pi2.import_rwkv``: checkpoints of RWKV-7's authors (``.pth``) as folders that transformers' models have."""

import ast
import re
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch

from torch_pi2.base.dtypes import dtype_name
from torch_pi2.base.fields import checked
from torch_pi2.base.files import replacing_folder
from torch_pi2.base.modules import fresh_settings
from torch_pi2.base.package import needed, quiet_imports
from torch_pi2.base.reading import read_bytes
from torch_pi2.checkpoint.gguf.tokenizer import RWKV_CHAT, longest_matches
from torch_pi2.checkpoint.importing import ImportReport
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.rewrite.skeleton import own_classes
from torch_pi2.store.folder import check_replaceable

#: Parts of names there (regular expressions), in this order -> here.
_NAMES = {
    r"^blocks\.": "model.layers.",
    r"\.att\.": ".attn.",
    r"^emb\.": "model.embeddings.",
    r"^head\.": "lm_head.",
    r"^ln_out\.": "model.norm.",
    **{rf"\.ln{old}\.": f".{new}_norm." for old, new in {"0": "pre", "1": "attn", "2": "ffn", "_x": "g"}.items()},
    r"attn\.(r)eceptance|attn\.(k)ey|attn\.(v)alue|attn\.(o)utput": r"attn.\1\2\3\4_proj",
    r"attn\.([wavg])1$": r"attn.\1_lora.lora.0.weight",
    r"attn\.([wavg])2$": r"attn.\1_lora.lora.2.weight",
    r"attn\.([wav])0$": r"attn.\1_lora.lora.2.bias",
    r"ffn\.x_k": "ffn_x_k",
}
#: Attribute of the configuration -> tensor, and its dimension.
_SIZES = {"vocab_size": ("emb.weight", 0), "hidden_size": ("emb.weight", 1), "head_dim": ("blocks.0.att.r_k", 1)}
_SIZES |= {"intermediate_size": ("blocks.0.ffn.key.weight", 0), "v_low_rank_dim": ("blocks.1.att.v1", 1)}
_SIZES |= {f"{name}_low_rank_dim": (f"blocks.0.att.{name[0]}1", 1) for name in ("a", "gate")}
_SIZES |= {"decay_low_rank_dim": ("blocks.0.att.w1", 1)}


@checked
@fresh_settings()
@quiet_imports()
def import_rwkv(file: str | Path, folder: str | Path) -> ImportReport:
    """Write the RWKV-7 model of ``file``, a ``.pth`` of its authors, to ``folder``, with its numbers and dtype.

    The folder has safetensors in flash-linear-attention's names; ``load_dense``, ``optimize`` and ``quantize`` take it.
    The tokenizer is made of ``rwkv_vocab*.txt`` beside the file, or in the installed package ``rwkv``.

    Raises:
        ArtifactError: damage, or ``folder`` cannot be written. UnsupportedModelError: another model.
            LibraryMissingError: transformers is not installed.
    """
    with needed("transformers", "hf"):
        from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
    own_classes({"model_type": "rwkv7"})
    file, folder, start = Path(file), Path(folder).resolve(), time.perf_counter()
    check_replaceable(folder)
    found = {name: value for name, value in _tensors(file).items() if not re.search(r"^blocks\.0\.att\.v\d", name)}
    blocks = {name.split(".")[1] for name in found if name.startswith("blocks.")}
    try:
        sizes = {name: found[tensor].shape[dimension] for name, (tensor, dimension) in _SIZES.items()}
    except (KeyError, IndexError) as error:
        raise _other(file, f"another, or no, {error} (earlier versions lack att.r_k)") from error
    config: Any = AutoConfig.for_model("rwkv7", **sizes, num_hidden_layers=len(blocks), group_norm_eps=64e-5)
    kind = config.dtype = found["emb.weight"].dtype
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    wanted, state = model.state_dict(), {}
    for name, value in found.items():
        own = name
        for pattern, new in _NAMES.items():
            own = re.sub(pattern, new, own)
        value = value.T if own.endswith(("lora.0.weight", "lora.2.weight")) else value
        if own not in wanted or value.numel() != wanted[own].numel() or not value.is_floating_point():
            raise _other(file, f"{name} of {list(value.shape)}, {dtype_name(value.dtype)}")
        if not value.isfinite().all():
            fix = "Get the file again."
            raise ArtifactError(f"{name} of {file}", expected="finite numbers", found="others", fix=fix)
        state[own] = value.reshape(wanted[own].shape).contiguous()
    if left := wanted.keys() - state.keys():
        raise _other(file, f"nothing for {min(left)}")
    model.load_state_dict(state, assign=True)
    with replacing_folder(folder) as staging:
        model.save_pretrained(staging)
        report = ImportReport(dtype_name(kind), types={dtype_name(kind): len(state)})
        report.tokenizer = _write_tokenizer(file, staging, PreTrainedTokenizerFast)
    size = sum(value.nbytes for value in state.values())
    report.bytes_in, report.bytes_out, report.seconds = size, size, time.perf_counter() - start
    return report


def _other(file: Path, found: str) -> UnsupportedModelError:
    fix = "Other versions: convert them with the tools of their authors for transformers."
    return UnsupportedModelError(str(file), expected="a checkpoint of RWKV-7 (x070)", found=found, fix=fix)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        found = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    except Exception as error:  # of pickle, zip files or the system
        reason = str(error) if isinstance(error, OSError) else "damage, or other objects"
        fix = "Get the file again. Code in it is never run."
        raise ArtifactError(str(file), expected="a .pth of tensors", found=reason, fix=fix) from error
    if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise _other(file, "no dict of tensors")
    return found


def _write_tokenizer(file: Path, folder: Path, made_by: Any) -> str:
    """Returns why there is none; empty: it was written."""
    package = find_spec("rwkv")
    places = [file.parent, *map(Path, package.submodule_search_locations or () if package else ())]
    path = next((path for place in places for path in sorted(place.glob("rwkv_vocab*.txt"))), None)
    if path is None:
        return "there is no rwkv_vocab*.txt beside the file, and no package rwkv (pip install rwkv)"
    words = [b"<s>"]
    try:
        for line in filter(None, read_bytes(path).decode().split("\n")):
            number, _, word = line.rpartition(" ")[0].partition(" ")
            said = ast.literal_eval(word)
            words.append(said.encode() if isinstance(said, str) else said)
            if int(number) != len(words) - 1:
                raise ValueError(f"{number} is not the next number")
        made = longest_matches(words, [3] + [1] * (len(words) - 1))
    except (ValueError, SyntaxError) as error:
        return f"{path} is damaged: {error}"
    tokens = {"bos_token": "<s>", "eos_token": "<s>", "chat_template": RWKV_CHAT}
    made_by(tokenizer_object=made, **tokens).save_pretrained(folder)
    return ""
