"""A tiny RWKV-7 of random weights: as its authors' ``.pth``, and as a GGUF file of llama.cpp's converter.

``python tests/helpers/rwkv7s.py MODEL`` writes both to ``MODEL.pth`` and ``MODEL.gguf``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

HIDDEN, INNER, LAYERS, VOCABULARY = 128, 256, 3, 288
RANKS = {"w": 16, "a": 24, "v": 8, "g": 32}
#: Tokens beside single bytes; the rest of the vocabulary is unused.
WORDS = (b"the", b" the", b"then", b"\n\n", "你".encode(), b" o", b"on", b"'s")


def weights() -> dict[str, torch.Tensor]:
    """In the authors' names and layouts. RandomState draws the same numbers in every version of NumPy."""
    random = np.random.RandomState(7)

    def drawn(*shape: int, of: int = 0, around: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(random.randn(*shape).astype(np.float32)) * (of**-0.5 if of else 0.3) + around

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": drawn(HIDDEN, around=1), f"{name}.bias": drawn(HIDDEN)}

    made = {"emb.weight": drawn(VOCABULARY, HIDDEN, of=1), **norm("blocks.0.ln0")}
    for block in range(LAYERS):
        name = f"blocks.{block}"
        made |= norm(f"{name}.ln1") | norm(f"{name}.ln2") | norm(f"{name}.att.ln_x")
        made |= {f"{name}.att.x_{part}": drawn(1, 1, HIDDEN, around=0.5) for part in "rwkvag"}
        for part, rank in RANKS.items():
            made[f"{name}.att.{part}1"] = drawn(HIDDEN, rank, of=HIDDEN)
            made[f"{name}.att.{part}2"] = drawn(rank, HIDDEN, of=rank)
            if part != "g":
                made[f"{name}.att.{part}0"] = drawn(1, 1, HIDDEN, of=1)
        made |= {f"{name}.att.k_{part}": drawn(1, 1, HIDDEN, around=0.7) for part in "ka"}
        made[f"{name}.att.r_k"] = drawn(HIDDEN // 64, 64)
        for part in ("receptance", "key", "value", "output"):
            made[f"{name}.att.{part}.weight"] = drawn(HIDDEN, HIDDEN, of=HIDDEN)
        made[f"{name}.ffn.x_k"] = drawn(1, 1, HIDDEN, around=0.5)
        made[f"{name}.ffn.key.weight"] = drawn(INNER, HIDDEN, of=HIDDEN)
        made[f"{name}.ffn.value.weight"] = drawn(HIDDEN, INNER, of=INNER)
    return made | norm("ln_out") | {"head.weight": drawn(VOCABULARY, HIDDEN, of=HIDDEN)}


def model() -> Any:
    """The same sizes with other numbers, whose greedy answers are not close to others."""
    from torch_pi2.layers.rwkv7 import RWKV7Config, RWKV7ForCausalLM

    ranks = dict(zip(("decay_low_rank_dim", "a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), RANKS.values()))
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    made, random = RWKV7ForCausalLM(RWKV7Config(**sizes, **ranks)), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.dim() == 2 else 0.5
            parameter.add_(torch.randn(parameter.shape, generator=random) * scale)
    return made.eval()


def vocabulary() -> list[tuple[bytes, int]]:
    """Tokens and their kinds: the end, all bytes, and some words."""
    words = [(b"<s>", 3), *((bytes([i]), 1) for i in range(256)), *((word, 1) for word in WORDS)]
    return words + [(f"[PAD{i}]".encode(), 5) for i in range(len(words), VOCABULARY)]


def written(file: Path, **keys: Any) -> Path:
    """The GGUF file; ``keys``: of ``rwkv7.*`` that have another value (None: without it)."""
    writer, made = gguf.GGUFWriter(file, "rwkv7"), weights()
    said: dict[str, Any] = {"context_length": 1 << 20, "embedding_length": HIDDEN, "block_count": LAYERS}
    said |= {"attention.layer_norm_epsilon": 1e-5, "wkv.head_size": 64, "feed_forward_length": INNER}
    ranks = {"decay": "w", "iclr": "a", "value_residual_mix": "v", "gate": "g"}
    said |= {f"attention.{name}_lora_rank": RANKS[part] for name, part in ranks.items()} | {"attention.head_count": 0}
    for key, value in (said | keys).items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"rwkv7.{key}", value)
    words, kinds = zip(*vocabulary(), strict=True)
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([repr(word)[2:-1].encode() for word in words])
    writer.add_token_types(kinds)
    writer.add_chat_template("rwkv-world")
    for name, token in (("bos", 0), ("eos", 0), ("eot", 257 + WORDS.index(b"\n\n"))):
        getattr(writer, f"add_{name}_token_id")(token)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.RWKV7, LAYERS)
    whole = {"emb": "token_embd", "head": "output", "ln_out": "output_norm", "blocks.0.ln0": "token_embd_norm"}
    for name, value in made.items():
        base, _, suffix = name.rpartition(".") if name.endswith(("weight", "bias")) else (name, "", "weight")
        other = base.replace("blocks.", "model.layers.").replace(".att.", ".attention.")
        known = whole.get(base) or names.get_name(other.replace(".ffn.", ".feed_forward."))
        first = name.startswith("blocks.0.att.")
        if known is None or (first and re.search(r"\.v\d$", name)):
            continue  # a mix, or not used
        value = value.T if re.search(r"\.att\.[wavg][12]$", name) else value.squeeze()
        value = value.flatten() if name.endswith("r_k") else value
        writer.add_tensor(f"{known}.{suffix}", value.contiguous().numpy())
        if first and "time_mix_a" in known:
            writer.add_tensor(f"{known}.{suffix}".replace("mix_a", "mix_v"), value.contiguous().numpy())
    for block in range(LAYERS):
        mixes = torch.stack([made[f"blocks.{block}.att.x_{part}"] for part in "rwkvag"])
        writer.add_tensor(f"blk.{block}.time_mix_lerp_fused.weight", mixes.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


if __name__ == "__main__":
    torch.save(weights(), f"{sys.argv[1]}.pth")
    written(Path(f"{sys.argv[1]}.gguf"))
