"""Tiny models of architectures that GGUF files have, written as llama.cpp's converter would, in any type."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from torch_pi2.checkpoint.gguf.families import FAMILIES, llama3_divisors
from torch_pi2.checkpoint.gguf.source import gguf_name, stack_name
from torch_pi2.layers import smallthinker
from torch_pi2.store.source import expert_matrix

#: Columns are a multiple of 256, which k-quants need.
HIDDEN, INNER, VOCABULARY = 256, 512, 320
_COMMON = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1}
#: As far as llama.cpp has no choice: the width of laurel, and of inputs to layers; sparse layers; no shared keys.
_GEMMA3N = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 0,
    "sliding_window": 32,
    "vocab_size_per_layer_input": VOCABULARY,
    "activation_sparsity_pattern": [0.95] * 5,
}
_NEMOTRON_H = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 512,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "decoder_sparse_step": 1}
#: The layout is llama.cpp's own.
_SMALLTHINKER = {"moe_num_primary_experts": 4, "moe_num_active_primary_experts": 2, "moe_ffn_hidden_size": 256}
_LAYOUT = {"sliding_window_layout": [0, 1, 1, 1, 0], "rope_layout": [0, 1, 1, 1, 0], "num_hidden_layers": 5}
#: Name -> model type and what its configuration says beside the common sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    "llama3": (
        "llama",
        {
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}),
    "gemma": ("gemma", {"hidden_activation": "gelu_pytorch_tanh"}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 64, "sliding_window": 32}),
    "gemma3": ("gemma3_text", {"query_pre_attn_scalar": 64, "sliding_window": 32}),
    "phi3": ("phi3", {"tie_word_embeddings": False}),
    "olmo2": ("olmo2", {}),
    "arcee": ("arcee", {}),
    "jais2": ("jais2", {}),
    "nemotron": ("nemotron", {}),
    "gemma3n": ("gemma3n_text", _GEMMA3N),
    "nemotron_h": ("nemotron_h", {**_NEMOTRON_H, "layers_block_type": ["linear_attention", "full_attention", "mlp"]}),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **_NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention"],
            "routed_scaling_factor": 2.5,
        },
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "ministral3": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 50000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.5,
            }
        },
    ),
    "bitnet": ("bitnet", {"tie_word_embeddings": True}),
    "bitnet_silu": ("bitnet", {"tie_word_embeddings": True, "hidden_act": "silu"}),
    "olmo": ("olmo", {"clip_qkv": 0.5}),
    "olmo3": ("olmo3", {"sliding_window": 32, "num_hidden_layers": 4}),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
    "granite": ("granite", _GRANITE),
    "granitemoe": ("granitemoe", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2": ("cohere2", {"sliding_window": 32, "num_hidden_layers": 4, "logit_scale": 0.25}),
    "exaone": ("exaone", {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "ernie4_5": ("ernie4_5", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "seed_oss": ("seed_oss", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", {"use_qkv_bias": True}),
    "stablelm_parallel": ("stablelm", {"use_parallel_residual": True}),
    "phi": ("phi", {}),
    "glm4": ("glm4", {}),
    "glm": ("glm", {}),
    "hunyuan": ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "smallthinker": (
        smallthinker.SmallThinkerConfig.model_type,
        {**_SMALLTHINKER, **_LAYOUT, "sliding_window_size": 4096, "tie_word_embeddings": False},
    ),
    "smallthinker_softmax": ("smallthinker", {**_SMALLTHINKER, "moe_primary_router_apply_softmax": True}),
    "qwen2_moe": ("qwen2_moe", {**_EXPERTS, "shared_expert_intermediate_size": 512, "norm_topk_prob": False}),
    "qwen3_moe": ("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
}


def tiny(name: str, seed: int = 0, **others: Any) -> Any:
    """A model of random weights that are large enough for its logits to differ; ``others``: of its configuration."""
    kind, more = MODELS[name]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**_COMMON, **more, **others})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            else:
                parameter.copy_(torch.randn_like(parameter) * 0.1 + (0 if "bias" in parameter_name else 1))
    return model


def tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Byte-level pairs as GPT-2 has them, trained on a few words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>", "<|user|>"]
    words = ["the cat sat on the mat", "def read(self, name): return self.name", "Grüße, 你好 🙂"]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(words * 50, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>"
    )
    fast.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
    return fast


def written(folder: Path, file: Path) -> Path:
    """Write the float checkpoint in ``folder``, and its tokenizer, as a GGUF file in float32."""
    config = AutoConfig.from_pretrained(folder)
    kind = "llama" if config.model_type == "mistral" else config.model_type
    family = next(family for family in FAMILIES if family.model_type == kind)
    moe = "moe" in getattr(config, "layers_block_type", ())
    if moe:
        family = next(family for family in FAMILIES if family.arch == "nemotron_h_moe")
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    rope = dict(rope.get("full_attention", rope))
    said = {key: getattr(config, attribute, None) for key, attribute in family.attributes.items()}
    said |= dict.fromkeys(("attention.key_length", "attention.value_length"), config.head_dim)
    said["rope.dimension_count"] = round(config.head_dim * rope.get("partial_rotary_factor", 1))
    writer = gguf.GGUFWriter(file, family.arch)
    if family.model_type == "lfm2":
        said["attention.head_count_kv"] = [2 * (one == "full_attention") for one in config.layer_types]
    if rope["rope_type"] == "yarn":
        said |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        said["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
        said["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        said["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if family.model_type == "nemotron_h":
        kinds = {"full_attention": (config.num_key_value_heads, 0), "linear_attention": (0, 0)}
        width = config.moe_intermediate_size if moe else config.intermediate_size
        counts = [kinds.get(one, (0, width)) for one in config.layers_block_type]
        said["attention.head_count_kv"], said["feed_forward_length"] = ([*one] for one in zip(*counts, strict=True))
        said["attention.layer_norm_epsilon"] = config.layer_norm_epsilon
        said["ssm.inner_size"] = config.mamba_head_dim * config.mamba_num_heads
        said = {key: value for key, value in said.items() if moe or not key.startswith("expert")}
    if family.arch == "smallthinker":
        said["expert_gating_func"] = 2 - config.moe_primary_router_apply_softmax
    if family.arch == "gemma3n":
        shares = torch.tensor(config.activation_sparsity_pattern)
        said["activation_sparsity_scale"] = torch.special.ndtri(shares).tolist()
    for key, value in (said | {"rope.freq_base": float(rope["rope_theta"])}).items():
        if value is not None:
            kinds = {float: writer.add_float32, str: writer.add_string, bool: writer.add_bool, list: writer.add_array}
            add = kinds.get(type(value), writer.add_uint32)
            add(f"{family.arch}.{key}", value)
    _add_tokenizer(writer, folder, config.vocab_size)
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(config.head_dim // 2, rope["rope_theta"], rope).numpy())
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == family.arch)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    found: dict[str, list[torch.Tensor]] = {}
    tensors = load_file(folder / "model.safetensors")
    for name in sorted(tensors, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)]):
        if (expert := expert_matrix(name)) is not None:
            found.setdefault(stack_name(expert[0], expert[2]), []).append(tensors[name])
            continue
        base, _, suffix = name.rpartition(".")
        if "put_linear" in base:  # stacks of experts
            parts = tensors[name].chunk(2, 1) if "input" in base else [tensors[name]]
            for role, part in zip(("gate", "up") if "input" in base else ("down",), parts, strict=True):
                found[stack_name(int(name.split(".")[2]), role)] = list(part)
            continue
        module, _, number = base.rpartition(".")
        if number.isdigit() and (known := names.get_name(module)):
            found.setdefault(f"{known}.{suffix}", []).append(tensors[name])
            continue
        value, known = tensors[name], gguf_name(names, family, name) or ""
        if known.endswith((".ssm_a", ".ssm_d")):
            value = (-value.exp() if known.endswith("a") else value)[:, None]
        if "ssm_norm" in known:
            value = value.view(config.n_groups, -1)
        part = known.split(".")[-2:][0].removeprefix("attn_")
        if family.permuted and part in heads:  # halves of heads are interleaved
            value = value.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        if known.endswith("norm.weight"):
            value = value + family.norm_offset
        value = value[:, 0] if value.dim() == 3 else value
        if known != "output.weight" or not config.tie_word_embeddings:
            found[known] = [value]
    if family.model_type == "olmo":
        writer.add_layer_norm_eps(1e-5)
    for known, values in found.items():
        writer.add_tensor(known, (torch.stack(values) if len(values) > 1 else values[0]).contiguous().numpy())
    _write(writer)
    return file


def _add_tokenizer(writer: Any, folder: Path, vocabulary: int) -> None:
    """The tokenizer that :func:`tokenizer` has made, if it is there."""
    if not (folder / "tokenizer.json").is_file():
        writer.add_tokenizer_model("none")
        return
    said, fast = json.loads((folder / "tokenizer.json").read_text()), PreTrainedTokenizerFast.from_pretrained(folder)
    by_id = {index: token for token, index in fast.get_vocab().items()}
    special = {one["id"] for one in said["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(vocabulary)])
    writer.add_token_types([3 if i in special else 1 if i in by_id else 5 for i in range(vocabulary)])
    writer.add_token_merges([one if isinstance(one, str) else " ".join(one) for one in said["model"]["merges"]])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(getattr(fast, f"{name}_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(fast.chat_template)


def retyped(
    source: Path, target: Path, kind: str, seed: int = 0, others: Mapping[str, str] | None = None, **how: Any
) -> dict[str, np.ndarray[Any, Any]]:
    """Write ``source`` (float32) again with its matrices in another type; name -> the numbers that they stand for.

    ``others``: part of a name -> the type of such matrices instead. ``how``: of the writer, such as
    ``split_max_tensors``. Types that the package cannot write get random bytes, with scales that make their numbers
    about as large.
    """
    reader = gguf.GGUFReader(source)
    writer = _writer_of(reader, target, **how)
    generator = np.random.default_rng(seed)
    values: dict[str, np.ndarray[Any, Any]] = {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        data = tensor.data.reshape(shape)
        if len(shape) == 1 or "ffn_gate_inp" in tensor.name or shape[-1] % 32:
            writer.add_tensor(tensor.name, data)
            values[tensor.name] = data
            continue
        own = next((other for part, other in (others or {}).items() if part in tensor.name), kind)
        as_type = gguf.GGMLQuantizationType[own]
        made = _typed(data, as_type, generator)
        writer.add_tensor(tensor.name, made, raw_dtype=as_type)
        values[tensor.name] = gguf.quants.dequantize(made, as_type).reshape(shape)
    _write(writer)
    return values


def _writer_of(reader: Any, target: Path, keys: Mapping[str, Any] | None = None, **how: Any) -> Any:
    """A writer of another file with the metadata of ``reader``'s, but for ``keys`` (None: without it)."""
    keys = dict(keys or {})
    arch = keys.pop("general.architecture", reader.fields["general.architecture"].contents())
    writer = gguf.GGUFWriter(target, arch, **how)
    for key, found in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture" and key not in keys:
            sub = found.types[1] if len(found.types) > 1 else None
            writer.add_key_value(key, found.contents(), found.types[0], sub_type=sub)
    kinds = gguf.GGUFValueType
    for key, value in keys.items():
        if value is not None:
            of = {str: kinds.STRING, bool: kinds.BOOL, int: kinds.UINT32, float: kinds.FLOAT32, list: kinds.ARRAY}
            kind = of[type(value)]
            sub = (
                {str: kinds.STRING, int: kinds.UINT32, bool: kinds.BOOL}[type(value[0])]
                if kind is kinds.ARRAY
                else None
            )
            writer.add_key_value(key, value, kind, sub_type=sub)
    return writer


def rewritten(
    file: Path,
    target: Path,
    *,
    keys: Mapping[str, Any] | None = None,
    without: str = "",
    more: str = "",
    flat: str = "",
) -> Path:
    """``file`` with other metadata, without one tensor, or with one more; ``flat``: end of the names of tensors that
    have one dimension then."""
    reader = gguf.GGUFReader(file)
    writer = _writer_of(reader, target, keys)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, tensor.data.ravel() if flat and tensor.name.endswith(flat) else tensor.data)
    if more:
        writer.add_tensor(more, reader.tensors[0].data)
    _write(writer)
    return target


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def powerinfer(
    source: Path,
    target: Path,
    kind: str,
    predictors: Mapping[str, torch.Tensor],
) -> dict[str, np.ndarray[Any, Any]]:
    """``source`` (float32, llama) as PowerInfer's files are, in the type ``kind``; name -> numbers, down as usual.

    Down lies neuron by neuron, there are ``predictors`` (``blk.0.fc1.weight``), and the file begins in another way.
    """
    reader, between = gguf.GGUFReader(source), target.with_suffix(".between")
    writer = _writer_of(reader, between)
    writer.add_key_value("powerinfer.sparse_threshold", 0.0, gguf.GGUFValueType.FLOAT32)
    for tensor in reader.tensors:
        down = tensor.name.endswith("ffn_down.weight")
        data = tensor.data.T.copy() if down else tensor.data
        writer.add_tensor(tensor.name.replace("ffn_down.", "ffn_down_t."), data)
    for name, matrix in predictors.items():
        writer.add_tensor(name, matrix.numpy())
    _write(writer)
    values = retyped(between, target, kind)
    with open(target, "rb+") as made:
        made.write(b"PWRI")
    return {name.replace("_t.", "."): v.T.copy() if "_t." in name else v for name, v in values.items()}


#: Type -> where in a block its float16 scales are, and how much larger than a step a typical number is.
_SCALES = {
    "Q2_K": ((80, 82), 20.0),
    "Q3_K": ((108,), 60.0),
    "Q4_K": ((0, 2), 200.0),
    "Q5_K": ((0, 2), 400.0),
    "Q6_K": ((208,), 1200.0),
    "IQ4_XS": ((0,), 1200.0),
    "IQ4_NL": ((0,), 60.0),
}


def _typed(data: np.ndarray[Any, Any], of: Any, generator: Any) -> np.ndarray[Any, Any]:
    try:
        return np.ascontiguousarray(gguf.quants.quantize(np.ascontiguousarray(data), of))
    except NotImplementedError:
        block, size = gguf.GGML_QUANT_SIZES[of]
        rows = int(np.prod(data.shape[:-1]))
        blocks = generator.integers(0, 256, (rows, data.shape[-1] // block, size), dtype=np.uint8)
        places, larger = _SCALES[of.name]
        for at in places:
            scale = (data.shape[-1] ** -0.5 / larger * generator.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
            blocks[..., at : at + 2] = scale[..., None].view(np.uint8).reshape(*blocks.shape[:2], 2)
        return blocks.reshape(*data.shape[:-1], -1)


def with_values(model: Any, file: Path, values: dict[str, np.ndarray[Any, Any]]) -> Any:
    """``model`` with the numbers of a file's matrices instead of its own, put there by names that ``gguf`` has.

    Rows of q and k are put in order here, too.
    """
    arch = gguf.GGUFReader(file).fields["general.architecture"].contents()
    of = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(of, model.config.num_hidden_layers)
    permuted = next(family.permuted for family in FAMILIES if family.arch == arch)
    heads = {"q": model.config.num_attention_heads, "k": model.config.num_key_value_heads}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            base, _, suffix = name.rpartition(".")
            known = names.get_name(base)
            if ".experts." in name:
                block = name.split(".")[2]
                parts = ["gate", "up"] if "gate_up" in name else ["down"]
                stacks = [torch.from_numpy(values[f"blk.{block}.ffn_{part}_exps.weight"]) for part in parts]
                parameter.copy_(torch.cat(stacks, 1))
                continue
            if parameter.dim() == 1 or known is None:
                continue
            value = torch.from_numpy(values[f"{known}.{suffix}"])
            kind = known.rpartition("attn_")[2]
            if permuted and kind in heads:
                value = value.unflatten(0, (heads[kind], -1, 2)).transpose(1, 2).flatten(0, 2)
            parameter.copy_(value)
    return model
