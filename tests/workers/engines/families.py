"""Families of causal language models that transformers builds, each as a tiny random model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.workers.engines.tiny import VOCABULARY

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "initializer_range": 0.2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "n_inner": 48}
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
_LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
_LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
_WINDOW = {"sliding_window": 7}

PACKED: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "qwen2_moe": _EXPERTS,
    "qwen3_moe": _EXPERTS,
    "mistral": _WINDOW,
    "ministral": _WINDOW,
    "mixtral": {**_EXPERTS, **_WINDOW},
    "gemma": {},
    # soft caps of scores and of logits
    "gemma2": {
        **_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {**_WINDOW, "query_pre_attn_scalar": 8},
    "vaultgemma": {**_WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "phimoe": _EXPERTS,
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "olmo": {},
    "olmo2": {},
    "olmo3": _WINDOW,
    "olmoe": _EXPERTS,
    "starcoder2": {},
    "cohere": {},
    "cohere2": _WINDOW,
    # logits that are scaled after the head
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {**_EXPERTS, "logits_scaling": 4.0},
    # sinks
    "gpt_oss": {**_EXPERTS, **_WINDOW},
    "granite_swa": _WINDOW,
    "glm": {},
    "glm4": {},
    "smollm3": {},
    "exaone4": _WINDOW,
    "ernie4_5": {},
    "nanochat": {},
    "persimmon": {},
    # keys of a width other than that of values
    "deepseek_v2": {**_EXPERTS, **_LATENT},
}  # fmt: skip
"""Computed in rows without padding, and served on the slot cache."""

PADDED: dict[str, dict[str, Any]] = {
    # positions are added to scores (ALiBi)
    "bloom": {"n_layer": 2, "n_head": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 256},
    "falcon": {"alibi": True},
    # attention of their own
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 7},
    "codegen": {**_GPT, "rotary_dim": 4},
    "stablelm": {},
    "nemotron": {},
    "diffllama": {},
    # chunks of attention
    "llama4_text": {**_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 8},
    # layers that keep a state
    "mamba": {"state_size": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "chunk_size": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 4},
    "jamba": {
        **_EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "use_mamba_kernels": False, "mamba_d_state": 4,
    },
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "granitemoehybrid": {
        **_EXPERTS, **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 16,
    },
    "qwen3_next": {**_EXPERTS, **_LINEAR},
    "qwen3_5_text": _LINEAR,
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "rwkv": {"attention_hidden_size": 32},
}  # fmt: skip
"""Computed in padded batches, and sampled a row at a time."""

FAMILIES = {**PACKED, **PADDED}
USUAL = frozenset(
    {"llama", "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gemma3_text", "gpt_oss", "deepseek_v2", "falcon", "mamba"}
)
"""Families that stand for the kinds: dense, experts, windows, sinks, latent attention, padded, state space."""
BY_LENGTH = [family if family in USUAL else pytest.param(family, marks=pytest.mark.long) for family in FAMILIES]


def without_joint_experts(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model compute its experts one by one: their joint kernel has no float64."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def family_model(name: str, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> PreTrainedModel:
    """Make a model of a family, in evaluation mode."""
    sizes = {**_SIZES, **FAMILIES[name]}
    if name == "falcon":
        # its width follows from the number of heads
        del sizes["head_dim"]
    torch.manual_seed(seed)
    model = without_joint_experts(AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes)))
    torch.nn.Module.to(model, dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            # no norm weighs 1 everywhere and no bias is 0: each part has an effect
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()
