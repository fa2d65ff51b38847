"""A GGUF file of a model's shape with random Q4_0 blocks, for peers that read it. Speed only: it says nothing else.

Block layout and tensor names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the ``gguf`` package, which
writes the header. A Q4_0 block is a float16 scale and 32 4-bit values: 18 bytes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.words import END, END_ID, MERGES
from torch_pi2.base.package import needed
from torch_pi2.checkpoint.gguf.families import FAMILIES
from torch_pi2.checkpoint.gguf.source import gguf_name, stack_name
from torch_pi2.errors import ArtifactError, ConfigError, UnsupportedModelError

#: Hugging Face model types and llama.cpp's name for the same computation.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3_moe": "qwen3moe"}
_ARCHITECTURES |= {"arcee": "arcee", "jais2": "jais2", "nemotron_h": "nemotron_h", "bitnet": "bitnet", "rwkv7": "rwkv7"}
_BLOCK, _BLOCK_BYTES = 32, 18
#: ``general.name`` of the files written here.
_NAME = "synthetic"
#: Rows made at a time: bounds memory.
_CHUNK_BYTES = 1 << 26


def _architecture(config: Any) -> str:
    return _ARCHITECTURES[config.model_type] + "_moe" * ("moe" in getattr(config, "layers_block_type", ()))


def _of_class(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """As :func:`_tensors`, of the tensors of transformers' class, by the names that imports know."""
    import gguf
    from transformers import AutoModelForCausalLM

    arch, layers = _architecture(config), config.num_hidden_layers
    family = next(family for family in FAMILIES if family.arch == arch)
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    known = gguf.get_tensor_name_map(key, layers)
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(config).state_dict()
    for name, tensor in tensors.items():
        if mix := re.fullmatch(r"model\.layers\.(\d+)\.attn\.x_(\w)", name):
            if mix[2] == "r":  # of RWKV-7, in one with the five others
                yield f"blk.{mix[1]}.time_mix_lerp_fused.weight", (6, 1, 1, config.hidden_size)
            continue
        shape, stack = tuple(tensor.shape), re.fullmatch(r".*\.(\d+)\..*\.experts\.(up|down)_proj", name)
        found = stack_name(int(stack[1]), stack[2]) if stack else gguf_name(known, family, name)
        if name == "lm_head.weight" and (config.tie_word_embeddings or found is None):
            continue  # llama.cpp's BitNet has no head of its own
        assert found is not None, name
        if found.endswith((".ssm_a", ".ssm_d")):
            shape = (*shape, 1)
        elif "ssm_norm" in found:
            shape = (config.n_groups, shape[0] // config.n_groups)
        elif found.endswith("time_mix_r_k.weight"):
            shape = (config.hidden_size,)
        elif found.startswith("blk.0.time_mix_a"):  # llama.cpp wants these in their place
            yield found.replace("mix_a", "mix_v"), shape
        yield found, (shape[0], shape[2]) if "ssm_conv1d.weight" in found else shape


def _tensors(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes (rows first) in file order. One-dimensional ones and routers are float32, the rest Q4_0."""
    if config.model_type in ("arcee", "jais2", "nemotron_h", "bitnet", "rwkv7"):
        yield from _of_class(config)
        return
    hidden, inner, vocab = config.hidden_size, config.intermediate_size, config.vocab_size
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or hidden // heads
    kv = config.num_key_value_heads * width
    experts = _experts(config)
    if config.model_type == "qwen3_moe":
        inner = config.moe_intermediate_size
    yield "token_embd.weight", (vocab, hidden)
    for i in range(config.num_hidden_layers):
        block = f"blk.{i}"
        yield f"{block}.attn_norm.weight", (hidden,)
        for name, rows in (("q", heads * width), ("k", kv), ("v", kv)):
            yield f"{block}.attn_{name}.weight", (rows, hidden)
            if config.model_type == "qwen2":
                yield f"{block}.attn_{name}.bias", (rows,)
            if config.model_type == "qwen3_moe" and name != "v":
                yield f"{block}.attn_{name}_norm.weight", (width,)
        yield f"{block}.attn_output.weight", (hidden, heads * width)
        yield f"{block}.ffn_norm.weight", (hidden,)
        if experts:
            yield f"{block}.ffn_gate_inp.weight", (experts, hidden)
        suffix, first = ("_exps", (experts,)) if experts else ("", ())
        yield f"{block}.ffn_gate{suffix}.weight", (*first, inner, hidden)
        yield f"{block}.ffn_up{suffix}.weight", (*first, inner, hidden)
        yield f"{block}.ffn_down{suffix}.weight", (*first, hidden, inner)
    yield "output_norm.weight", (hidden,)
    if not config.tie_word_embeddings:
        yield "output.weight", (vocab, hidden)


def _experts(config: Any) -> int:
    if "moe" not in getattr(config, "layers_block_type", ("moe",)):
        return 0
    return getattr(config, "num_local_experts", getattr(config, "num_experts", 0))


def _is_quantised(name: str, shape: tuple[int, ...]) -> bool:
    return (
        len(shape) > 1
        and "ffn_gate_inp" not in name
        and ("ssm_" not in name or name.endswith(("in.weight", "out.weight")))
        and not re.search(r"time_mix_(lerp|[wavg]\d)", name)  # as llama.cpp's own tool
    )


def write_gguf(path: str | Path, config: Any, *, seed: int = 0, tokens: Sequence[str] = ()) -> Path:
    """Write the file, streaming and atomically; one of the same sizes that is there is kept, others are never replaced.

    Args:
        config: a Hugging Face configuration of type llama, mistral, mixtral, qwen2, qwen3_moe, arcee, jais2,
            nemotron_h, bitnet or rwkv7.
        tokens: of :func:`benchmarks.words.vocabulary`, for who reads and writes text: the end of a text, whose row in
            the head is zero, never is the likeliest. Empty: the file has no tokenizer.

    Returns:
        ``path``. Every matrix is Q4_0, the head too (llama.cpp's own tool gives it 6 bits): fewer bytes to read.

    Raises:
        LibraryMissingError: no package ``gguf``. UnsupportedModelError: another model type.
        ConfigError: sizes that are no multiple of 32. ArtifactError: the file cannot be written, or another one
            is there.
    """
    path = Path(path)
    with needed("gguf", "bench"):
        import gguf
    if config.model_type not in _ARCHITECTURES:
        fix = "Bench without peers that read it."
        expected, found = ", ".join(_ARCHITECTURES), config.model_type
        raise UnsupportedModelError(f"model type {config.model_type}", expected=expected, found=found, fix=fix)
    bad = [f"{n} {s}" for n, s in _tensors(config) if _is_quantised(n, s) and s[-1] % _BLOCK]
    if bad:
        raise ConfigError("shape for Q4_0", expected="rows of a multiple of 32", found=bad[0], fix="Change the shape.")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _write(gguf, temporary, config, tokens, np.random.Generator(np.random.SFC64(seed)), unless=path):
            os.replace(temporary, path)
    except OSError as error:
        expected, fix = "a folder that can be written, with room", "Choose another folder with --folder."
        found = error.strerror or str(error)
        raise ArtifactError(f"writing {path}", expected=expected, found=found, fix=fix) from error
    finally:
        temporary.unlink(missing_ok=True)
    return path


def _write(
    gguf: Any, path: Path, config: Any, vocabulary: Sequence[str], generator: np.random.Generator, unless: Path
) -> bool:
    """Write ``path``, or only its header if ``unless`` is such a file already; whether it was written."""
    tensors = list(_tensors(config))
    writer = gguf.GGUFWriter(path, _architecture(config))
    try:
        _write_header(gguf, writer, config, tensors, vocabulary)
        file = writer.fout[0]
        file.flush()
        if unless.exists():
            header = path.read_bytes()  # all settings; names, shapes and types of tensors
            with unless.open("rb") as there:
                if there.read(len(header)) == header:
                    return False
            fix = "Move it, or choose another folder with --folder."
            expected = "random weights of the same sizes, or no file"
            raise ArtifactError(str(unless), expected=expected, found="another file", fix=fix)
        head = "token_embd.weight" if config.tie_word_embeddings else "output.weight"
        for name, shape in tensors:
            writer.write_padding(file, file.tell())
            for i, part in enumerate(_data(name, shape, generator)):
                if vocabulary and name == head and i == 0:
                    part.reshape(-1)[: _stored(shape)[1]] = 0  # END_ID is the first row
                part.tofile(file)
            writer.write_padding(file, file.tell())
    finally:
        writer.close()
    return True


def _write_header(
    gguf: Any, writer: Any, config: Any, tensors: list[tuple[str, tuple[int, ...]]], vocabulary: Sequence[str]
) -> None:
    writer.add_name(_NAME)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    (_write_rwkv7 if config.model_type == "rwkv7" else _write_attention)(writer, config)
    writer.add_vocab_size(config.vocab_size)
    _write_tokenizer(gguf, writer, vocabulary)
    q4 = gguf.GGMLQuantizationType.Q4_0
    for name, shape in tensors:
        if _is_quantised(name, shape):
            stored = _stored(shape)
            writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), q4)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _write_rwkv7(writer: Any, config: Any) -> None:
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_wkv_head_size(config.head_dim)
    writer.add_head_count(0)
    writer.add_decay_lora_rank(config.decay_low_rank_dim)
    writer.add_iclr_lora_rank(config.a_low_rank_dim)
    writer.add_value_residual_mix_lora_rank(config.v_low_rank_dim)
    writer.add_gate_lora_rank(config.gate_low_rank_dim)


def _write_attention(writer: Any, config: Any) -> None:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_head_count(heads)
    if config.model_type == "nemotron_h":
        _write_kinds(writer, config)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(config.num_key_value_heads)
    for add in (writer.add_layer_norm_rms_eps, writer.add_layer_norm_eps):
        add(getattr(config, "rms_norm_eps", 1e-5))
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(rope.get("rope_theta", 10000.0)))
    if _experts(config):
        writer.add_expert_count(_experts(config))
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "qwen3_moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _write_kinds(writer: Any, config: Any) -> None:
    """Which layers of Nemotron-H have attention, states or neurons, and their sizes."""
    moe = "moe" in config.layers_block_type
    width = config.moe_intermediate_size if moe else config.intermediate_size
    writer.add_feed_forward_length([width * (kind in ("mlp", "moe")) for kind in config.layers_block_type])
    kv = config.num_key_value_heads
    writer.add_head_count_kv([kv * (kind == "full_attention") for kind in config.layers_block_type])
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_state_size(config.ssm_state_size)
    writer.add_ssm_group_count(config.n_groups)
    writer.add_ssm_time_step_rank(config.mamba_num_heads)
    writer.add_ssm_inner_size(config.mamba_num_heads * config.mamba_head_dim)
    if moe:
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)


def _write_tokenizer(gguf: Any, writer: Any, vocabulary: Sequence[str]) -> None:
    writer.add_tokenizer_model("gpt2" if vocabulary else "none")
    if not vocabulary:
        return
    kinds = [gguf.TokenType.CONTROL if token == END else gguf.TokenType.NORMAL for token in vocabulary]
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary))
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(END_ID)
    writer.add_add_bos_token(False)


def _stored(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape in bytes of a Q4_0 tensor."""
    return (*shape[:-1], shape[-1] // _BLOCK * _BLOCK_BYTES)


def _data(name: str, shape: tuple[int, ...], generator: np.random.Generator) -> Iterator[np.ndarray]:
    if not _is_quantised(name, shape):
        ones = {".ssm_a": -1.0}.get(name[-6:], 1.0) if name.endswith(("norm.weight", ".ssm_a")) else None
        yield np.full(shape, ones, np.float32) if ones else generator.normal(0, 0.02, shape).astype(np.float32)
        return
    blocks = int(np.prod(shape)) // _BLOCK
    scale = np.array([shape[-1] ** -0.5 / 4.6], np.float16).view(np.uint8)  # values of -8..7 have a deviation of 4.6
    for start in range(0, blocks, _CHUNK_BYTES // _BLOCK_BYTES):
        count = min(blocks - start, _CHUNK_BYTES // _BLOCK_BYTES)
        words = generator.integers(0, 1 << 63, -(-count * _BLOCK_BYTES // 8), dtype=np.int64)
        part = words.view(np.uint8)[: count * _BLOCK_BYTES].reshape(count, _BLOCK_BYTES)
        part[:, :2] = scale
        # Else the mean of -8..7 would be common to all rows, and every token would end in the same experts.
        part[:, 1] ^= generator.integers(0, 2, count, dtype=np.uint8) << 7
        yield part
