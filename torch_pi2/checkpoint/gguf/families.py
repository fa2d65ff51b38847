"""GGUF architectures, the transformers model types that they correspond to, and configurations from their metadata.

Keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; missing ones have llama.cpp's defaults.
Unknown keys are refused, since they may change the computation.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from torch_pi2.base.fields import shown
from torch_pi2.errors import ArtifactError, UnsupportedModelError
from torch_pi2.store.gguf import GgufFile

_LAYER_NORM, _RMS_NORM = "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon"
#: Key, without the architecture -> attribute of the configuration.
_COMMON = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size"}
_COMMON |= {"block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size"}
_COMMON |= {"attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads"}
_COMMON |= {"attention.key_length": "head_dim", _RMS_NORM: "rms_norm_eps", "vocab_size": "vocab_size"}
#: Keys that do not matter here, or are read for some models of a family only.
_ELSEWHERE = {"rope.scaling.original_context_length", "rope.scaling.finetuned"}
_ELSEWHERE |= {"attention.causal", "expert_count", "expert_used_count"}
#: Keys that nothing here reads, with the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "attention.output_scale"), (0, 1)),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "router_logit_softcapping"), (0,)),
    **dict.fromkeys(("attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "pooling_type"), (0,)),
    **dict.fromkeys(("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor"), (1,)),
    **dict.fromkeys(("rope.scaling.yarn_log_multiplier", "rope.dimension_sections", "n_deepstack_layers"), (0,)),
    "rope.scaling.yarn_ext_factor": (-1,),
    "rope.scaling.yarn_beta_fast": (32,),
    "rope.scaling.yarn_beta_slow": (1,),
    **dict.fromkeys(("rope.scaling.alpha", "expert_weights_scale", "expert_group_scale"), (0, 1)),
    **dict.fromkeys(("expert_gating_func", "interleave_moe_layer_step", "moe_every_n_layers"), (0, 1)),
    **dict.fromkeys(("leading_dense_block_count", "nextn_predict_layers", "expert_shared_count"), (0,)),
    **dict.fromkeys(("use_parallel_residual", "attention.shared_kv_layers", "attention.sliding_window"), (0,)),
    "tensor_data_layout": ("Meta AI original pth",),
}
#: Token in transformers' configuration -> in files.
_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding"}
#: Defaults of a SentencePiece vocabulary.
_TOKENS_OF_SPM = {"bos": 1, "eos": 2}
#: Tokens after which llama.cpp always stops; files often name only one of several.
_ENDS = frozenset(
    text.encode()
    for text in (
        *("</s>", "<eos>", "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>"),
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    )
)
#: Keys that a file must have (``feed_forward_length`` not with experts), beside the epsilon of its norms.
_REQUIRED = {"context_length", "embedding_length", "block_count", "attention.head_count", "feed_forward_length"}
#: Begins of keys that files of families with such keys must have.
_ATTENTION = ("attention.shared_kv_layers", "attention.layer_norm", "attention.scale")
_NEEDED = ("ssm.", "shortconv.", "altup.", "embedding_", "residual_", *_ATTENTION)
#: Keys of positive counts.
_COUNTS = {*_COMMON} - {_RMS_NORM}
#: Suffixes of keys with fractional numbers.
_FRACTIONS = (
    *("rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor", "rope.scale_linear"),
    *("epsilon", "softcapping", "scale", "clamp_kqv", "multiplier"),
)
#: Keys of other than numbers -> values that are known.
_WORDS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "relu2"),
    **dict.fromkeys(("use_parallel_residual", "expert_weights_norm"), (True, False)),
}


@dataclass(frozen=True)
class Family:
    """One architecture.

    Attributes:
        arch: in files. kind: model_type in transformers, unless it is the same. needs: key that its files have (not 0),
            unlike others of ``arch``.
        keys: key -> attribute, besides the common ones. fixed: attribute -> value built into llama.cpp.
        permuted: q and k have their rotary halves interleaved in the file. by_neuron: down has one row per neuron,
            as in PowerInfer's files.
        norm_offset: difference between norm weights in the file and in the model.
        told: attribute -> tensor of the first block whose presence tells it. partial: heads may be rotated in part.
        pattern: of so many layers the last one has full attention. names: part of a module's name here -> one that
            the package gguf knows.
    """

    arch: str
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    kind: str = ""
    needs: str = ""
    permuted: bool = False
    by_neuron: bool = False
    norm_offset: float = 0.0
    told: Mapping[str, str] = field(default_factory=dict)
    partial: bool = False
    pattern: int = 0
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        return self.kind or self.arch

    @property
    def attributes(self) -> dict[str, str]:
        """Key -> attribute, with the epsilon of one kind of norm."""
        return {
            key: of for key, of in {**_COMMON, **self.keys}.items() if key != _RMS_NORM or _LAYER_NORM not in self.keys
        }


#: Key and attribute -> the default.
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
#: Attribute -> tensor of the last block whose rows it counts, and key.
_RANKS = {"intermediate_size": ("channel_mix_key", "feed_forward_length")}
_RANKS |= {"decay_low_rank_dim": ("time_mix_w1", "attention.decay_lora_rank")}
_RANKS |= {"a_low_rank_dim": ("time_mix_a1", "attention.iclr_lora_rank")}
_RANKS |= {"v_low_rank_dim": ("time_mix_v1", "attention.value_residual_mix_lora_rank")}
_RANKS |= {"gate_low_rank_dim": ("time_mix_g1", "attention.gate_lora_rank")}
_TEMPERATURE = "attention.temperature_scale"
#: One line each; of those with the same architecture the first that fits. Of models that see: their text.
FAMILIES = tuple(Family(**one) for one in json.loads(Path(__file__).with_name("families.json").read_text()))
#: Architectures of which transformers has no class.
_NOT_IN_TRANSFORMERS = ("rwkv6", "rwkv6qwen2", "arwkv7")


def _unsupported(file: GgufFile, expected: str, found: str, part: str = "") -> NoReturn:
    fix = "Load the model's original checkpoint with transformers, and optimise that."
    if file.metadata.get("general.architecture") in _NOT_IN_TRANSFORMERS:
        fix = "transformers, which runs models here, has no class for it; llama.cpp runs this file. RWKV-7 runs here."
    raise UnsupportedModelError(f"{part}{file.path}", expected=expected, found=found, fix=fix)


def family_of(file: GgufFile) -> Family:
    """Raises UnsupportedModelError, ArtifactError."""
    arch = file.metadata.get("general.architecture")
    by_neuron = "blk.0.ffn_down_t.weight" in file.tensors
    for family in FAMILIES:
        fits = not family.needs or bool(file.metadata.get(f"{arch}.{family.needs}"))
        if family.arch == arch and fits and family.by_neuron == by_neuron:
            return family
    _unsupported(file, ", ".join(sorted({family.arch for family in FAMILIES})), shown(arch), "architecture of ")


class ArchMetadata:
    """A file's metadata by keys of its architecture. ``unused``: keys that were not read."""

    def __init__(self, file: GgufFile, arch: str) -> None:
        self._file, self.prefix = file, f"{arch}."
        self.unused = {key[len(arch) + 1 :] for key in file.metadata if key.startswith(self.prefix)}

    def number(self, key: str, default: Any = None, *, least: float = 0, most: float = 1 << 31) -> Any:
        """A number, whole but for ``_FRACTIONS``. Raises ArtifactError: invalid, or missing without a ``default``."""
        found = self.get(key)
        if isinstance(found, list) and key in ("feed_forward_length", "attention.head_count_kv"):  # layer by layer
            some = [one for one in found if one != 0]
            found = some[0] if some and some == some[:1] * len(some) else found
        if found is None and default is not None:
            return default
        kinds, whole = ((int, float), "") if key.endswith(_FRACTIONS) else ((int,), "whole ")
        if type(found) not in kinds or not least <= found <= most:
            what, expected = f"{self.prefix}{key} in {self._file.path}", f"a {whole}number from {least:g} to {most:g}"
            fix = "Get the file again, or convert the model with a current llama.cpp."
            raise ArtifactError(what, expected=expected, found=shown("nothing" if found is None else found), fix=fix)
        return found

    def get(self, key: str) -> Any:
        self.unused.discard(key)
        return self._file.metadata.get(self.prefix + key)

    def has(self, key: str) -> bool:
        return self.prefix + key in self._file.metadata


def arch_number(file: GgufFile, family: Family, key: str) -> int:
    """A whole number that the file must have. Raises ArtifactError."""
    return int(ArchMetadata(file, family.arch).number(key, least=1))


def configuration(file: GgufFile) -> dict[str, Any]:
    """Arguments for transformers' configuration of the file's family. Raises UnsupportedModelError, ArtifactError."""
    family, arch = family_of(file), str(file.metadata["general.architecture"])
    meta = ArchMetadata(file, arch)
    if arch in ("rwkv7", "t5"):
        return _rwkv7(file, meta) if arch == "rwkv7" else _t5(file, family, meta)
    config: dict[str, Any] = {"model_type": family.model_type, **family.fixed}
    required = _REQUIRED - ({"feed_forward_length"} if "expert_feed_forward_length" in family.keys else set())
    for key, attribute in family.attributes.items():
        if key in _WORDS and meta.has(key):
            config[attribute] = meta.get(key)
            if config[attribute] not in _WORDS[key]:
                _unsupported(file, f"{key} {' or '.join(map(str, _WORDS[key]))}", shown(config[attribute]))
        elif key in _WORDS:
            config.setdefault(attribute, False)
        elif meta.has(key) or key in required or key.startswith(_NEEDED):
            least = key in _COUNTS or key.startswith("ssm.")
            config[attribute] = meta.number(key, least=least, most=1 << 31 if "epsilon" not in key else 1)
            if key.endswith(("scale", "clamp_kqv")) and not config[attribute]:
                del config[attribute]  # 0: none
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = len(tokens) if isinstance(tokens, list) else file.tensor("token_embd.weight").shape[0]
    config.setdefault("vocab_size", rows)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if family.pattern and family.model_type != "gemma2":
        config.setdefault("sliding_window", None)
    if not config.get("sliding_window", 1):
        if family.model_type == "gemma2":  # every other layer would attend to nothing
            _unsupported(file, "a window of one token or more", f"{arch}.attention.sliding_window 0")
        config["sliding_window"] = None
    width = config.setdefault("head_dim", config["hidden_size"] // max(1, config["num_attention_heads"]))
    rotated = meta.number("rope.dimension_count", width, least=1, most=width)
    if meta.number("attention.value_length", width) != width or (rotated != width and not family.partial):
        _unsupported(file, "heads of one width, all of it rotated", "others")
    _check_sizes(file, config, meta)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["rope_parameters"] = _rope(file, meta, family)
    if family.model_type in ("nemotron_h", "lfm2"):
        _states(file, config, meta)
    if family.partial:
        config["rope_parameters"]["partial_rotary_factor"] = rotated / width
    config |= {name: f"blk.0.{tensor}" in file.tensors for name, tensor in family.told.items()}
    _special(file, family, config, meta)
    config |= _special_tokens(file, config["vocab_size"])
    if meta.get("attention.causal") not in (None, True):
        _unsupported(file, "a model that sees what was before", f"{arch}.attention.causal false")
    for key in ("expert_group_count", "expert_group_used_count"):
        if meta.number(key, 0) > 1:
            _unsupported(file, "experts without groups", f"{key} {meta.number(key)}")
    epsilon = family.attributes.get(_LAYER_NORM, family.attributes.get(_RMS_NORM, ""))
    own = {
        "expert_weights_norm": config.get("norm_topk_prob", True),
        **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), width),
        "embedding_length_out": config["hidden_size"],
        **dict.fromkeys((_LAYER_NORM, _RMS_NORM), config.get(epsilon)),  # converters write both
        "expert_shared_count": int("shared_expert_intermediate_size" in config),
    }
    if not any(".ssm_" in name for name in file.tensors):  # of Granite 4's models without states
        own |= {key: meta.get(key) for key in [*meta.unused] if key.startswith("ssm.")}
        own["expert_shared_feed_forward_length"] = config.get("intermediate_size")
    seen = {"rope.dimension_sections", "n_deepstack_layers"} if "vl" in arch else set()  # of images
    _check_unused(file, meta, own, seen)
    return config


def _check_unused(file: GgufFile, meta: ArchMetadata, own: Mapping[str, Any], seen: Set[str] = frozenset()) -> None:
    """Raises UnsupportedModelError: a key that nothing has read says neither its value in ``own`` nor nothing."""
    for key in sorted(meta.unused - _ELSEWHERE - seen):
        found = meta.get(key)
        values = found if isinstance(found, list) else [found]
        if not all(value in (*_NEUTRAL.get(key, ()), own.get(key)) for value in values):
            said = "" if isinstance(found, list) else f" {shown(found)}"
            _unsupported(file, "metadata that is known, or changes nothing", f"{meta.prefix}{shown(key)}{said}")


def _rwkv7(file: GgufFile, meta: ArchMetadata) -> dict[str, Any]:
    """Sizes are those of tensors, which metadata must not contradict."""
    table, blocks = file.tensor("token_embd.weight"), meta.number("block_count", least=1)
    ranks = {name: file.tensor(f"blk.{blocks - 1}.{of}.weight").rows for name, (of, _) in _RANKS.items()}
    config = {"model_type": "rwkv7", "hidden_size": table.columns, "vocab_size": table.rows, **ranks}
    config |= {"num_hidden_layers": blocks, "head_dim": meta.number("wkv.head_size", least=1), "group_norm_eps": 64e-5}
    config["norm_eps"] = meta.number(_LAYER_NORM, most=1)
    config["max_position_embeddings"] = meta.number("context_length", least=1)
    own = {key: ranks[name] for name, (_, key) in _RANKS.items()} | {"attention.head_count": 0, "token_shift_count": 2}
    _check_unused(file, meta, own | {"embedding_length": table.columns, "vocab_size": table.rows})
    return config | _special_tokens(file, table.rows)


def _t5(file: GgufFile, family: Family, meta: ArchMetadata) -> dict[str, Any]:
    """T5 (FFNs of ReLU without gate, no output layer but the embedding), or T5 1.1, Flan-T5 and mT5 (gates of GELU)."""
    config: dict[str, Any] = {"model_type": "t5", "relative_attention_max_distance": 128}
    config["feed_forward_proj"] = "gated-gelu" if "enc.blk.0.ffn_gate.weight" in file.tensors else "relu"
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    for key, name in family.keys.items():
        default = config.get("num_layers") if name == "num_decoder_layers" else None
        config[name] = meta.number(
            key, default, least="epsilon" not in key, most=1 << 31 if "epsilon" not in key else 1
        )
    table, numbers = file.tensor("token_embd.weight"), re.compile(r"(enc|dec)\.blk\.(\d+)\.")
    blocks = {(found[1], found[2]) for name in file.tensors if (found := numbers.match(name))}
    counts = [sum(part == one for part, _ in blocks) for one in ("enc", "dec")]
    claims = [("block_count", config["num_layers"], counts[0])]
    claims.append(("decoder_block_count", config["num_decoder_layers"], counts[1]))
    _check_claims(file, [*claims, ("embedding_length", config["d_model"], table.columns)])
    config |= {"vocab_size": table.rows, "decoder_start_token_id": meta.number("decoder_start_token_id", 0)}
    own = {"attention.value_length": config["d_kv"], _RMS_NORM: config["layer_norm_epsilon"]}
    _check_unused(file, meta, own | {"context_length": meta.get("context_length"), "vocab_size": table.rows})
    return config | _special_tokens(file, table.rows)


def _special_tokens(file: GgufFile, vocabulary: int) -> dict[str, Any]:
    """Tokens that the file names, and those that end an answer by their text, within the vocabulary (as llama.cpp)."""
    usual = _TOKENS_OF_SPM if file.metadata.get("tokenizer.ggml.model") == "llama" else {}
    keys = (*_TOKENS.values(), "eot", "eom")
    found = {key: file.metadata.get(f"tokenizer.ggml.{key}_token_id", usual.get(key)) for key in keys}
    known = {key: token for key, token in found.items() if type(token) is int and 0 <= token < vocabulary}
    config: dict[str, Any] = {f"{name}_token_id": known.get(key) for name, key in _TOKENS.items()}
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    texts = tokens[:vocabulary] if isinstance(tokens, list) else []
    ends = [known[key] for key in ("eos", "eot", "eom") if key in known]  # also the end of a chat turn
    ends = list(dict.fromkeys([*ends, *(token for token, text in enumerate(texts) if text in _ENDS)]))
    return config | ({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})


def _check_sizes(file: GgufFile, config: Mapping[str, Any], meta: ArchMetadata) -> None:
    """Raises ArtifactError: sizes differ from those of the tensors. Checked before a possibly huge model is built."""
    blocks = {int(block[1]) for name in file.tensors if (block := re.match(r"blk\.(\d+)\.", name))}
    width, heads = config["head_dim"], config["num_attention_heads"]
    experts = [t for name, t in file.tensors.items() if name.startswith("blk.0.ffn_") and "_exps." in name]
    ffn = [t for name, t in file.tensors.items() if re.fullmatch(r"blk\.0\.ffn_(gate|up)\.weight", name)]
    claims = [
        ("block_count", config["num_hidden_layers"], len(blocks)),
        ("embedding_length", config["hidden_size"], file.tensor("token_embd.weight").columns),
        ("vocab_size", config["vocab_size"], file.tensor("token_embd.weight").rows),
        *(("expert_count", meta.number("expert_count", 0), t.shape[0]) for t in experts),
    ]
    of_keys = ("attention.head_count_kv", config["num_key_value_heads"])
    for name, (key, count) in {"attn_q": ("attention.key_length", heads), "attn_k": of_keys}.items():
        if (matrix := file.tensors.get(f"blk.0.{name}.weight")) is not None:
            claims.append((key, width * count, matrix.rows))
    if len(ffn) == 2:
        claims += [("feed_forward_length", config["intermediate_size"], t.rows) for t in ffn]
    _check_claims(file, claims)
    experts, used = meta.number("expert_count", 0), meta.number("expert_used_count", 0)
    if experts and not 1 <= used <= experts:
        expected = f"from 1 to {experts}, as many as there are experts"
        fix = "The file's metadata is of another model; get it again."
        raise ArtifactError(f"expert_used_count in {file.path}", expected=expected, found=str(used), fix=fix)


def _check_claims(file: GgufFile, claims: Iterable[tuple[str, int, int]]) -> None:
    """Raises ArtifactError: a key's number is not that of the tensors."""
    for key, claimed, found in claims:
        if claimed != found:
            fix = "The file's metadata is of another model, or tensors are missing; get it again."
            expected = f"{found}, as its tensors have it"
            raise ArtifactError(f"{key} in {file.path}", expected=expected, found=str(claimed), fix=fix)


def _rope(file: GgufFile, meta: ArchMetadata, family: Family) -> dict[str, Any]:
    theta = float(meta.number("rope.freq_base", 10000.0, least=1, most=1e12))
    older = meta.number("rope.scale_linear", 1.0, least=0, most=1e6)
    factor = float(meta.number("rope.scaling.factor", older, least=0, most=1e6))
    kind = str(meta.get("rope.scaling.type") or ("linear" if factor > 0 else "none"))
    if kind in ("linear", "yarn") and 0 < factor < 1:
        _unsupported(file, "positions that are not stretched the other way", f"rope.scaling.factor {factor:g}")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if kind == "linear" and factor > 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor > 1:
        original = meta.number("rope.scaling.original_context_length", least=1)
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    elif kind not in ("none", "linear", "yarn"):
        _unsupported(file, "rotary positions of type none, linear or yarn", shown(kind))
    if family.needs == _TEMPERATURE:
        rope |= {"mscale": 1.0, "mscale_all_dim": meta.number("rope.scaling.yarn_log_multiplier", 0.0)}  # 0: no ratio
        rope["llama_4_scaling_beta"] = meta.number(_TEMPERATURE)
        within = meta.number("rope.scaling.original_context_length", meta.number("context_length"), least=1)
        rope["original_max_position_embeddings"] = within
    if "rope_freqs.weight" in file.tensors:
        rope = _llama3(file, rope)
    if family.model_type in ("gemma3_text", "gemma3n_text", "olmo3"):  # sliding layers are not scaled
        usual = theta if family.model_type == "olmo3" else 10000.0
        sliding = float(meta.number("rope.freq_base_swa", usual, least=1, most=1e12))
        return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": sliding}}
    return rope


def _states(file: GgufFile, config: dict[str, Any], meta: ArchMetadata) -> None:
    """Which layers of Nemotron-H or LFM2 have attention, recurrent states or convolutions, or (Nemotron-H) neurons."""
    blocks = config["num_hidden_layers"]
    heads = meta.get("attention.head_count_kv")
    widths = [0] * blocks if config["model_type"] == "lfm2" else meta.get("feed_forward_length")
    if not all(isinstance(one, list) and {*map(type, one)} == {int} and len(one) == blocks for one in (heads, widths)):
        _unsupported(file, f"head_count_kv and feed_forward_length of {blocks} layers", "others")
    neurons = "moe" if meta.has("expert_count") else "mlp"
    states = "conv" if config["model_type"] == "lfm2" else "linear_attention"
    pairs = zip(heads, widths, strict=True)
    config["layer_types"] = ["full_attention" if some else neurons if width else states for some, width in pairs]
    if config["model_type"] == "nemotron_h":
        config["mamba_head_dim"] //= config["mamba_num_heads"]
        config["layers_block_type"] = config.pop("layer_types")
        del config["rope_parameters"]  # no layer has positions


def _llama3(file: GgufFile, rope: dict[str, Any]) -> dict[str, Any]:
    """Recognise Llama 3.1's rule from a tensor of divisors. Raises UnsupportedModelError: other values."""
    tensor = file.tensor("rope_freqs.weight")
    divisors = file.read_rows(tensor.name, 0, 1).view(torch.float32)[0] if tensor.type.name == "F32" else None
    if divisors is not None and rope["rope_type"] == "default" and len(tensor.shape) == 1:
        for factor in (8.0, 16.0, 32.0):
            known = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            known |= {"original_max_position_embeddings": 8192}
            if divisors.allclose(llama3_divisors(len(divisors), rope["rope_theta"], known), rtol=1e-4):
                return {**rope, "rope_type": "llama3", **known}
        if bool((divisors == 1).all()):
            return rope
    _unsupported(file, "rope_freqs.weight as Llama 3.1 or 3.2 has it", "other values")


def llama3_divisors(pairs: int, theta: float, rule: Mapping[str, Any]) -> torch.Tensor:
    """``[pairs]``: divisors of rotary frequencies by rule ``llama3``: 1 for short waves, its factor for long ones."""
    turns = rule["original_max_position_embeddings"] * theta ** -(torch.arange(pairs) / pairs) / (2 * math.pi)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / rule["factor"] + smooth)


def _special(file: GgufFile, family: Family, config: dict[str, Any], meta: ArchMetadata) -> None:
    blocks = config["num_hidden_layers"]
    if family.model_type in ("gemma2", "gemma3_text"):
        # llama.cpp scales queries by the width of heads, except in the 27B models
        big = (blocks, family.model_type) in ((46, "gemma2"), (62, "gemma3_text"))
        config["query_pre_attn_scalar"] = (
            config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
        )
    if family.pattern:
        slides = [(i + 1) % family.pattern != 0 for i in range(blocks)]
        said = meta.get("attention.sliding_window_pattern")
        if isinstance(said, list) and {*map(type, said)} == {bool} and len(said) == blocks:
            slides = said
        elif said not in (None, family.pattern):
            _unsupported(file, f"sliding_window_pattern {family.pattern}, or one of {blocks} layers", shown(said))
        slides = [bool(one and config.get("sliding_window", 1)) for one in slides]
        config["layer_types"] = ["sliding_attention" if one else "full_attention" for one in slides]
        if family.arch in ("gemma3", "gemma3n") and not config["sliding_window"]:
            del config["sliding_window"]  # transformers makes a mask with it that no layer uses
    if family.arch == "gemma3n":
        scales = meta.get("activation_sparsity_scale")
        if not isinstance(scales, list) or {*map(type, scales)} != {float} or len(scales) != blocks:
            _unsupported(file, f"activation_sparsity_scale of {blocks} layers", shown(scales))
        shares = torch.special.ndtr(torch.tensor(scales, dtype=torch.float64))  # standard deviations -> shares of zeros
        config["activation_sparsity_pattern"] = [round(share, 5) for share in shares.tolist()]
        config["laurel_rank"] = file.tensor("blk.0.laurel_l.weight").rows
        config["vocab_size_per_layer_input"] = file.tensor("per_layer_token_embd.weight").rows
    if family.arch == "smallthinker":  # whose layout is built into llama.cpp
        layout = [int(i % 4 != 0) for i in range(blocks)] if (window := config.get("sliding_window_size")) else None
        if window not in (None, 0, 4096):
            _unsupported(file, "a window of 4096 tokens, which llama.cpp takes whatever the file says", str(window))
        config |= {"sliding_window_layout": layout, "rope_layout": layout}
        config["moe_primary_router_apply_softmax"] = meta.number("expert_gating_func", least=1, most=2) == 1
    if family.model_type == "olmo" and not math.isclose(config.pop("layer_norm_eps"), 1e-5, rel_tol=1e-3):
        _unsupported(file, "norms with an epsilon of 1e-5", "another")
    if "attention.scale" in family.keys:
        config.setdefault(family.keys["attention.scale"], config["head_dim"] ** -0.5)
    for name in {*family.keys} & {*_CAPS}:
        config[name] = config.get(name, _CAPS[name]) or None  # 0: none
    if family.model_type in ("cohere", "cohere2"):
        config.setdefault("logit_scale", 1.0)
    if family.model_type == "phi3" and any(name.startswith("rope_factors") for name in file.tensors):
        _unsupported(file, "rotary positions without factors of their own", "rope_factors_long.weight")
    if "expert_feed_forward_length" not in family.keys or not meta.has("expert_count"):
        return
    width = family.keys["expert_feed_forward_length"]
    if not meta.has("expert_feed_forward_length"):
        config[width] = file.tensor("blk.0.ffn_gate_exps.weight").shape[1]
    config.setdefault("intermediate_size", config[width])
    if "expert_shared_feed_forward_length" in family.keys and not meta.has("expert_shared_feed_forward_length"):
        config["shared_expert_intermediate_size"] = file.tensor("blk.0.ffn_gate_shexp.weight").shape[0]
