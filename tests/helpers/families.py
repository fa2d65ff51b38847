"""Every family of transformers that reads text, images or sound, tiny and random: what is found in it, and is it equal.

``python tests/helpers/families.py`` writes docs/ARCHITECTURES.md; tests/graph/test_families.py compares.
"""

from __future__ import annotations

import copy
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ARCHITECTURES.md"
#: What a family is for -> the mapping of transformers that names the class; of several the first that has it.
TASKS = {
    "decoder": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "encoder": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "encoder-decoder": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}
HIDDEN, INTERMEDIATE, LAYERS, VOCAB = 32, 48, 2, 96
#: The whole of a field's name -> what a tiny model has there.
_SIZES: dict[str, Any] = {
    "hidden_size|d_model|n_embd|n_embed|dim|embed_dim|hidden_dim|emb_dim|embedding_size|model_dim|embedding_dim"
    "|word_embed_proj_dim|encoder_hidden_size|decoder_hidden_size|attention_hidden_size|lru_width|rnn_hidden_size"
    "|input_hidden_size|text_embed_dim|mm_hidden_size": HIDDEN,
    r"(\w*_)?(intermediate|ffn|mlp)_(size|dim|hidden_size)|d_ff|n_inner|d_inner|ffn_hidden_size|hidden_ff|ff_dim"
    r"|\w*_ffn_dim|\w*intermediate_size|\w*_ffn_hidden_size|dim_feedforward|feed_forward_size": INTERMEDIATE,
    r"num_hidden_layers|n_layers?|num_layers|(num_)?(encoder|decoder)_layers|num_blocks|depth": LAYERS,
    r"num_attention_heads|n_heads?|num_heads|\w*encoder_attention_heads|decoder_attention_heads|num_encoder_heads"
    r"|num_decoder_heads|num_encoder_attention_heads|num_decoder_attention_heads": 4,
    r"(num_|n_)(key_value|kv)_heads|multi_query_group_num|num_(global_)?key_value_heads": 2,
    r"(\w*_)?head_dim|d_kv|attention_head_size|head_size|kv_channels|v_head_dim": 8,
    "q_lora_rank|kv_lora_rank|rank": 16,
    "num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_routed_experts": 4,
    r"num_experts_per_tok(en)?|moe_topk|top_k_experts|moe_k|num_selected_experts|moe_top_k|num_experts_per_token": 2,
    "n_group|topk_group|num_expert_group|n_shared_experts|moe_num_shared_experts|num_shared_experts": 1,
    "first_k_dense_replace": 1,
    r"max_position_embeddings|n_positions|n_ctx|max_sequence_length|max_seq_len|seq_length|max_target_positions"
    r"|max_source_positions": 64,
    "rotary_dim": 8,
    r"image_size|img_size": 32,
    r"patch_size": 8,
    r"(\w*_)?vocab_size(_per_layer_input)?": VOCAB,
    "state_size|ssm_state_size|mamba_d_state|d_state": 8,
    "mamba_n_heads|mamba_num_heads|n_mamba_heads|linear_num_value_heads|linear_num_key_heads": 4,
    "mamba_d_head|mamba_head_dim|mamba_headdim|linear_key_head_dim|linear_value_head_dim": 16,
    "mamba_n_groups|n_groups|mamba_ngroups": 1,
    "time_step_rank": 4,
    "chunk_size|mamba_chunk_size": 8,
    "sliding_window|attention_window|local_attention|attention_window_size": 16,
}
_PATTERNS = [(re.compile(pattern), value) for pattern, value in _SIZES.items()]
_QSA: dict[str, Any] = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
}
_SWA: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
#: What the names of fields do not say, by family.
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_vocab": 64,
        "use_cache": False,
        "encoder_config": {"hidden_size_global": HIDDEN},
        "decoder_config": {"hidden_size_global": HIDDEN},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
        },
    },
    "convnext": {"num_stages": 2, "hidden_sizes": [16, HIDDEN], "depths": [1, 1]},
    "convnextv2": {"num_stages": 2, "hidden_sizes": [16, HIDDEN], "depths": [1, 1]},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": HIDDEN}},
    "dots1": {
        "num_key_value_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "dia": {
        "decoder_config": {
            "cross_hidden_size": HIDDEN,
            "cross_head_dim": 8,
            "cross_num_attention_heads": 4,
            "cross_num_key_value_heads": 4,
        }
    },
    "dots3_note": {
        "text_config": _SWA,
        "vision_config": {"adapter_in_dim": HIDDEN, "adapter_out_dim": HIDDEN},
        "audio_config": {"adapter_input_size": HIDDEN, "adapter_out_dim": HIDDEN},
    },
    "dots3_note_text": _SWA,
    "donut-swin": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 1, "mask_token_id": 2},
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64, "mlp_multipliers": [0.7, 0.3]},
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["full_attention"] * LAYERS,
        "intermediate_size": [INTERMEDIATE] * LAYERS,
        "laurel_rank": 4,
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "deepseek_v2": {"topk_method": "greedy", "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "musicgen": {"decoder": {"num_codebooks": 2}},
    "musicgen_melody": {"decoder": {"num_codebooks": 2}},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 16},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "hybrid_override_pattern": None,
        "num_hidden_layers": 4,
        "moe_intermediate_size": INTERMEDIATE,
        "moe_shared_expert_intermediate_size": INTERMEDIATE,
    },
    "ministral": {"head_dim": 8},
    "neomme": {"head_dim": 16},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "perceiver": {"d_latents": HIDDEN, "num_latents": 8, "num_blocks": 1, "num_self_attends_per_block": 2},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [16, 16], "axial_pos_shape": [4, 16]},
    "segformer": {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [16, HIDDEN],
        "patch_sizes": [7, 3],
        "strides": [4, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
    },
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "swin": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "swinv2": {"num_heads": [2, 4], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "patch_size": 4},
    "xlstm": {"hidden_size": 4 * HIDDEN, "embedding_dim": 4 * HIDDEN},  # whose heads are multiples of 64 in all
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 2 * HIDDEN,
        "attention_head_dim": 16,
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
    },
    "zamba2": {"attention_hidden_size": 2 * HIDDEN, "attention_head_dim": 16, "layers_block_type": ["mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
#: Some that the default test run looks at: each form that there is.
QUICK = ("bert", "falcon", "gemma2", "llama", "mixtral", "opt", "phi3", "t5", "vit", "whisper")


@dataclass(frozen=True)
class Cells:
    """A line of a page's table; the first field names it."""

    def line(self) -> str:
        return f"| {' | '.join(astuple(self))} |"


@dataclass(frozen=True)
class Row(Cells):
    """What came of one family."""

    family: str
    task: str
    found: str = "-"  # "2", or "4 of 6": layers made sparse, of those that look feed-forward
    formula: str = "-"
    equal: str = "-"
    reason: str = ""


@cache
def families() -> dict[str, tuple[str, str]]:
    """Family -> what it is for, and the name of its class."""
    from transformers.models.auto import modeling_auto

    found: dict[str, tuple[str, str]] = {}
    for task, mapping in TASKS.items():
        for family, name in getattr(modeling_auto, mapping).items():
            found.setdefault(family, (task, name if isinstance(name, str) else name[0]))
    return dict(sorted(found.items()))


def tiny_fields(config: Any, *, layers: int) -> dict[str, Any]:
    """The fields of ``config`` that a tiny model has other values for; nested configurations as dicts."""
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        nested = vars(config).get(name)
        if hasattr(nested, "to_dict"):
            found[name] = tiny_fields(nested, layers=getattr(nested, "num_hidden_layers", layers))
        elif name.endswith(("_token_id", "_token_index")) and isinstance(value, int) and value >= VOCAB:
            found[name] = VOCAB - 1
        elif isinstance(value, list | tuple) and len(value) == layers and layers > LAYERS:
            found[name] = [*dict.fromkeys(map(_hashable, value)), *value][:LAYERS]  # of each kind one, if there are two
        elif isinstance(value, int | None) and not isinstance(value, bool):
            size = next((size for pattern, size in _PATTERNS if pattern.fullmatch(name)), None)
            if size is not None and (value is not None or size == INTERMEDIATE):
                found[name] = size
    if found.get("kv_lora_rank") and "num_key_value_heads" in found:  # heads of their own, out of what is compressed
        found["num_key_value_heads"] = found["num_attention_heads"]
    return found


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _merged(fields: dict[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    for name, value in more.items():
        both = isinstance(value, Mapping) and isinstance(fields.get(name), dict)
        fields[name] = _merged(fields[name], value) if both else value
    return fields


def tiny_family(family: str, **more: Any) -> nn.Module:
    """A random model of it, float32, whose matrices are large enough for a wrong layer to show; ``more``: fields."""
    import transformers
    from transformers import CONFIG_MAPPING

    _, class_name = families()[family]
    config_class = CONFIG_MAPPING[family]
    default = config_class()
    layers = getattr(default, "num_hidden_layers", 0)
    config = config_class(**_merged(tiny_fields(default, layers=layers), OVERRIDES.get(family, {}) | more))
    torch.manual_seed(0)
    model_class: Any = getattr(transformers, class_name)
    if not isinstance(config, model_class.config_class):  # the language model of something larger
        config = config.get_text_config(decoder=True)
    model: nn.Module = model_class._from_config(config, dtype=torch.float32).eval()
    large = sum(p.numel() for p in model.parameters())
    assert large < 20_000_000, f"a tiny model of {family} has {large} parameters"
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2 or (parameter.numel() > 1 and not bool(parameter.any())):
                parameter.normal_(0.0, 0.15)
    return model


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """What it is run on, by the names of its forward."""
    generator = torch.Generator().manual_seed(1)
    name = getattr(model, "main_input_name", "input_ids")
    config = model.config
    ids_BT = torch.randint(3, VOCAB - 8, (2, 8), generator=generator)
    if name == "pixel_values":
        size = getattr(config, "image_size", 32)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        shape = (2, getattr(config, "num_channels", 3), height, width)
        return {name: torch.randn(shape, generator=generator)}
    if name in ("input_features", "input_values"):
        bins = next((n for k in ("num_mel_bins", "input_feat_per_channel") if (n := getattr(config, k, None))), 80)
        frames = 2 * getattr(config, "max_source_positions", 64)
        shaped = (2, bins, frames) if config.model_type == "whisper" else (2, frames, bins)
        found = {name: torch.randn(shaped if name == "input_features" else (2, 1600), generator=generator)}
    else:
        found = {name: ids_BT}
    if getattr(config, "is_encoder_decoder", False):
        channels = getattr(getattr(config, "decoder_config", None), "num_channels", None)  # Dia's codes are several
        found["decoder_input_ids"] = ids_BT.clone() if channels is None else ids_BT[..., None].repeat(1, 1, channels)
    return found


def first_tensor(output: Any) -> torch.Tensor:
    """The result that is compared: logits if there are any."""
    logits = getattr(output, "logits", None)
    chosen: torch.Tensor = logits if isinstance(logits, torch.Tensor) else output[0]
    return chosen


def judge(family: str, make: Callable[[str], nn.Module] = tiny_family) -> Row:
    """Build it, make it sparse, compare; nothing is raised but where the two differ."""
    from torch_pi2.errors import Pi2Error
    from torch_pi2.graph.find import search
    from torch_pi2.rewrite.rewrite import replaceable, rewrite
    from torch_pi2.types.plan import LayerPlan, Plan, weights_hash

    task = families()[family][0]
    try:
        model = make(family)
        inputs = inputs_of(model)
        with torch.no_grad():
            wanted = first_tensor(model(**inputs))
    except Exception as error:  # what a family's code does with a tiny configuration
        return Row(family, task, reason=f"not tried: {_one_line(error)}")
    dense = copy.deepcopy(model)
    try:
        found = search(model, (), inputs, needed=False, warn=False)
        refused = found.refused
        if refused is not None and found.left:
            return Row(family, task, "0", reason=_reasons(found.left))
        if refused is not None:
            raise refused
        found, strategies = replaceable(model, found)
        order = {site.key: torch.randperm(site.intermediate).int() for site in found.sites}
        layers = [LayerPlan(site, "exact", 0, order[site.key]) for site in found.sites]
        rewrite(model, Plan(layers, weights_hash(model, found.sites)), strategies=strategies)
    except Pi2Error as error:
        return Row(family, task, "0", reason=_plain(error))
    with torch.no_grad():
        made, again = first_tensor(model(**inputs)), first_tensor(dense(**inputs))
    assert torch.equal(again, wanted), f"{family}: the dense model is not reproducible"
    off = float((made - wanted).abs().max() / wanted.abs().max())
    sites, left = len(found.sites), len(found.left)
    formulas = ", ".join(dict.fromkeys(f"`{site.form}`" for site in found.sites))
    some = f"{sites} of {sites + left}" if left else str(sites)
    return Row(family, task, some, formulas, _equal(off), _reasons(found.left))


def _reasons(left: Mapping[str, str]) -> str:
    return "; ".join(dict.fromkeys(_shortened(reason) for reason in left.values()))


def _equal(off: float) -> str:
    return "yes" if off < 2e-4 else f"NO ({off:.1e})"


def _one_line(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split())
    return _shortened(re.sub(r"(/[\w.+-]+)+/", "", words))


def _plain(error: Any) -> str:
    from torch_pi2.rewrite.strategies import plain_reason

    reasons = f"{error.found}".split("; ")
    return _shortened(plain_reason(reasons) if reasons[0].startswith("module: ") else f"{error.found}")


def _shortened(text: str, most: int = 160) -> str:
    text = (
        " ".join(text.split())
        .replace("|", "/")
        .replace("<", "")
        .replace(">", "")
        .replace("`", "'")
        .replace("](", "] (")
    )
    return text if len(text) <= most else f"{text[: most - 3].rstrip()}..."


HEAD = f"""# Architectures

Written by `python tests/helpers/families.py`, and compared with what it would write by `make test-long`
(tests/graph/test_families.py). Each family of transformers that is a language model, an encoder, an encoder and
decoder, speech recognition or image classification, with random weights in a configuration made tiny (hidden size
{HIDDEN}, {LAYERS} layers):

* **sparse**: feed-forward layers that are made sparse, each expert counted ("2 of 3": one more stays dense).
* **equal**: the optimised model gives what the dense one gives, up to the order of floating-point sums.
* The last column says why layers stay dense, or why a family was not tried here.
"""


def page(rows: list[Row]) -> str:
    """The page that has ``rows``."""
    tried = [row for row in rows if not row.reason.startswith("not tried")]
    equal = sum(row.equal == "yes" for row in tried)
    some = sum(" of " in row.found for row in tried)
    none = sum(row.found == "0" for row in tried)
    head = (
        f"\n{len(rows)} families: {equal} found and equal (in {some} of them some layers stay dense), {none} with no "
        f"layer that can be made sparse, {len(rows) - len(tried)} not tried.\n"
    )
    table = ["| family | kind | sparse | formula | equal | what stays dense, and why |", "|---|---|---|---|---|---|"]
    return "\n".join([HEAD.rstrip(), head, *table, *(row.line() for row in rows), ""])


def committed(page: Path = PAGE) -> dict[str, str]:
    """Family -> its line in the committed ``page``."""
    lines = page.read_text().splitlines()
    return {line.split("|")[1].strip(): line for line in lines if line.startswith("| ") and "| family |" not in line}


def quietly() -> None:
    """What a thousand small models have to say is of no use here."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def write(names: Iterable[str], judge: Callable[[str], Any], page: Path, text: Callable[[list[Any]], str]) -> None:
    """Judge the families named on the command line; without any, all of them, and write the page."""
    quietly()
    chosen, rows = sys.argv[1:], []
    for family in chosen or names:
        rows.append(judge(family))
        print(rows[-1].line(), flush=True)
    if not chosen:
        page.write_text(text(rows))


def main() -> None:
    write(families(), judge, PAGE, page)


if __name__ == "__main__":
    main()
