"""The whole configuration: its sections, the sizes that follow from them, and what cannot be combined.

The defaults are the course handout's, for real models; `configs/` holds one YAML file per use case.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from grpo_ray.config.algorithm import AlgorithmConfig
from grpo_ray.config.episodes import GRACE_S, EpisodesConfig
from grpo_ray.config.learner import LearnerConfig, SftConfig
from grpo_ray.config.model import ModelConfig
from grpo_ray.config.reward import Reward, ScorerConfig, secrets_in, term_weights
from grpo_ray.config.run import (
    CheckpointConfig,
    EvaluationConfig,
    PlacementConfig,
    RecoveryConfig,
    RunConfig,
    TrackingConfig,
)
from grpo_ray.config.sampling import DistillationConfig, GeneratorConfig, SamplingConfig
from grpo_ray.config.schedule import BufferConfig, WeightSyncConfig
from grpo_ray.config.section import Section
from grpo_ray.config.task import EpisodesTaskConfig, Task, opens_tag, parts_of


class Config(Section):
    """One run: the tree of its sections."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: Annotated[Task, Field(discriminator="kind")]
    sampling: SamplingConfig = SamplingConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    generator: GeneratorConfig = GeneratorConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    scorer: ScorerConfig = ScorerConfig()
    distillation: DistillationConfig = DistillationConfig()
    buffer: BufferConfig = BufferConfig()
    learner: LearnerConfig = LearnerConfig()
    sft: SftConfig | None = None
    """Supervised steps on demonstrations before the first step."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    placement: PlacementConfig = PlacementConfig()
    tracking: TrackingConfig = TrackingConfig()

    # ---- sizes ----

    @property
    def rollouts_per_step(self) -> int:
        return self.algorithm.prompts_per_step * self.algorithm.samples_per_prompt

    @property
    def replayed_per_step(self) -> int:
        """Groups of a batch that come from earlier batches, once there are any."""
        return round(self.algorithm.prompts_per_step * self.buffer.replay.frac)

    @property
    def largest_group(self) -> int:
        """Samples of a prompt, in training or in validation."""
        return max(self.algorithm.samples_per_prompt, self.evaluation.samples_per_prompt)

    @property
    def fresh_per_step(self) -> int:
        """Groups of a batch that are sampled for it."""
        return self.algorithm.prompts_per_step - self.replayed_per_step

    @property
    def num_oversampled(self) -> int:
        """Groups in flight beyond those that the steps need."""
        return math.ceil(self.fresh_per_step * self.algorithm.oversample_frac)

    @property
    def steps_overtaken(self) -> int:
        """Largest number of steps by which look-ahead can delay a group beyond its turn."""
        return -(-(self.buffer.lookahead - 1) // self.fresh_per_step)

    @property
    def num_updates(self) -> int:
        """Optimizer updates on a whole batch."""
        size = self.algorithm.train_batch_size or self.rollouts_per_step
        return self.algorithm.epochs_per_batch * -(-self.rollouts_per_step // size)

    @property
    def max_token_age(self) -> int:
        """Largest age, in versions, of a token that a step may train on."""
        return self.buffer.replay.max_age if self.replayed_per_step else self.weight_sync.max_lag

    @property
    def episode_tasks(self) -> dict[str, EpisodesTaskConfig]:
        """The parts of the task that are episodes, by `PromptItem.task`."""
        parts = parts_of(self.task).items()
        return {name: part for name, part in parts if isinstance(part, EpisodesTaskConfig)}

    @property
    def rewards(self) -> dict[str, Reward]:
        """The parts' rewards, by `PromptItem.task`; an episode has none to grade with, and returns its own."""
        parts = parts_of(self.task).items()
        return {name: part.reward for name, part in parts if not isinstance(part, EpisodesTaskConfig)}

    @property
    def models(self) -> dict[str, str]:
        """The folders or hub names of the policy's model, unless it is built, and of the teacher, by field."""
        named = {"model.path": self.model.path, "distillation.teacher": self.distillation.teacher}
        return {field: path for field, path in named.items() if path is not None}

    @property
    def secrets(self) -> list[str]:
        """The names of the environment's secrets that rewards and episodes list."""
        own = self.episodes.secrets if self.episode_tasks else ()
        return list(dict.fromkeys([*secrets_in(self.rewards.values()), *own]))

    @property
    def has_only_episodes(self) -> bool:
        """True if no part of the task is single-turn."""
        return len(self.episode_tasks) == len(parts_of(self.task))

    @property
    def turn_silence_s(self) -> float:
        """Seconds after which a Generator that has turns of episodes, and finishes none, is replaced.

        A weight sync pauses all turns for up to twice its own limit, so this is no shorter.
        """
        longest_turn_s = min(self.recovery.group_timeout_s, self.episodes.max_seconds / 2)
        return max(2 * self.weight_sync.phase_timeout_s, longest_turn_s)

    @property
    def gpus_per_generator(self) -> float:
        """GPUs that each Generator reserves in Ray: if colocated, half of the one shared with the Learner."""
        return self.generator.num_gpus / 2 if self.generator.colocated else self.generator.num_gpus

    @property
    def gpus_of_learner(self) -> float:
        """GPUs that each rank of the Learner reserves in Ray: if colocated, half of a Generator's."""
        return self.learner.num_gpus / 2 if self.generator.colocated else self.learner.num_gpus

    def changed(self, **sections: Mapping[str, Any]) -> "Config":
        """Return a copy with other values in some of its sections, which are not checked."""
        found = {name: getattr(self, name).model_copy(update=values) for name, values in sections.items()}
        return self.model_copy(update=found)

    # ---- defaults that follow from other sections ----

    @field_validator("sampling")
    @classmethod
    def _sampling_follows_the_prompts(cls, sampling: SamplingConfig, info: ValidationInfo) -> SamplingConfig:
        task, model = info.data.get("task"), info.data.get("model")
        if task is None or model is None:  # not valid themselves
            return sampling
        # An episode has no template.
        opens = [opens_tag(getattr(each, "prompt", "")) for each in parts_of(task).values()]
        values: dict[str, Any] = {"stop": ("</answer>",)} if any(opens) else {}
        if all(opens):
            values["min_tokens"] = min(4, sampling.max_tokens)
        if model.tiny is not None:
            values["max_tokens"] = max(24, sampling.min_tokens)
        given = sampling.model_fields_set
        return sampling.model_copy(update={name: value for name, value in values.items() if name not in given})

    # ---- combinations ----

    def _conflicts(self) -> Iterator[str]:
        yield from self._conflicts_of_learning()
        yield from self._conflicts_of_weight_syncs()
        yield from self._conflicts_of_colocation()
        yield from self._conflicts_of_batches()
        if self.episode_tasks:
            yield from self._conflicts_of_episodes()
        if self.distillation.teacher is not None:
            yield from self._conflicts_of_distillation()

    def _conflicts_of_learning(self) -> Iterator[str]:
        learner, model, num_steps = self.learner, self.model, self.algorithm.num_steps
        profiled, tracking, engine = learner.profile_steps, self.tracking, self.generator.engine
        buffer_tokens, max_tokens = self.algorithm.overlong_buffer_tokens, self.sampling.max_tokens
        if profiled is not None and profiled[0] > num_steps:
            yield (
                f"learner.profile_steps begins with step {profiled[0]}, but the run ends with step {num_steps} "
                "(algorithm.num_steps); choose earlier steps"
            )
        if learner.lr_schedule == "constant" and learner.min_lr_ratio:
            yield "learner.min_lr_ratio needs a decay; set learner.lr_schedule to linear or cosine"
        if learner.lr_schedule != "constant" and learner.warmup_steps >= num_steps:
            yield (
                f"learner.lr_schedule: a warm-up of {learner.warmup_steps} steps (learner.warmup_steps) leaves "
                f"none of the {num_steps} steps (algorithm.num_steps) for the decay; shorten it, or set "
                "constant"
            )
        if model.attention not in ("auto", "sdpa") and not (learner.num_gpus and model.dtype == "bfloat16"):
            yield (
                f"model.attention: `{model.attention}` runs on GPUs in bfloat16 (learner.num_gpus is "
                f"{learner.num_gpus}, model.dtype {model.dtype}); use `auto`"
            )
        if model.head_dtype != "model" and model.dtype != model.head_dtype and ":" in engine:
            yield (
                f"model.head_dtype: `{model.head_dtype}` works with vLLM and the reference engine; "
                f"generator.engine `{engine}` may compute other logits; set it to `model`"
            )
        if tracking.trackers and tracking.rollouts_every_num_steps and not self.run.save_rollouts:
            yield (
                "tracking.rollouts_every_num_steps needs the run's rollout files; set run.save_rollouts to "
                "true, or tracking.rollouts_every_num_steps to 0"
            )
        is_by_terms = self.algorithm.advantage_kind == "gdpo" and any(map(term_weights, self.rewards.values()))
        has_weights = any(name.endswith("_weight") for name in self.algorithm.advantage_options)
        if buffer_tokens and is_by_terms and not has_weights:
            yield (
                "algorithm.overlong_buffer_tokens: `gdpo` compares the terms of task.reward, and the penalty "
                "belongs to none of them; set it to 0, or choose another algorithm.advantage"
            )
        if self.algorithm.whitens_uncentred and any(each.curriculum for each in parts_of(self.task).values()):
            yield (
                "task.curriculum skips prompts of groups in which every advantage is 0, but "
                f"algorithm.advantage_scale `{self.algorithm.advantage_scale}` gives those others; remove it, "
                "or set algorithm.advantage to `mean`"
            )
        if buffer_tokens >= max_tokens:
            yield (
                f"algorithm.overlong_buffer_tokens ({buffer_tokens}) must be below "
                f"sampling.max_tokens ({max_tokens})"
            )

    def _conflicts_of_weight_syncs(self) -> Iterator[str]:
        sync, generator, learner, adapter = self.weight_sync, self.generator, self.learner, self.model.adapter
        is_vllm = generator.engine == "vllm"
        if sync.transport == "ipc" and not (generator.colocated and generator.num_gpus and is_vllm):
            yield (
                "weight_sync.transport: `ipc` shares weights between Learner and vLLM on one GPU: it needs "
                "generator.colocated, generator.engine `vllm` and a GPU; use `object_store`"
            )
        obstacles = {
            f"a Generator has none (generator.num_gpus is {generator.num_gpus})": not generator.num_gpus,
            f"the Learner has none (learner.num_gpus is {learner.num_gpus})": not learner.num_gpus,
            "the reference engine does not receive on one (generator.engine is torch)": not is_vllm,
            "colocated actors share one, which NCCL refuses (generator.colocated; take `ipc`)": (
                generator.colocated
            ),
        }
        if sync.transport == "nccl" and any(obstacles.values()):
            yield (
                "weight_sync.transport: `nccl` sends weights from the Learner's GPU to a Generator's: "
                f"{'; '.join(_true_of(obstacles))}; use `collective` or `object_store`"
            )
        on_gpus = sync.transport == "ipc" or sync.wire_backend == "nccl"
        for name, is_on in {"checksum": sync.checksum, "delta": sync.delta}.items():
            if is_on and on_gpus:
                yield (
                    f"weight_sync.{name}: the bytes never leave the GPUs with transport `{sync.transport}`; "
                    "set it to false, or use `object_store`"
                )
        if sync.delta and ":" in generator.engine:
            yield (
                f"weight_sync.delta: the engine {generator.engine} would be given differences instead of "
                "weights; set it to false"
            )
        reasons = {
            "weight_sync.in_flight is false": not sync.in_flight,
            "generator.colocated is true": generator.colocated,
            "weight_sync.max_lag is 0": sync.max_lag == 0,
        }
        if not sync.recompute_kv and any(reasons.values()):
            yield (
                f"weight_sync.recompute_kv: false has no effect here, because no request runs during a sync "
                f"({', '.join(_true_of(reasons))}); set it to true"
            )
        if sync.send == "merged":
            return
        if adapter is None:
            yield "weight_sync.send: there is no adapter to send; add model.adapter, or set it to merged"
            return
        obstacles = {
            "vLLM has no DoRA (model.adapter.dora)": adapter.dora,
            "Generators would sample from the base before its quantization (model.base_quantization)": (
                self.model.base_quantization != "none"
            ),
            "the reference engine has no LoRA layers (generator.engine)": not is_vllm,
            "vLLM drops its adapter when it sleeps (generator.colocated)": generator.colocated,
            "vLLM supports ranks up to 512 (model.adapter.rank)": adapter.rank > 512,
        }
        if any(obstacles.values()):
            yield (
                f"weight_sync.send: `adapter` is not possible here: {'; '.join(_true_of(obstacles))}; "
                "use `merged`"
            )

    def _conflicts_of_colocation(self) -> Iterator[str]:
        generator, learner, max_lag = self.generator, self.learner, self.weight_sync.max_lag
        shares = generator.num_gpus, learner.num_gpus
        if not generator.colocated:
            return
        if max_lag:
            yield (
                "generator.colocated: actors that take turns on a device must be synchronous; set "
                f"weight_sync.max_lag to 0 (it is {max_lag})"
            )
        if self.episode_tasks and self.episodes.over_age == "mask":
            yield (
                "episodes.over_age: `mask` lets episodes go on while the Learner trains, but with "
                "generator.colocated no Generator can answer then; set it to drop"
            )
        if any(shares) and shares != (1, 1):
            yield (
                "generator.colocated: each Generator shares one GPU with a rank of the Learner; set "
                f"generator.num_gpus and learner.num_gpus to 1 (they are {shares[0]} and {shares[1]}), or "
                "both to 0 for the CPU"
            )
        if any(shares) and generator.num_generators != learner.num_ranks:
            yield (
                f"generator.colocated: each of the {learner.num_ranks} ranks of the Learner "
                "(learner.num_ranks) shares its GPU with one Generator; set generator.num_generators to the "
                f"same number (it is {generator.num_generators})"
            )

    def _conflicts_of_batches(self) -> Iterator[str]:
        buffer, algorithm, max_lag = self.buffer, self.algorithm, self.weight_sync.max_lag
        replay = buffer.replay
        if replay.frac and not 0 < self.replayed_per_step < algorithm.prompts_per_step:
            yield (
                f"buffer.replay.frac is {replay.frac:g}: at least one of algorithm.prompts_per_step "
                f"({algorithm.prompts_per_step}) groups must be replayed, and one fresh"
            )
        if replay.frac and replay.max_groups < self.replayed_per_step:
            yield (
                f"buffer.replay.max_groups ({replay.max_groups}) must be at least the {self.replayed_per_step} "
                "groups that a batch replays (buffer.replay.frac)"
            )
        if replay.frac and replay.max_age <= max_lag:
            yield (
                f"buffer.replay.max_age ({replay.max_age}) must exceed weight_sync.max_lag ({max_lag}): "
                "a group is at least one version older when it is replayed"
            )
        supply = self.fresh_per_step * min(replay.max_uses - 1, replay.max_age - max_lag)
        if replay.frac and 0 < supply < self.replayed_per_step:
            yield (
                f"buffer.replay.frac is {replay.frac:g}, but a step's new groups allow only {supply} replays: "
                "each max_uses - 1 times, within max_age - weight_sync.max_lag steps; lower it, or raise these"
            )
        if self.steps_overtaken > max_lag:
            yield (
                f"buffer.lookahead is {buffer.lookahead}: a group can come {self.steps_overtaken} steps late; "
                f"weight_sync.max_lag ({max_lag}) must be at least that"
            )
        if buffer.lookahead > 1 and algorithm.oversample_frac:
            yield (
                "buffer.lookahead keeps stragglers for the next step, but algorithm.oversample_frac aborts "
                "them; choose one"
            )

    def _conflicts_of_episodes(self) -> Iterator[str]:
        episodes, stall_s = self.episodes, self.recovery.stall_timeout_s
        if episodes.max_tokens <= self.sampling.max_tokens:
            yield (
                f"episodes.max_tokens ({episodes.max_tokens}) covers a turn's prompt and reply; it must exceed "
                f"sampling.max_tokens ({self.sampling.max_tokens}), the limit of the reply"
            )
        # Nothing else may move while a group is played, or played again after the death of its worker.
        play_s = episodes.num_rounds(self.largest_group) * (episodes.max_seconds + GRACE_S)
        if stall_s <= 2 * play_s:
            yield (
                f"recovery.stall_timeout_s ({stall_s:g}) must exceed twice the {play_s:g} s that a group of "
                f"episodes may take, or a long one looks like a stalled run. Raise it above {2 * play_s:g}, or "
                f"lower episodes.max_seconds ({episodes.max_seconds:g}). If a group's {self.largest_group} "
                "episodes do not run together, you can also raise episodes.max_concurrent "
                f"({episodes.max_concurrent})"
            )
        if (episodes.over_age == "wait") == bool(self.algorithm.oversample_frac):
            yield (
                f"episodes.over_age: `{episodes.over_age}` does not fit algorithm.oversample_frac "
                f"{self.algorithm.oversample_frac:g}: with oversampling no batch waits for old episodes, so "
                "`drop` them or `mask` their old tokens; without it every batch waits (`wait`)"
            )
        if self.algorithm.overlong_buffer_tokens:
            yield (
                "algorithm.overlong_buffer_tokens: it penalizes long responses of one turn; let the episode "
                "function subtract from its reward instead"
            )

    def _conflicts_of_distillation(self) -> Iterator[str]:
        is_vllm, sampling = self.distillation.engine == "vllm", self.sampling
        kl, replay, scale = self.algorithm.kl.placement, self.buffer.replay, self.algorithm.advantage_scale
        uses_of_advantages = (
            (kl != "loss", f"algorithm.kl.placement: `{kl}` changes", "loss"),
            (scale != "group", f"algorithm.advantage_scale: `{scale}` scales", "group"),
            (replay.sampling == "advantage", "buffer.replay.sampling: `advantage` goes by", "uniform"),
        )
        for is_given, use, instead in uses_of_advantages:
            if is_given and not self.distillation.use_reward:
                yield (
                    f"{use} advantages, which distillation.use_reward false replaces with the teacher's; "
                    f"set it to `{instead}`"
                )
        if self.algorithm.dynamic_sampling_tries:
            yield (
                "algorithm.dynamic_sampling_tries replaces groups without signal, but with "
                "distillation.teacher every group has one; set it to 0"
            )
        if any(each.curriculum is not None for each in parts_of(self.task).values()):
            yield (
                "task.curriculum skips prompts of groups without signal, but with distillation.teacher every "
                "group has one; remove it"
            )
        if is_vllm and sampling.temperature != 1.0:
            yield (
                f"sampling.temperature is {sampling.temperature:g}, but vLLM scores given tokens only at "
                "temperature 1; set it to 1, or distillation.engine to `torch`"
            )
        if is_vllm and sampling.min_tokens:
            yield (
                f"sampling.min_tokens is {sampling.min_tokens}: before that length the sampler excludes end "
                "tokens, but vLLM's scores of given tokens do not; set it to 0, or distillation.engine to "
                "`torch`"
            )


def _true_of(facts: Mapping[str, bool]) -> list[str]:
    return [text for text, is_true in facts.items() if is_true]
