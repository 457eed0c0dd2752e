"""A run with all real actors that takes seconds: the torch engine and a tiny random model."""

QUICKSTART = "configs/quickstart.yaml"
SMALL = [
    "generator.engine=torch", "generator.num_cpus=0", "learner.num_cpus=0",
    "model.tiny.hidden_size=32", "model.tiny.num_layers=1", "model.tiny.warmup=null",
    "task.num_train_prompts=24", "task.num_validation_prompts=4", "sampling.max_tokens=6",
    "algorithm.num_steps=8", "algorithm.prompts_per_step=4", "algorithm.samples_per_prompt=2",
    "evaluation.every_num_steps=4",
]  # fmt: skip
