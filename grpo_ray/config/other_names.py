"""Names of other libraries, for users who type them: an unknown key that is one of these is explained."""

TRL = {  # of 1.16.0: GRPOConfig and GRPOTrainer
    "max_steps": "algorithm.num_steps", "num_generations": "algorithm.samples_per_prompt",
    "per_device_train_batch_size": "algorithm.prompts_per_step, groups over all devices",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "task.max_prompt_tokens, with task.long_prompts",
    "lr_scheduler_type": "learner.lr_schedule", "warmup_ratio": "learner.warmup_steps, a number of steps",
    "adam_beta1": "learner.betas, a list of two", "adam_beta2": "learner.betas, a list of two",
    "beta": "algorithm.kl.coefficient, with algorithm.kl.reference: initial and "
    "algorithm.kl.estimator: unbiased",
    "use_bias_correction_kl": "algorithm.kl.estimator (unbiased for True, k3 for False)",
    "epsilon": "algorithm.cliprange (none for cispo)", "delta": "algorithm.dual_clip",
    "epsilon_high": "algorithm.cliprange_high (for cispo TRL's value minus 1)",
    "num_iterations": "algorithm.epochs_per_batch",
    "num_train_epochs": "algorithm.num_steps, a number of steps",
    "generation_batch_size": "algorithm.prompts_per_step, groups instead of completions",
    "steps_per_generation": "algorithm.train_batch_size, responses per update",
    "gradient_accumulation_steps": "algorithm.train_batch_size, responses per update",
    "num_generations_eval": "evaluation.samples_per_prompt", "entropy_coef": "algorithm.entropy_bonus",
    "top_k": "sampling.top_p, as there is no top_k",
    "top_entropy_quantile": "algorithm.token_selection: top_entropy",
    "vllm_importance_sampling_mode": "algorithm.off_policy_correction",
    "vllm_importance_sampling_clip_max": "algorithm.correction_cap",
    "off_policy_mask_threshold": "algorithm.off_policy_correction: opsm",
    "multi_objective_aggregation": "algorithm.advantage: gdpo, for normalize_then_sum",
    "sync_ref_model": "algorithm.kl.reference: ema, or algorithm.kl.refresh_every_num_steps",
    "vllm_tensor_parallel_size": "generator.num_gpus", "max_staleness": "weight_sync.max_lag",
    "eval_strategy": "evaluation.every_num_steps",
    "scale_rewards": "algorithm.advantage (mean_std, or mean for False), with algorithm.advantage_scale: "
    "batch",
    "loss_type": "algorithm.aggregation (sequence_mean for grpo, token_mean for dapo and bnpo, "
    "constant for dr_grpo), or algorithm.loss: cispo, sapo, luspo, vespo",
    "importance_sampling_level": "algorithm.loss (gspo for sequence, with algorithm.cliprange and "
    "algorithm.aggregation, of which gspo has defaults of its own)",
    "mask_truncated_completions": "algorithm.mask_truncated",
    "reward_funcs": "task.reward, a name, module:function or a list of terms",
    "reward_weights": "task.reward, a list of {reward, weight}", "vllm_mode": "generator.colocated",
    "vllm_gpu_memory_utilization": "generator.gpu_memory_utilization", "peft_config": "model.adapter",
    "environment_factory": "task.kind: episodes, with trl_episode (docs/environments.md)",
    "report_to": "tracking.trackers", "eval_steps": "evaluation.every_num_steps",
    "save_steps": "checkpoint.every_num_steps", "save_total_limit": "checkpoint.keep",
}  # fmt: skip
OTHER_NAMES = {"TRL": TRL, "torch": {"lr": "learner.learning_rate", "eps": "learner.adam_eps"}}
"""The keys that other libraries' names mean, by library, each with what else to know."""


def other_name(name: str) -> tuple[str, str] | None:
    """Return the key that another library's name means, and an explanation; None for a name of no library."""
    for library, names in OTHER_NAMES.items():
        if name in names:
            return names[name].split()[0].rstrip(",:"), f"{library}'s {name} is {names[name]}"
    return None
