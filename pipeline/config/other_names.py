"""What settings of TRL, verl and OpenRLHF are called here, for people who know those.

*Consumes* a name that is no setting. *Produces* what to set instead, in words. *Waits for* nothing.
Names that mean the same here and there are not in the table; where there is no such setting, it
says what happens instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SAME: Final[Mapping[str, str]] = {
    # run
    "experiment_name": "run.name",
    "run_name": "run.name",
    "output_dir": "run.dir",
    "save_path": "run.dir",
    "default_local_dir": "run.dir",
    "max_steps": "run.num_updates",
    "total_training_steps": "run.num_updates",
    # model
    "model_name": "model.path",
    "model_name_or_path": "model.path",
    "pretrain": "model.path",
    "ref_model": "model.reference_path",
    "bf16": "model.dtype",
    "torch_dtype": "model.dtype",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    # data
    "dataset": "data.train",
    "dataset_name": "data.train",
    "prompt_data": "data.train",
    "train_files": "data.train",
    "train_dataset": "data.train",
    "eval_dataset": "data.evaluation",
    "val_files": "data.evaluation",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "num_train_epochs": "data.epochs",
    "total_epochs": "data.epochs",
    "num_episodes": "data.epochs",
    "shuffle_dataset": "data.shuffle",
    "input_template": "data.prompt_template",
    "compute_score": "data.verifier",
    "reward_fn": "data.verifier",
    "reward_funcs": "data.verifier",
    "reward_manager": "data.verifier",
    # algorithm
    "adv_estimator": "algorithm.name",
    "advantage_estimator": "algorithm.name",
    "n": "algorithm.group_size",
    "num_generations": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "rollout_n": "algorithm.group_size",
    "rollout_batch_size": "algorithm.groups_per_update",
    "epsilon": "algorithm.clip_low",
    "clip_ratio": "algorithm.clip_low",
    "clip_ratio_low": "algorithm.clip_low",
    "eps_clip": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "importance_sampling_level": "algorithm.surrogate",
    "policy_loss_type": "algorithm.surrogate",
    "loss_mode": "algorithm.surrogate",
    "loss_type": "algorithm.loss_aggregation",
    "loss_agg_mode": "algorithm.loss_aggregation",
    "scale_rewards": "algorithm.normalize_std",
    "norm_adv_by_std_in_grpo": "algorithm.normalize_std",
    "no_advantage_std_norm": "algorithm.normalize_std",
    "beta": "algorithm.kl_coefficient",
    "kl_coef": "algorithm.kl_coefficient",
    "init_kl_coef": "algorithm.kl_coefficient",
    "kl_loss_coef": "algorithm.kl_coefficient",
    "use_kl_loss": "algorithm.kl_coefficient",
    "kl_loss_type": "algorithm.kl_estimator",
    "kl_penalty": "algorithm.kl_estimator",
    "entropy_coeff": "algorithm.entropy_coefficient",
    "entropy_loss_coef": "algorithm.entropy_coefficient",
    "tis_imp_ratio_cap": "algorithm.importance_cap",
    "vllm_importance_sampling_cap": "algorithm.importance_cap",
    "vllm_is_truncated_threshold": "algorithm.importance_cap",
    "rollout_is_threshold": "algorithm.importance_cap",
    "rollout_is": "algorithm.importance_level",
    "vllm_importance_sampling_mode": "algorithm.importance_level",
    "rollout_is_batch_normalize": "algorithm.importance_normalize",
    "rollout_rs": "algorithm.rejection",
    "rollout_rs_threshold": "algorithm.rejection_upper",
    "filter_groups": "algorithm.dynamic_sampling",
    "dynamic_filtering": "algorithm.dynamic_sampling",
    "max_num_gen_batches": "algorithm.max_generation_batches",
    "lam": "algorithm.gae_lambda",
    "lambd": "algorithm.gae_lambda",
    "gen_batch_size": "algorithm.oversampling",
    "staleness_threshold": "staleness.eta",
    "async_queue_size": "staleness.eta",
    # generation
    "max_completion_length": "generation.max_response_tokens",
    "max_new_tokens": "generation.max_response_tokens",
    "max_response_length": "generation.max_response_tokens",
    "response_length": "generation.max_response_tokens",
    "generate_max_len": "generation.max_response_tokens",
    "max_num_seqs": "generation.num_slots",
    "use_vllm": "generation.engine",
    "vllm_tensor_parallel_size": "generation.vllm.tensor_parallel_size",
    "tensor_model_parallel_size": "generation.vllm.tensor_parallel_size",
    "gpu_memory_utilization": "generation.vllm.engine_args",
    "vllm_gpu_memory_utilization": "generation.vllm.engine_args",
    "vllm_num_engines": "fleet.generator",
    # reward
    "overlong_buffer": "reward.overlong",
    "overlong_buffer_len": "reward.overlong_cache_tokens",
    "penalty_factor": "reward.overlong_factor",
    "overlong_penalty_factor": "reward.overlong_factor",
    "mask_truncated_completions": "reward.overlong",
    "reward_pretrain": "reward.model.path",
    # value
    "critic_pretrain": "value.path",
    "critic_learning_rate": "value.learning_rate",
    "critic_warmup": "value.pretrain_steps",
    "freezing_actor_steps": "value.pretrain_steps",
    "cliprange_value": "value.clip_low",
    "value_clip": "value.clip_low",
    # learner
    "lr": "learner.learning_rate",
    "actor_learning_rate": "learner.learning_rate",
    "lr_warmup_steps": "learner.warmup_updates",
    "num_warmup_steps": "learner.warmup_updates",
    "l2": "learner.weight_decay",
    "adam_betas": "learner.betas",
    "adam_beta1": "learner.betas",
    "adam_beta2": "learner.betas",
    "adam_epsilon": "learner.adam_eps",
    "max_norm": "learner.max_grad_norm",
    "grad_clip": "learner.max_grad_norm",
    "clip_grad": "learner.max_grad_norm",
    "micro_train_batch_size": "learner.micro_batch_tokens",
    "ppo_micro_batch_size": "learner.micro_batch_tokens",
    "ppo_micro_batch_size_per_gpu": "learner.micro_batch_tokens",
    "ppo_max_token_len_per_gpu": "learner.micro_batch_tokens",
    "train_max_tokens_per_gpu": "learner.micro_batch_tokens",
    "log_prob_micro_batch_size_per_gpu": "reference.micro_batch_tokens",
    "n_gpus_per_node": "learner.ranks",
    "zero_stage": "learner.deepspeed.stage",
    "lora_r": "learner.lora.rank",
    "lora_rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    # checkpoints, evaluation
    "save_freq": "checkpoint.every_updates",
    "save_steps": "checkpoint.every_updates",
    "save_total_limit": "checkpoint.keep",
    "max_ckpt_num": "checkpoint.keep",
    "max_actor_ckpt_to_keep": "checkpoint.keep",
    "test_freq": "evaluation.every_updates",
    "eval_steps": "evaluation.every_updates",
    "num_generations_eval": "evaluation.samples_per_prompt",
    "eval_n_samples_per_prompt": "evaluation.samples_per_prompt",
    "eval_temperature": "evaluation.temperature",
}

_ONCE_TRAINED: Final = (
    "there is no such setting: each response is trained on once; the optimiser steps that an update is cut into are "
    "`algorithm.num_minibatches`"
)
_CONSTANT: Final = (
    "there is no such setting: the rate is constant after a linear warm-up; set `learner.learning_rate` and "
    "`learner.warmup_updates`"
)
_WARMUP_SHARE: Final = "a warm-up is given in updates, not as a share: set `learner.warmup_updates`"
_ACCUMULATED: Final = (
    "there is no such setting: gradients add up over micro-batches of `learner.micro_batch_tokens`, and "
    "`algorithm.num_minibatches` is the optimiser steps of an update"
)
_IN_PROMPTS: Final = (
    "an update is `algorithm.groups_per_update` prompts of `algorithm.group_size` responses, in "
    "`algorithm.num_minibatches` optimiser steps"
)

_OTHERWISE: Final[Mapping[str, str]] = {
    "gradient_accumulation_steps": _ACCUMULATED,
    "steps_per_generation": _ACCUMULATED,
    "per_device_train_batch_size": _IN_PROMPTS,
    "train_batch_size": _IN_PROMPTS,
    "batch_size": _IN_PROMPTS,
    "ppo_mini_batch_size": _IN_PROMPTS,
    "generation_batch_size": _IN_PROMPTS,
    "num_iterations": _ONCE_TRAINED,
    "ppo_epochs": _ONCE_TRAINED,
    "max_epochs": _ONCE_TRAINED,
    "lr_scheduler": _CONSTANT,
    "lr_scheduler_type": _CONSTANT,
    "warmup_style": _CONSTANT,
    "min_lr": _CONSTANT,
    "min_lr_ratio": _CONSTANT,
    "warmup_ratio": _WARMUP_SHARE,
    "lr_warmup_ratio": _WARMUP_SHARE,
    "lr_warmup_steps_ratio": _WARMUP_SHARE,
    "eps_clip_low_high": "set `algorithm.clip_low` and `algorithm.clip_high`",
    "epsilon_low": "set `algorithm.clip_low`",
    "use_remove_padding": "there is no such setting: batches are always packed without padding",
    "packing_samples": "there is no such setting: batches are always packed without padding",
    "min_p": "there is no such setting: sampling has `generation.temperature`, `generation.top_p` and `generation.top_k`",
    "repetition_penalty": "there is no such setting: it would make log-probs of another distribution than the learner's",
    "remote_rm_url": "there is no such setting: a reward model is loaded from `reward.model.path`",
    "report_to": "there is no such setting: a run has report.html, history.jsonl and `supervisor.metrics_port`",
    "use_wandb": "there is no such setting: a run has report.html, history.jsonl and `supervisor.metrics_port`",
    "logger": "there is no such setting: a run has report.html, history.jsonl and `supervisor.metrics_port`",
}


def meant_by(name: str) -> str | None:
    """Return what to set instead of another system's ``name``, in words, or None where the name is
    not known.
    """
    if name in _SAME:
        return f"that is `{_SAME[name]}` here"
    return _OTHERWISE.get(name)


def other_names() -> frozenset[str]:
    """Return every name that is known."""
    return frozenset({*_SAME, *_OTHERWISE})
