"""Names of settings in TRL, verl, OpenRLHF and prime-rl, and settings that earlier versions had.

Names that mean the same here and there are left out. A removed setting is accepted with a value
that changed nothing, since resolved files of earlier runs contain it. Any other value is refused,
with what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

_NAMES: Final[Mapping[str, str]] = {
    "run.name": "experiment_name run_name",
    "run.dir": "output_dir save_path default_local_dir",
    "run.num_updates": "max_steps total_training_steps",
    "model.path": "model_name model_name_or_path pretrain",
    "model.reference_path": "ref_model",
    "model.dtype": "bf16 torch_dtype param_dtype optimization_dtype",
    "model.gradient_checkpointing": "enable_gradient_checkpointing gradient_checkpointing_enable",
    "data.train": "dataset dataset_name prompt_data prompt_dataset train_files train_dataset",
    "data.evaluation": "eval_dataset val_files",
    "data.columns.question": "prompt_key input_key",
    "data.columns.answer": "answer_key label_key",
    "data.columns.response": "response_key output_key",
    "data.sets.weight": "prompt_data_probs dataset_probs interleave_probs",
    "data.max_prompt_tokens": "max_prompt_length prompt_length prompt_max_len",
    "data.epochs": "num_train_epochs total_epochs num_episodes",
    "data.shuffle": "shuffle_dataset",
    "data.prompt_template": "input_template",
    "data.chat": "apply_chat_template",
    "data.chat_variables": "chat_template_kwargs apply_chat_template_kwargs",
    "data.verifier": "compute_score reward_fn reward_funcs reward_manager",
    "algorithm.name": "adv_estimator advantage_estimator",
    "algorithm.group_size": "n num_generations n_samples_per_prompt rollout_n",
    "algorithm.groups_per_update": "rollout_batch_size",
    "algorithm.clip_low": "epsilon clip_ratio clip_ratio_low eps_clip",
    "algorithm.clip_high": "epsilon_high clip_ratio_high",
    "algorithm.dual_clip": "clip_ratio_c",
    "algorithm.surrogate": "importance_sampling_level policy_loss_type loss_mode",
    "algorithm.loss_aggregation": "loss_type loss_agg_mode",
    "algorithm.normalize_std": "scale_rewards norm_adv_by_std_in_grpo no_advantage_std_norm no_std_norm",
    "algorithm.kl_coefficient": "beta kl_coef init_kl_coef init_coef kl_loss_coef use_kl_loss",
    "algorithm.kl_estimator": "kl_loss_type kl_penalty",
    "algorithm.entropy_coefficient": "entropy_coef entropy_coeff entropy_loss_coef",
    "algorithm.importance": "bypass_mode is_correction_level is_correction_mode",
    "algorithm.importance_cap": "tis_imp_ratio_cap vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
    "vllm_is_truncated_threshold rollout_is_threshold is_correction_threshold",
    "algorithm.importance_floor": "vllm_importance_sampling_clip_min",
    "algorithm.importance_level": "rollout_is vllm_importance_sampling_mode",
    "algorithm.importance_normalize": "rollout_is_batch_normalize",
    "algorithm.rejection": "rollout_rs",
    "algorithm.rejection_upper": "rollout_rs_threshold",
    "algorithm.dynamic_sampling": "filter_groups dynamic_filtering dynamic_filtering_enable",
    "algorithm.max_generation_batches": "max_num_gen_batches",
    "algorithm.gae_lambda": "lam lambd",
    "algorithm.oversampling": "gen_batch_size oversampling_factor",
    "staleness.eta": "staleness_threshold async_queue_size max_off_policy_steps max_off_policy_threshold",
    "generation.max_response_tokens": "max_completion_length max_completion_tokens max_new_tokens "
    "max_response_length response_length generate_max_len",
    "generation.stop_strings": "stop stop_words stop_sequences",
    "generation.num_slots": "max_num_seqs",
    "generation.engine": "use_vllm",
    "generation.vllm.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "generation.vllm.engine_args": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "fleet.generator": "vllm_num_engines num_engines num_infer_gpus",
    "reward.overlong": "overlong_buffer mask_truncated_completions",
    "reward.overlong_cache_tokens": "overlong_buffer_len",
    "reward.overlong_factor": "penalty_factor overlong_penalty_factor",
    "reward.endpoints": "remote_rm_url remote_url reward_api_url",
    "reward.functions": "reward_weights reward_funcs_weights",
    "reward.model.path": "reward_pretrain",
    "value.path": "critic_pretrain",
    "value.learning_rate": "critic_learning_rate",
    "value.pretrain_steps": "critic_warmup freezing_actor_steps freezing_steps",
    "value.clip_low": "cliprange_value value_clip",
    "learner.learning_rate": "lr actor_learning_rate",
    "learner.optimizer": "optim optimizer_type",
    "learner.schedule": "lr_scheduler lr_scheduler_type warmup_style lr_decay_style",
    "learner.schedule_updates": "lr_decay_steps",
    "learner.final_rate_share": "min_lr_ratio min_lr_rate",
    "learner.warmup_updates": "lr_warmup_steps num_warmup_steps",
    "learner.weight_decay": "l2",
    "learner.betas": "adam_betas adam_beta1 adam_beta2",
    "learner.adam_eps": "adam_epsilon",
    "learner.max_grad_norm": "max_norm grad_clip clip_grad",
    "learner.micro_batch_tokens": "micro_train_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu train_max_tokens_per_gpu",
    "learner.compile": "torch_compile use_torch_compile",
    "reference.micro_batch_tokens": "log_prob_micro_batch_size_per_gpu",
    "learner.ranks": "n_gpus_per_node num_gpus_per_node num_train_gpus",
    "learner.deepspeed.stage": "zero_stage",
    "learner.lora.rank": "lora_r lora_rank",
    "learner.lora.alpha": "lora_alpha",
    "checkpoint.every_updates": "save_freq save_steps",
    "checkpoint.keep": "save_total_limit keep_last max_ckpt_num max_actor_ckpt_to_keep",
    "evaluation.every_updates": "test_freq eval_steps",
    "evaluation.patience": "early_stopping_patience",
    "evaluation.keep_best": "load_best_model_at_end",
    "evaluation.main": "metric_for_best_model",
    "evaluation.samples_per_prompt": "num_generations_eval eval_n_samples_per_prompt",
    "evaluation.temperature": "eval_temperature",
}
"""The names of each setting in other systems, separated by spaces."""
_SETTING: Final = {name: setting for setting, names in _NAMES.items() for name in names.split()}

_REASONS: Final[Mapping[str, str]] = {
    "gradient_accumulation_steps steps_per_generation": "there is no such setting: gradients add up over micro-batches of "
    "`learner.micro_batch_tokens`, and `algorithm.num_minibatches` is the optimiser steps of an update",
    "per_device_train_batch_size train_batch_size batch_size ppo_mini_batch_size generation_batch_size": "an update is "
    "`algorithm.groups_per_update` prompts of `algorithm.group_size` responses, in `algorithm.num_minibatches` optimiser steps",
    "num_iterations ppo_epochs max_epochs": "there is no such setting: each response is trained on once; the optimiser steps "
    "that an update is cut into are `algorithm.num_minibatches`",
    "partial_rollout partial_rollout_enable": "there is no such setting: unfinished responses always continue with the new "
    "weights",
    "min_lr": "a schedule's last rate is given as a share of the learning rate: set `learner.final_rate_share`",
    "warmup_ratio lr_warmup_ratio lr_warmup_steps_ratio": "a warm-up is given in updates, not as a share: "
    "set `learner.warmup_updates`",
    "eps_clip_low_high": "set `algorithm.clip_low` and `algorithm.clip_high`",
    "epsilon_low": "set `algorithm.clip_low`",
    "use_remove_padding packing_samples": "there is no such setting: batches are always packed without padding",
    "report_to use_wandb logger": "there is no such setting: a run has report.html, history.jsonl and "
    "`supervisor.metrics_port`",
}
"""What to do instead, by names that correspond to no setting here, separated by spaces."""
_OTHERWISE: Final = {name: words for names, words in _REASONS.items() for name in names.split()}


def meant_by(name: str) -> str | None:
    """Return what to set instead of another system's ``name``; None for an unknown name."""
    if name in _SETTING:
        return f"that is `{_SETTING[name]}` here"
    return _OTHERWISE.get(name)


def other_names() -> frozenset[str]:
    return frozenset({*_SETTING, *_OTHERWISE})


@dataclass(frozen=True, slots=True)
class Removed:
    idle: tuple[object, ...]
    """Values that changed nothing, so that a run is the same without the setting."""
    why: str


_ELASTIC = (
    "Headrace no longer creates autoscalers. Leave it out, and let your own scale the elastic Deployments by "
    "`headrace_queue_depth` and `headrace_learner_input_wait_ratio`, or set fleet.max_generators"
)
EMULATED: Final = (
    "the emulated engines are no longer part of Headrace; a checkout has them in ops/emulated. Set generation.engine to "
    "ops.emulated.build:generation, the backends of learner, reference and value to its :training, :scoring and :value, and "
    "write their settings in [engines.settings]"
)
_EMULATION: Final[Mapping[str, object]] = {
    "lengths": "lognormal", "median_tokens": 256.0, "tail": 1.0, "decode_base_s": 0.0, "decode_slot_s": 0.0,
    "prefill_token_s": 0.0, "weights_load_s": 0.0, "load_s": 0.0, "weights_kb": 4, "scoring_token_s": 0.0, "step_s": 0.0,
    "training_token_s": 0.0, "value_cost": 1.0,
}  # fmt: skip
REMOVED: Final[Mapping[str, Removed]] = {
    "algorithm.prompt_filter": Removed(
        ("none",),
        "it judged a prompt by its first two scored responses, the shortest, so training saw mostly short ones. Leave it "
        "out, or use name vapo with dynamic_sampling, which judges whole groups",
    ),
    "checkpoint.snapshot_peers": Removed(
        ("auto", "off"),
        "joined hosts keep no copies of snapshots. Leave it out; a learner whose host was restarted goes on from its newest "
        "checkpoint: write one more often by checkpoint.every_updates and every_s",
    ),
    "ledger.shards": Removed(
        ([],),
        "one run has one server. Leave it out. One server carries about 2,000 generators at windows of 1,024 tokens, and more "
        "at longer ones (generation.window_tokens); several runs spread over the nodes of a Redis Cluster "
        "(ledger.url = redis+cluster://HOST,HOST)",
    ),
    "emulation.journal": Removed((), EMULATED),
    **{f"emulation.{name}": Removed((default,), EMULATED) for name, default in _EMULATION.items()},
    "launch.kubernetes.autoscaler": Removed(("hpa",), _ELASTIC),
    "launch.kubernetes.max_replicas": Removed((16,), _ELASTIC),
    "launch.kubernetes.queue_depth": Removed((64,), _ELASTIC),
    "launch.ray.max_restarts": Removed(
        (-1,),
        "Ray restarts no worker. Leave it out: the supervisor starts a lost one again, as supervisor.max_restarts allows",
    ),
}


def drop_idle(tree: dict[str, Any]) -> None:
    """Delete removed settings from a configuration's tree, if their value changed nothing."""
    for key, removed in REMOVED.items():
        *sections, name = key.split(".")
        held: Any = tree
        for section in sections:
            held = cast("dict[str, Any]", held).get(section) if isinstance(held, dict) else None
        if isinstance(held, dict) and cast("dict[str, Any]", held).get(name) in removed.idle:
            del held[name]
    if not tree.get("emulation", True):
        del tree["emulation"]
