"""Names of other libraries, for users who type them: an unknown key that is one of these is explained."""

TRL = {  # of 1.16.0: GRPOConfig and GRPOTrainer
    "max_steps": "algorithm.num_steps", "num_generations": "algorithm.samples_per_prompt",
    "per_device_train_batch_size": "algorithm.prompts_per_step, groups over all devices",
    "max_completion_length": "sampling.max_tokens",
    "max_prompt_length": "task.max_prompt_tokens, with task.long_prompts",
    "lr_scheduler_type": "learner.lr_schedule", "warmup_ratio": "learner.warmup_steps, a number of steps",
    "adam_beta1": "learner.betas, a list of two", "adam_beta2": "learner.betas, a list of two",
    "beta": "algorithm.kl.coefficient, with algorithm.kl.reference: initial", "epsilon": "algorithm.cliprange",
    "epsilon_high": "algorithm.cliprange_high", "delta": "algorithm.dual_clip",
    "num_iterations": "algorithm.epochs_per_batch",
    "scale_rewards": "algorithm.advantage (mean_std, or mean for False), with algorithm.advantage_scale: "
    "batch",
    "loss_type": "algorithm.aggregation (sequence_mean for grpo, token_mean for dapo and bnpo, "
    "constant for dr_grpo), or algorithm.loss: cispo, sapo, luspo, vespo",
    "importance_sampling_level": "algorithm.loss (gspo for sequence)",
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
