"""SmallThinker, which transformers does not have (https://arxiv.org/abs/2507.20984): ReGLU experts, chosen by a layer's
input before its attention; layers with a sliding window, and layers without positions, as SmolLM3 has them.

Importing this module registers it with transformers' auto classes.
"""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers import initialization
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.smollm3.modeling_smollm3 import SmolLM3DecoderLayer, SmolLM3ForCausalLM, SmolLM3Model


class SmallThinkerConfig(transformers.SmolLM3Config):
    """The checkpoints' names. ``rope_layout``: 1 where a layer has positions; None: all have them.
    ``sliding_window_layout``: 1 where it attends to the last ``sliding_window_size`` tokens; None: nowhere.
    """

    model_type = "smallthinker"

    moe_num_primary_experts: int = 32
    moe_num_active_primary_experts: int = 4
    moe_ffn_hidden_size: int = 768
    moe_primary_router_apply_softmax: bool = False
    rope_layout: list[int] | None = None
    sliding_window_layout: list[int] | None = None
    sliding_window_size: int | None = None
    head_dim: int | None = None
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self.no_rope_layers = self.rope_layout = self.rope_layout or [1] * self.num_hidden_layers
        slides = self.sliding_window_layout = self.sliding_window_layout or [0] * self.num_hidden_layers
        for name, layout in (("rope_layout", self.rope_layout), ("sliding_window_layout", slides)):
            if len(layout) != self.num_hidden_layers:
                raise ValueError(f"{name} has {len(layout)} layers, num_hidden_layers is {self.num_hidden_layers}")
        if any(slides) and not self.sliding_window_size:
            raise ValueError(f"sliding_window_size {self.sliding_window_size}: sliding_window_layout has windows")
        self.use_sliding_window, self.sliding_window = any(slides), self.sliding_window_size if any(slides) else None
        self.layer_types = ["sliding_attention" if one else "full_attention" for one in slides]
        self.num_local_experts = self.moe_num_primary_experts  # as Mixtral's experts call it
        self.intermediate_size, self.hidden_act = self.moe_ffn_hidden_size, "relu"
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)


class _Router(nn.Module):
    """Weights ``[T, k]`` and numbers of the experts of each token, by sigmoid or softmax of the k highest logits."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.top_k, self.softmax = config.moe_num_active_primary_experts, config.moe_primary_router_apply_softmax
        self.weight = nn.Parameter(torch.zeros(config.num_local_experts, config.hidden_size))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits, chosen = F.linear(x.flatten(0, -2), self.weight).float().topk(self.top_k, -1)
        weights = logits.softmax(-1) if self.softmax else F.normalize(logits.sigmoid(), p=1.0, dim=-1)
        return weights.to(x.dtype), chosen


class SmallThinkerMoE(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.primary_router, self.experts = _Router(config), MixtralExperts(config)

    def forward(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.experts(x.flatten(0, -2), chosen, weights)
        return made.view(x.shape)


class SmallThinkerLayer(SmolLM3DecoderLayer):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__(config, layer)
        del self.mlp
        self.block_sparse_moe = SmallThinkerMoE(config)

    def forward(self, hidden_states: torch.Tensor, **how: Any) -> torch.Tensor:
        """As layers of transformers."""
        routing = self.block_sparse_moe.primary_router(hidden_states)
        x = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), **how)[0]
        return x + self.block_sparse_moe(self.post_attention_layernorm(x), *routing)


class _Initialised:
    _no_split_modules = ("SmallThinkerLayer",)

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[misc]
        if isinstance(module, (MixtralExperts, _Router)):
            for parameter in module.parameters():
                initialization.normal_(parameter, std=self.config.initializer_range)  # type: ignore[attr-defined]


class SmallThinkerModel(_Initialised, SmolLM3Model):
    """SmallThinker without the output layer."""

    config_class = SmallThinkerConfig

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(SmallThinkerLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class SmallThinkerForCausalLM(_Initialised, SmolLM3ForCausalLM):
    """SmallThinker with its output layer."""

    config_class = SmallThinkerConfig

    def __init__(self, config: SmallThinkerConfig) -> None:
        super().__init__(config)
        self.model = SmallThinkerModel(config)
        self.post_init()


transformers.AutoConfig.register("smallthinker", SmallThinkerConfig, exist_ok=True)
transformers.AutoModel.register(SmallThinkerConfig, SmallThinkerModel, exist_ok=True)
transformers.AutoModelForCausalLM.register(SmallThinkerConfig, SmallThinkerForCausalLM, exist_ok=True)
_GATE_UP = [".experts.*.gate.weight", ".experts.*.up.weight"]
_CONVERTERS = [
    WeightConverter(_GATE_UP, ".experts.gate_up_proj", [MergeModulelist(dim=0), Concatenate(dim=1)]),
    WeightConverter([".experts.*.down.weight"], ".experts.down_proj", [MergeModulelist(dim=0)]),
]
register_checkpoint_conversion_mapping("smallthinker", _CONVERTERS, overwrite=True)
