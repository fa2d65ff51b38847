"""RWKV-7, which transformers does not have (https://arxiv.org/abs/2503.14456), with flash-linear-attention's names.

Importing this module registers it with transformers' auto classes.
"""

import math
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.masking_utils import create_recurrent_attention_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from torch_pi2.ops import load

#: Tokens that are computed at once. Each decays a state by exp(-exp(-0.5)) at most, and so do 16 by 1.6e4: float32
#: keeps its precision when they are divided by that.
_CHUNK = 16
#: Settings of other checkpoints -> the value that is known here.
_KNOWN = {"norm_first": True, "norm_bias": True, "attn": None, "hidden_act": "sqrelu"}


class RWKV7Config(transformers.PreTrainedConfig):
    """Sizes of RWKV-7. ``group_norm_eps``: of the norm of heads; None: ``head_dim * norm_eps``."""

    model_type = "rwkv7"
    number_of_conv_states = 2  # the last token before each of the two mixers

    vocab_size: int = 65536
    hidden_size: int = 2048
    intermediate_size: int | None = None
    num_hidden_layers: int = 24
    head_dim: int = 64
    decay_low_rank_dim: int = 64
    gate_low_rank_dim: int = 128
    a_low_rank_dim: int = 64
    v_low_rank_dim: int = 32
    hidden_act: str = "sqrelu"
    max_position_embeddings: int = 1 << 20
    norm_eps: float = 1e-5
    group_norm_eps: float | None = None
    initializer_range: float = 0.02
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    tie_word_embeddings: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        self.intermediate_size = self.intermediate_size or 4 * self.hidden_size
        for key, value in _KNOWN.items():
            if (said := kwargs.get(key, getattr(self, key, value))) != value:
                raise ValueError(f"{key} {said!r}: RWKV-7 is known here with {value!r}")
        if self.hidden_size % self.head_dim:
            raise ValueError(f"hidden_size {self.hidden_size} is no multiple of head_dim {self.head_dim}")
        super().__post_init__(**kwargs)

    @property
    def layer_types(self) -> list[str]:
        return ["linear_attention"] * self.num_hidden_layers


def _low_rank(width: int, rank: int, activation: nn.Module, bias: bool = True) -> Any:
    made = nn.Module()
    made.lora = nn.Sequential(nn.Linear(width, rank, bias=False), activation, nn.Linear(rank, width, bias=bias))
    return made


def _previous(x_BTH: torch.Tensor, cache: Any, layer: int, number: int) -> torch.Tensor:
    """The token before each one: zeros before the first, or the last one that ``cache`` has seen."""
    if cache is not None:
        seen: torch.Tensor = cache.update_conv_state(x_BTH.mT, layer, number, conv_kernel_size=1).mT
        if seen.shape[1] > x_BTH.shape[1]:
            return seen[:, :-1]
    return F.pad(x_BTH, (0, 0, 1, -1))


def recurrence(state: torch.Tensor, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``S <- S diag(exp(w)) + (S a) b' + v k'`` and ``y = S r`` for each token, as products of all tokens.

    Args:
        state: float32 ``[B, heads, N, N]``. inputs: float32 ``[6, B, heads, T, N]``, r, w, k, v, a and b of at most
            ``_CHUNK`` tokens.

    Returns:
        ``y``, ``[B, heads, T, N]``, and the state after the last token.
    """
    r, w, k, v, a, b = inputs
    tokens, decay = r.shape[2], w.cumsum(2)  # S = U diag(exp(decay)), where U is only added to
    ahead = torch.cat((a * (decay - w).exp(), r * decay.exp()), 2)
    behind = torch.cat((b, k), 2) * (-decay).exp().repeat(1, 1, 2, 1)
    products, before = ahead @ behind.mT, ahead @ state.mT
    added = before[:, :, :tokens]  # S a of each token
    if tokens > 1:
        until = torch.ones(tokens, tokens, device=r.device).tril()
        products = products * torch.cat((until.tril(-1), until)).repeat(1, 2)
        added = added + products[:, :, :tokens, tokens:] @ v
        own = torch.eye(tokens, device=r.device) - products[:, :, :tokens, :tokens]
        added = torch.linalg.solve_triangular(own, added, upper=False, unitriangular=True)
    values = torch.cat((added, v), 2)
    y = before[:, :, tokens:] + products[:, :, tokens:] @ values
    return y, (state + values.mT @ behind) * decay[:, :, -1:].exp()


def _step(state: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """``y`` of :func:`recurrence` of one token, which changes ``state``."""
    load()
    r, w, k, v, a, b = inputs[:, :, :, 0]
    y: torch.Tensor = torch.ops.pi2.recurrence(state, w.exp(), v, k, r, a, b)
    return y[:, :, None]


class RWKV7Attention(nn.Module):
    """Time mixing: a state of ``[heads, N, N]`` in place of keys and values."""

    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, width = layer, config.head_dim, config.hidden_size
        for name in "rwkvag":
            self.register_parameter(f"x_{name}", nn.Parameter(torch.zeros(1, 1, width)))
        self.k_k, self.k_a = nn.Parameter(torch.ones(width)), nn.Parameter(torch.ones(width))
        self.r_k = nn.Parameter(torch.zeros(width // self.head_dim, self.head_dim))
        self.r_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.w_lora = _low_rank(width, config.decay_low_rank_dim, nn.Tanh())
        if layer:
            self.v_lora = _low_rank(width, config.v_low_rank_dim, nn.Identity())
        self.a_lora = _low_rank(width, config.a_low_rank_dim, nn.Identity())
        self.g_lora = _low_rank(width, config.gate_low_rank_dim, nn.Sigmoid(), bias=False)
        eps = config.group_norm_eps or self.head_dim * config.norm_eps
        self.g_norm = nn.GroupNorm(width // self.head_dim, width, eps=eps)

    def forward(self, x: torch.Tensor, cache: Any, first_v: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """``x``: ``[B, T, H]``. first_v: values of the first layer, else None. Returns the result and the values."""
        change, by_head = _previous(x, cache, self.layer, 0) - x, (-1, self.head_dim)
        for_r, for_w, for_k, for_v, for_a, for_g = (x + change * self.get_parameter(f"x_{name}") for name in "rwkvag")
        r, k, v = self.r_proj(for_r), self.k_proj(for_k), self.v_proj(for_v)
        if first_v is not None:
            v = v + (first_v - v) * self.v_lora.lora(for_v).sigmoid()
        w = -math.exp(-0.5) * self.w_lora.lora(for_w).float().sigmoid()
        a = self.a_lora.lora(for_a).sigmoid()
        erased = F.normalize((k * self.k_k).unflatten(2, by_head), dim=-1).flatten(2)
        k = k + k * (a - 1) * self.k_a
        inputs = torch.stack([t.float() for t in (r, w, k, v, -erased, erased * a)])
        inputs = inputs.unflatten(3, by_head).transpose(2, 3)
        state = None if cache is None else cache.layers[self.layer].recurrent_states[0]
        state = inputs.new_zeros(*inputs.shape[1:3], self.head_dim, self.head_dim) if state is None else state
        if x.shape[1] == 1 and x.is_cpu and not torch.is_grad_enabled() and state.is_contiguous():
            parts = [_step(state, inputs)]
        else:
            parts = []
            for chunk in inputs.split(_CHUNK, 3):
                part, state = recurrence(state, chunk)
                parts.append(part)
        if cache is not None:
            cache.update_recurrent_state(state, self.layer)
        y = (torch.cat(parts, 2) if len(parts) > 1 else parts[0]).transpose(1, 2).to(x.dtype)
        y = self.g_norm(y.flatten(0, 1).flatten(1)).view(x.shape)
        own = (r * k).unflatten(2, by_head).mul(self.r_k).sum(-1, keepdim=True) * v.unflatten(2, by_head)
        return self.o_proj((y + own.flatten(2)) * self.g_lora.lora(for_g)), v


class RWKV7FeedForward(nn.Module):
    """Channel mixing, after the mix with the token before: an FFN without gate, ``relu2``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.key = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.value = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.value(self.key(x).relu().square())


class RWKV7Block(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.layer, norm = layer, (config.hidden_size, config.norm_eps)
        if not layer:
            self.pre_norm = nn.LayerNorm(*norm)
        self.attn_norm, self.ffn_norm = nn.LayerNorm(*norm), nn.LayerNorm(*norm)
        self.attn, self.ffn = RWKV7Attention(config, layer), RWKV7FeedForward(config)
        self.ffn_x_k = nn.Parameter(torch.zeros(config.hidden_size))  # ffn.x_k in checkpoints; here ffn is replaced

    def forward(self, x: torch.Tensor, mask: Any, cache: Any, first_v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = x if self.layer else self.pre_norm(x)
        normed = self.attn_norm(x)
        mixed, v = self.attn(normed if mask is None else normed * mask, cache, first_v)
        x = x + mixed
        normed = self.ffn_norm(x)
        normed = normed if mask is None else normed * mask
        return x + self.ffn(normed + (_previous(normed, cache, self.layer, 1) - normed) * self.ffn_x_k), v


class _PreTrained(transformers.PreTrainedModel):
    config_class = RWKV7Config
    base_model_prefix, _input_embed_layer = "model", "embeddings"
    _no_split_modules = ("RWKV7Block",)
    _is_stateful = True


class RWKV7Model(_PreTrained):
    """RWKV-7 without the output layer."""

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(RWKV7Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        inputs_embeds: Any = None,
        **how: Any,
    ) -> Any:
        """As models of transformers; padding must precede the tokens."""
        x = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        use_cache = how.get("use_cache")
        if cache is None and (self.config.use_cache and not self.training if use_cache is None else use_cache):
            cache = transformers.DynamicCache(config=self.config)
        mask = create_recurrent_attention_mask(self.config, x, attention_mask, cache=cache)
        mask, first_v = None if mask is None else mask[..., None].to(x.dtype), None
        for block in self.layers:
            x, v = block(x, mask, cache, first_v)
            first_v = v if first_v is None else first_v
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), cache=cache)


class RWKV7ForCausalLM(_PreTrained, transformers.GenerationMixin):
    """RWKV-7 with its output layer."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: RWKV7Config) -> None:
        super().__init__(config)
        self.model = RWKV7Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        labels: Any = None,
        logits_to_keep: int | torch.Tensor = 0,
        **how: Any,
    ) -> Any:
        """As models of transformers."""
        made = self.model(input_ids, attention_mask, cache, **how)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(made.last_hidden_state[:, kept])
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size, **how)
        return CausalLMOutputWithPast(loss=loss, logits=logits, cache=made.cache)


transformers.AutoConfig.register("rwkv7", RWKV7Config, exist_ok=True)
transformers.AutoModel.register(RWKV7Config, RWKV7Model, exist_ok=True)
transformers.AutoModelForCausalLM.register(RWKV7Config, RWKV7ForCausalLM, exist_ok=True)
register_checkpoint_conversion_mapping("rwkv7", [WeightRenaming(r"ffn\.x_k", "ffn_x_k")], overwrite=True)
