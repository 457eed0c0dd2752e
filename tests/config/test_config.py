"""Loading a configuration: each error names its path, the given value and the allowed ones."""

import re
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.config import AlgorithmConfig, Config
from grpo_ray.config.loading import ConfigError, find_config, load_config
from grpo_ray.config.schema import OTHER_NAMES, SWITCHES, _keys, idle_keys, leaves
from grpo_ray.config.task import OPENING_TAGS, TAGGED
from grpo_ray.objectives import Objective
from grpo_ray.tasks.prompts import load_template, template_names

CONFIGS = Path(__file__).parents[2] / "configs"
MINIMAL = "model: {tiny: {}}\ntask: {kind: sorting}\n"


def write(folder: Path, text: str = MINIMAL, name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def error_of(path: str | Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_defaults_are_the_handouts(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "model: {path: m}\ntask: {kind: gsm8k}"))
    algorithm, learner = config.algorithm, config.learner
    assert config.model.trust_remote_code is False
    assert (algorithm.num_steps, algorithm.samples_per_prompt, config.rollouts_per_step) == (200, 8, 256)
    assert (algorithm.advantage_eps, algorithm.clip_epsilons) == (1e-6, (0.2, 0.2))
    assert (config.sampling.temperature, config.sampling.top_p) == (1.0, 1.0)
    assert (config.sampling.min_tokens, config.sampling.max_tokens) == (4, 1024)
    assert config.sampling.stop == ("</answer>",)
    assert (learner.learning_rate, learner.betas) == (1e-5, (0.9, 0.95))
    assert (learner.weight_decay, learner.max_grad_norm) == (0.0, 1.0)
    assert config.generator.gpu_memory_utilization == 0.85


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("{kind: gsm8k}", (4, 1024, ("</answer>",))),
        ("{kind: gsm8k, prompt: chat}", (0, 1024, ())),
        ("{kind: gsm8k, prompt: question_only}", (0, 1024, ())),
        ("{kind: sorting, prompt: tagged.prompt}", (4, 1024, ("</answer>",))),
        ("{kind: sorting, prompt: plain.prompt}", (0, 1024, ())),
        ("{kind: sorting, prompt: missing.prompt}", (0, 1024, ())),
        ("{kind: episodes, episode: a:b, examples: c:d}", (0, 1024, ())),
        (
            "{kind: mixture, parts: {a: {task: {kind: sorting}}, b: {task: {kind: sorting, prompt: chat}}}}",
            (0, 1024, ("</answer>",)),
        ),
        ("{kind: mixture, parts: {a: {task: {kind: sorting}}}}", (4, 1024, ("</answer>",))),
    ],
)
def test_sampling_follows_the_prompts(here: Path, task: str, expected: tuple[object, ...]) -> None:
    Path("tagged.prompt").write_text("Example: <answer> 3 </answer>\n{question}\n<answer>\n")
    Path("plain.prompt").write_text("Give <answer> 3 </answer>.\n{question}\nAnswer:")
    sampling = load_config(write(here, f"model: {{path: m}}\ntask: {task}")).sampling
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop) == expected
    given = ["sampling.min_tokens=7", "sampling.max_tokens=9", "sampling.stop=[x]"]
    sampling = load_config(write(here, f"model: {{path: m}}\ntask: {task}"), given).sampling
    assert (sampling.min_tokens, sampling.max_tokens, sampling.stop) == (7, 9, ("x",))


def test_the_bundled_templates_that_end_with_a_tag_are_known() -> None:
    ends = {name: load_template(name).render("").rstrip().endswith(OPENING_TAGS) for name in template_names()}
    assert {name for name, is_tagged in ends.items() if is_tagged} == set(TAGGED)


def test_episodes_among_the_parts_of_a_task(tmp_path: Path) -> None:
    games, sums = "{kind: episodes, episode: a:b, examples: c:d}", "{kind: arithmetic}"
    mixed = f"{{kind: mixture, parts: {{one: {{task: {games}}}, two: {{task: {sums}}}}}}}"
    for task, names, is_all in ((games, [""], True), (sums, [], False), (mixed, ["one"], False)):
        config = load_config(write(tmp_path), [f"task={task}"])
        assert ([*config.episode_tasks], config.has_only_episodes) == (names, is_all)


def test_a_tiny_model_has_short_responses(tmp_path: Path) -> None:
    assert load_config(write(tmp_path)).sampling.max_tokens == 24
    sampling = load_config(write(tmp_path), ["sampling.min_tokens=30"]).sampling
    assert (sampling.min_tokens, sampling.max_tokens) == (30, 30)
    assert load_config(write(tmp_path), ["sampling.max_tokens=2"]).sampling.min_tokens == 2


@pytest.mark.parametrize(
    ("fields", "epsilons", "aggregation"),
    [
        ({}, (0.2, 0.2), "sequence_mean"),
        ({"loss": "gspo"}, (3e-4, 4e-4), "sequence_mean"),
        ({"loss": "gspo", "cliprange": 0.1}, (0.1, 0.1), "sequence_mean"),
        ({"cliprange_high": 0.28, "aggregation": "constant"}, (0.2, 0.28), "constant"),
        ({"loss": "cispo"}, (1.0, 4.0), "token_mean"),  # no floor
        ({"loss": "cispo", "cliprange": 0.2, "aggregation": "sequence_mean"}, (0.2, 0.2), "sequence_mean"),
        ({"loss": "cispo", "cliprange_high": 2}, (1.0, 2.0), "token_mean"),
    ],
)
def test_defaults_by_loss(fields: dict[str, Any], epsilons: tuple[float, float], aggregation: str) -> None:
    algorithm = AlgorithmConfig(**fields)
    assert algorithm.clip_epsilons == epsilons
    assert algorithm.loss_aggregation == Objective.from_config(algorithm).aggregation == aggregation


def test_overrides(tmp_path: Path) -> None:
    overrides = [
        "learner.learning_rate=1e-4",  # YAML 1.1 reads this as text; pydantic makes it a number
        "model.tiny.warmup=null",
        "run.name=a=b",
        'sampling.stop=["x", "y"]',
        "learner.betas=[0.5, 0.6]",
        "task={kind: file, train_path: a.jsonl, validation_path: b.jsonl}",
        "task.answer_marker=####",
    ]
    config = load_config(write(tmp_path), overrides)
    assert (config.learner.learning_rate, config.learner.betas) == (1e-4, (0.5, 0.6))
    assert config.model.tiny.warmup is None
    assert (config.run.name, config.sampling.stop) == ("a=b", ("x", "y"))
    assert (config.task.kind, config.task.answer_marker) == ("file", "####")
    # The model is swapped.
    path = write(tmp_path)
    assert "model: give exactly one of `path`" in error_of(path, ("model.path=Qwen/Qwen2.5-Math-1.5B",))
    config = load_config(path, ["model.path=Qwen/Qwen2.5-Math-1.5B", "model.tiny=null"])
    assert config.model.path == "Qwen/Qwen2.5-Math-1.5B"
    assert load_config(path, ["model.tiny=null", "model.tiny={}"]) == load_config(path)


REPLAY = "buffer.replay.frac=0.5"
KEPT_KV = "weight_sync.recompute_kv=false"
COLOCATED = "generator.colocated=true weight_sync.max_lag=0"
WHITENED_RAW = "advantage_scale=whiten_tokens advantage=raw"
KL_IN_REWARD = "kl.reference=initial kl.coefficient=0.1 kl.placement=reward"
KL_TO_GO = f"{KL_IN_REWARD} kl.placement=reward_to_go"
ON_ONE_GPU = f"{COLOCATED} generator.num_gpus=1 learner.num_gpus=1"
ON_TWO_GPUS = "weight_sync.transport=nccl generator.num_gpus=1 learner.num_gpus=1"
ARGS = "generator.engine_args"
ADAPTER_SENT = "weight_sync.send=adapter model.adapter.rank=4"
TAUGHT = "distillation.teacher=/some/where distillation.engine=torch"
TAUGHT_BY_VLLM, TAUGHT_ALONE = f"{TAUGHT} distillation.engine=vllm", f"{TAUGHT} distillation.use_reward=false"


def refuses(folder: Path, overrides: str, parts: str) -> None:
    """Check that the message has the parts, in this order; ` ... ` stands for any text between them."""
    message = error_of(write(folder), tuple(overrides.split()))
    assert re.search(".*".join(map(re.escape, parts.split(" ... "))), message, re.DOTALL), message
    assert "sorting.num" not in message  # the union's tag is not part of a path


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ("learner.lerning_rate=1", "learner.lerning_rate: unknown key; did you mean learner.learning_rate?"),
        ("lerner.learning_rate=1", "lerner: unknown key; did you mean learner?"),
        (f"run.seed={'x' * 999}", f"run.seed: '{'x' * 199} is not valid; allowed: integer"),
        ("run.zzz=1", "run.zzz: unknown key; allowed: name, output_dir"),
        ("zzz=1", "zzz: unknown key; docs/configuration.md lists every key"),
        ("task.num_digit=4", "task.num_digit: unknown key; did you mean task.num_digits?"),
        ("task.train_path=a", "task.train_path: unknown key; allowed: prompt, system_prompt, reward,"),
        ("model.tiny.warmup.steps=4", "warmup.steps: unknown key; did you mean model.tiny.warmup.num_steps?"),
        ("learning_rate=1", "  learning_rate: unknown key; did you mean learner.learning_rate or sft.learn"),
        ("learner.num_gpu=1", "num_gpu: unknown key; did you mean learner.num_gpus or learner.num_cpus?"),
        ("kl.coefficient=1", "  kl: unknown key; did you mean algorithm.kl?"),
        ("num_gpus=1", "did you mean generator.num_gpus, distillation.num_gpus or learner.num_gpus?"),
        ("algorithm.temperature=1", "temperature: unknown key; did you mean sampling.temperature?"),
        ("algorithm.beta=0.04", "algorithm.beta: unknown key; TRL's beta is algorithm.kl.coefficient, with"),
        ("sampling.top_k=5", "TRL's top_k is sampling.top_p, as there is no top_k"),
        ("learner.lr=1e-4", "learner.lr: unknown key; torch's lr is learner.learning_rate"),
        ("learner.learning_rate=fast", "learner.learning_rate: 'fast' is not valid; allowed: number >= 0"),
        ("learner.learning_rate=.nan", "learner.learning_rate: nan is not valid; allowed: number >= 0"),
        ("learner.betas=[0.1,2]", "learner.betas[1]: 2 is not valid; allowed: number >= 0 and < 1"),
        ("learner.betas=[0.1]", "learner.betas[1]: required, but not given; allowed: number >= 0 and < 1"),
        ("learner.betas=0.1", "learner.betas: 0.1 is not valid; allowed: a list of 2: number >= 0 and < 1,"),
        ("learner.cpu_cores=[]", "learner.cpu_cores: an empty list leaves no core to run on; name at"),
        ("generator.max_model_len=0", "generator.max_model_len: 0 is not valid; allowed: integer > 0 or null"),
        ("generator.engine=sglang", "'sglang' is not valid; allowed: vllm, torch, or a function of your own"),
        (f"{ARGS}.hf_overrides=1",
         f"{ARGS}: hf_overrides is decided by the run ... set model.head_dtype for its head_dtype"),
        (f"{ARGS}.tensor_parallel_size=1",
         f"{ARGS}: tensor_parallel_size is decided by the run ... set generator.num_gpus"),
        (f"{ARGS}.logprobs_mode=1", f"{ARGS}: logprobs_mode is decided by the run ... "
         "behaviour logprobs are taken at the sampling temperature"),
        (f"{ARGS}.load_format=1", f"{ARGS}: load_format is decided by the run ... never from a pickle"),
        ("model.adapter.rank=0", "model.adapter.rank: 0 is not valid; allowed: integer > 0"),
        ("model.adapter={} model.adapter.target_modules=[]", "an empty list adapts nothing"),
        ("distillation.coefficient=0", "distillation.coefficient: 0 is not valid; allowed: number > 0"),
        ("sampling.temperature=0.005", "sampling.temperature: 0.005 is not valid; allowed: number >= 0.01"),
        ("sampling.temperature=2.1", "temperature: 2.1 is not valid; allowed: number >= 0.01 and <= 2"),
        ("weight_sync.max_lag=1001", "max_lag: 1001 is not valid; allowed: integer >= 0 and <= 1000"),
        ("algorithm.samples_per_prompt=20000", "20000 is not valid; allowed: integer >= 1 and <= 16384"),
        ("sampling.top_p=0.9", "sampling: top_p is 0.9"),
        ("sampling.stop=x", "sampling.stop: 'x' is not valid; allowed: a list, each element text"),
        ("run=null", "run: None is not valid; allowed: a mapping of name, output_dir"),
        ("run.name=5", "run.name: 5 is not valid; allowed: text or null"),
        (r'run.name="a\0b"', "run.name: a path cannot contain a null character"),
        ("model.tiny.hidden_size=130", "model.tiny: hidden_size (130) must be a multiple"),
        ("task.num_digits=99", "task.num_digits: 99 is not valid; allowed: integer >= 2 and <= 9"),
        ("task.kind=sums", "task.kind: 'sums' is not valid; allowed: sorting, ... math, episodes, mixture"),
        ("task={}", "task.kind: required, but not given; allowed: sorting, arithmetic,"),
        ("task=5", "task: 5 is not valid; allowed: a mapping of kind (sorting, arithmetic,"),
        ("task.kind=file", "task.train_path: required, but not ... text ... task.validation_path: req"),
        ("learner", "override `learner`: write it as section.key=value"),
        ("learner..x=3", "override `learner..x=3`: write it as section.key=value"),
        ("run.seed=[1", "override `run.seed=[1`: line 1 ... not valid YAML"),
        ("task.kind.x=1", "override `task.kind.x=1`: `task.kind` is 'sorting', which has no keys"),
        ("run.seed=-1 run.nam=x oops", "3 problems ... override `oops` ... run.seed: -1 ... run.nam: unknown"),
        # Settings that cannot be combined:
        ("buffer.replay.frac=0.001", "replay.frac is 0.001: at least one of algorithm.prompts_per_step (32)"),
        ("buffer.replay.frac=0.8 buffer.replay.max_uses=2", "a step's new groups allow only 6 replays"),
        (f"{REPLAY} buffer.replay.max_age=1", "replay.max_age (1) must exceed weight_sync.max_lag (1)"),
        (f"{REPLAY} buffer.replay.max_groups=15", "replay.max_groups (15) must be at least the 16 groups"),
        ("buffer.lookahead=34", "buffer.lookahead is 34: a group can come 2 steps late ... (1)"),
        ("buffer.lookahead=2 algorithm.oversample_frac=0.1", "buffer.lookahead keeps strag ... choose one"),
        ("generator.colocated=true", "generator.colocated ... set weight_sync.max_lag to 0 (it is 1)"),
        (f"{ON_ONE_GPU} generator.num_generators=2", "each of the 1 ranks ... the same number (it is 2)"),
        ("weight_sync.transport=ipc", "weight_sync.transport: `ipc` ... use `object_store`"),
        (f"{ON_ONE_GPU} weight_sync.transport=ipc weight_sync.delta=true", "never leave the GPUs with"),
        ("weight_sync.transport=nccl learner.num_gpus=0", "`nccl` ... the Learner has none ... use"),
        ("weight_sync.delta=true generator.engine=mine:Engine", "mine:Engine would be given differences"),
        (f"{ON_TWO_GPUS} {COLOCATED}", "colocated actors share one, which NCCL refuses (generator.colocated;"),
        (f"{ON_TWO_GPUS} weight_sync.checksum=true", "weight_sync.checksum: the bytes never leave the GPUs"),
        (f"{KEPT_KV} weight_sync.in_flight=false", "false has no effect ... (weight_sync.in_flight is false)"),
        (f"{KEPT_KV} {COLOCATED}", "(generator.colocated is true, weight_sync.max_lag is 0)"),
        ("sampling.min_tokens=2000 sampling.max_tokens=24", "min_tokens (2000) must not exceed max"),
        ("task.curriculum={} algorithm.advantage_scale=whiten_tokens algorithm.advantage=raw",
         "task.curriculum skips prompts ... `whiten_tokens` ... remove it, or set algorithm.advantage to"),
        ("learner.lr_schedule=linear learner.warmup_steps=200", "a warm-up of 200 ... leaves none of the 200"),
        ("algorithm.advantage=gdpo algorithm.overlong_buffer_tokens=3 "
         'task.reward=[{"reward":"exact_match"},{"reward":"brevity"}]',
         "overlong_buffer_tokens: `gdpo` compares the terms of task.reward ... set it to 0"),
        ("algorithm.entropy_target=0.5 algorithm.entropy_bonus=2", "entropy_bonus (2), from which ... max (1)"),
        ("learner.min_lr_ratio=0.1", "learner.min_lr_ratio needs a decay; set learner.lr_schedule to"),
        ("tracking.trackers=[wandb,wandb]", "tracking.trackers: wandb, wandb: name each tracker once"),
        ("tracking.project=''", "tracking.project: give the project a name"),
        ("tracking.mlflow_uri=https://me:secret@host/", "mlflow_uri: the address contains a password"),
        (f"generator.engine=torch {ARGS}.quantization=fp8",
         "generator: engine_args are for vLLM, but engine is `torch`"),
        ("generator.engine=a:B model.head_dtype=float32 model.dtype=bfloat16",
         "model.head_dtype: `float32` ... generator.engine `a:B` may compute other logits"),
        ("learner.compile=true learner.gradient_checkpointing=selective",
         "with learner.compile choose none or full"),
        ("learner.moments=bfloat16 learner.betas=[0.9,0.999]", "moments: ... learner.betas to at most 0.99"),
        ("model.base_quantization=nf4", "base_quantization: nf4 weights cannot be trained; add model.adapter"),
        ("weight_sync.send=adapter", "weight_sync.send: there is no adapter to send"),
        (f"{ADAPTER_SENT} model.adapter.dora=true", "weight_sync.send: ... vLLM has no DoRA"),
        (f"{ADAPTER_SENT} model.adapter.rank=513", "weight_sync.send: ... ranks up to 512"),
        (f"{ADAPTER_SENT} model.base_quantization=nf4", "weight_sync.send: ... before its quantization"),
        (f"{ADAPTER_SENT} generator.engine=torch", "weight_sync.send: ... reference engine has no LoRA"),
        (f"{ADAPTER_SENT} {COLOCATED} generator.num_gpus=0 learner.num_gpus=0",
         "weight_sync.send: ... drops its adapter"),
        (f"{TAUGHT} algorithm.dynamic_sampling_tries=2", "algorithm.dynamic_sampling_tries ... set it to 0"),
        (f"{TAUGHT} task.curriculum={{}}", "task.curriculum ... remove it"),
        (f"{TAUGHT_BY_VLLM} sampling.temperature=0.7", "sampling.temperature is 0.7, but vLLM"),
        (TAUGHT_BY_VLLM, "sampling.min_tokens is 4: ... set it to 0"),
        (f"{TAUGHT_BY_VLLM} distillation.engine_args.tensor_parallel_size=2",
         "distillation.engine_args: tensor_parallel_size is decided by the run; set distillation.num_gpus"),
        (f"{TAUGHT_ALONE} algorithm.advantage=mean algorithm.advantage_scale=batch",
         "algorithm.advantage_scale: `batch` scales advantages, which ... set it to `group`"),
        (f"{TAUGHT_ALONE} algorithm.advantage=mean algorithm.kl.reference=initial algorithm.kl.coefficient=1 "
         "algorithm.kl.placement=reward",
         "algorithm.kl.placement: `reward` changes advantages, which ... set it to `loss`"),
        (f"{TAUGHT_ALONE} buffer.replay.frac=0.2 buffer.replay.sampling=advantage",
         "buffer.replay.sampling: `advantage` goes by advantages, which ... set it to `uniform`"),
        ("task.kind=keywords task.num_keywords=[3,2]",
         "num_keywords is [3, 2]: give the minimum, then the maximum"),
        ("task.kind=keywords task.train_path=a",
         "task: give both of train_path and validation_path, or neither"),
        ("task.kind=keywords task.validation_path=a",
         "task: give both of train_path and validation_path, or neither"),
        ("task.kind=keywords task.train_path=a task.validation_path=b task.keywords_path=c",
         "keywords_path is for generated"),
        ("tracking.trackers=[wandb] run.save_rollouts=false", "tracking.rollouts_every_num_steps needs"),
    ],
)  # fmt: skip
def test_wrong_values(tmp_path: Path, overrides: str, parts: str) -> None:
    refuses(tmp_path, overrides, parts)


@pytest.mark.parametrize(
    ("fields", "parts"),
    [
        ("loss=ppo", ".loss: 'ppo' is not valid; allowed: no_baseline, reinforce_with_baseline,"),
        ("loss=my.losses", "or a function of your own as `module:function`"),
        ("mask_truncated=maybe", ".mask_truncated: 'maybe' is not valid; allowed: true or false"),
        ("samples_per_prompt=1", ": samples_per_prompt is 1: a group needs at least 2"),
        ("train_batch_size=100", ": train_batch_size (100) must divide ... (256)"),
        ("dual_clip=3 loss=gspo", "dual_clip works only with `grpo_clip` ... `gspo`"),
        ("dual_clip=1.2 cliprange_high=0.28", "dual_clip (1.2) must be at least 1 + cliprange_high = 1.28"),
        ("off_policy_correction=[veto,tis]", ".off_policy_correction[1]: 'tis' is not valid; allowed: none"),
        ("off_policy_correction=[veto,none]", "off_policy_correction: ['veto', 'none'] is not a"),
        ("off_policy_correction=[]", "off_policy_correction: [] is not a list of different"),
        ("off_policy_correction=3", ".off_policy_correction: 3 is not valid; allowed: "),
        ("off_policy_correction=mask_band", "weights tokens by proximal ... set old_log_probs to `proximal`"),
        ("correction_band=[2,1]", "correction_band is (2, 1): the first must be the smaller"),
        ("loss=ipo cliprange=0.2", "cliprange: the loss `ipo` has no clip range"),
        ("dynamic_sampling_metric=answer", "dynamic_sampling_metric: `answer` has no effect"),
        ("advantage=best", ".advantage: 'best' is not valid; allowed: mean_std, ... `module:function`"),
        ("advantage_scale=batch", "`batch` needs ... to `mean` or `leave_one_out` (it is `mean_std`)"),
        ("advantage_scale=whiten_tokens loss=no_baseline", "takes raw rewards ... `reinforce_with_baseline`"),
        (f"{WHITENED_RAW} dynamic_sampling_tries=1", ": dynamic_sampling_tries drops groups ... set it to 0"),
        ("advantage=max_rl overlong_buffer_tokens=8", "`max_rl` divides by the mean reward ... set it to 0"),
        ("overlong_buffer_tokens=24", ".overlong_buffer_tokens (24) must be below sampling.max_tokens (24)"),
        ("kl.coefficient=0.1", ".kl: coefficient needs a reference"),
        ("kl.reference=initial kl.placement=reward", ".kl: placement `reward` needs a coefficient above 0"),
        ("kl.reference=ema kl.refresh_every_num_steps=3", ".kl: refresh_every_num_steps needs reference"),
        (KL_IN_REWARD, "`mean_std` divides by the group's spread ... would have no effect ... raw, mean"),
        (f"{KL_IN_REWARD} advantage=gdpo", "kl.placement: `gdpo` divides by the group's spread"),
        (f"{KL_IN_REWARD} advantage=max_rl", "`max_rl` is for rewards of 0 and 1 ... kl.placement to `loss`"),
        (f"{KL_IN_REWARD} advantage=mean mask_truncated=true", ": kl.placement: `reward` needs the KL of all"),
        (KL_TO_GO, ": kl.placement: `reward_to_go` is subtracted from ... `mean_std` rescales ... raw, mean,"),
        (f"{KL_TO_GO} advantage=mean advantage_scale=batch", ": advantage_scale: kl.placement `reward_to_go`"),
    ],
)
def test_wrong_algorithms(tmp_path: Path, fields: str, parts: str) -> None:
    refuses(tmp_path, " ".join(f"algorithm.{field}" for field in fields.split()), f"algorithm ... {parts}")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the file is empty; it must be a mapping of run, model, task"),
        ("- 1\n- 2\n", "the file holds a list; it must be a mapping"),
        ("just text", "the file holds a str"),
        ("model: {tiny: {}}\ntask: [1\n", "line 3, column 1: not valid YAML"),
        ("model:\n\ttiny: {}\n", "line 2, column 1: not valid YAML"),
        (MINIMAL + "model: {path: x}\n", "line 3: `model` was already given on line 1"),
        ("run: !!python/object:os.system {}\n", "not valid YAML"),
        ("task: {kind: sorting}\n", "model: required, but not given; allowed: a mapping of path, tiny"),
        (MINIMAL + "5: 6\n", "5: unknown key; docs/configuration.md"),
        (MINIMAL + "[1, 2]: 6\n", "not valid YAML"),
        (MINIMAL + "run: {name: 2024-13-45}\n", "not valid YAML: month must be in 1..12; put text in quotes"),
        (MINIMAL + "run: {name: 2024-01-05}\n", "; to give it as text, put it in quotes"),
        (MINIMAL + "run: {output_dir: ~nobody_4711/runs}\n", "run.output_dir: there is no home folder of"),
        (MINIMAL + "generator: {engine_args: {1: 2}}\n", "the name 1 is not text; put it in quotes"),
        (MINIMAL + "learner: {learning_rate: yes}\n", "learner: learning_rate is yes, which is not a number"),
        (MINIMAL + "sampling: {stop: ['']}\n", "sampling.stop[0]: '' is not valid"),
        (MINIMAL + "distillation: {engine: 'a:b'}\n", "engine: 'a:b' is not valid; allowed: vllm or torch"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, part: str) -> None:
    message = error_of(write(tmp_path, text))
    assert part in message, message
    assert str(tmp_path / "run.yaml") in message


def test_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, name="quickstart.yaml")
    write(tmp_path, name="gsm8k.yaml")
    message = error_of(tmp_path / "quickstrat.yaml", ("also wrong",))
    assert "did you mean quickstart.yaml?" in message
    assert "gsm8k.yaml, quickstart.yaml" in message
    assert "2 problems" in message
    assert "has no .yaml file" in error_of(tmp_path / "nowhere" / "x.yaml")
    assert "this is a folder" in error_of(tmp_path)
    assert "this is a data file; give a .yaml file" in error_of(tmp_path / "rows.jsonl")
    (tmp_path / "latin.yaml").write_bytes(b"run: {name: caf\xe9}")
    assert "byte 15 is not UTF-8" in error_of(tmp_path / "latin.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    assert "it cannot be read: Too many levels of symbolic links" in error_of(tmp_path / "loop.yaml")
    message = error_of(write(tmp_path), ("task.answer_marker=A # b",))
    assert "` #` starts a comment in YAML; put the value in quotes" in message
    message = error_of(write(tmp_path), ("task={kind: gsm8k, answer_marker: ''}",))
    assert "task.answer_marker: '' is not valid" in message


def test_a_bundled_configuration_by_its_name(here: Path) -> None:
    assert load_config("qwen2.5-math-1.5b").model.path == "Qwen/Qwen2.5-Math-1.5B"
    assert find_config("qwen2.5-math-1.5b").samefile(CONFIGS / "qwen2.5-math-1.5b.yaml")
    message = error_of("quickstrat")
    assert "did you mean quickstart?" in message
    assert "bundled, without .yaml: calculator, " in message
    assert "bundled," not in error_of(here / "quickstart")
    Path("quickstart").mkdir()
    assert find_config("quickstart").stem == "quickstart"
    Path("keywords").write_text("run: {seed: 7}")  # a file here comes first
    assert find_config("keywords") == Path("keywords")


def test_other_libraries_names_are_explained_by_keys_that_exist() -> None:
    keys = set(_keys(Config))
    for names in OTHER_NAMES.values():
        for name, text in names.items():
            named = set(re.findall(r"\b(?:[a-z_]+\.)+[a-z_]+", text.replace("environments.md", "")))
            assert named <= keys, name


def test_keys_that_nothing_reads_are_named_and_no_bundled_configuration_has_one() -> None:
    idle = ["buffer.replay.max_age=3", "algorithm.kl.ema_decay=0.9", "episodes.max_turns=3"]
    assert idle_keys(load_config("configs/quickstart.yaml", idle)) == (
        "buffer.replay.max_age has no effect without buffer.replay.frac",
        "algorithm.kl.ema_decay has no effect without algorithm.kl.reference: ema",
        "episodes.max_turns has no effect without task.kind: episodes",
    )
    read = [*idle, "buffer.replay.frac=0.5", "algorithm.kl.reference=ema", "algorithm.kl.coefficient=0.1"]
    assert idle_keys(load_config("configs/calculator.yaml", [*read, "algorithm.kl.estimator=k2"])) == ()
    for path in Path("configs").glob("*.yaml"):
        assert idle_keys(load_config(str(path))) == (), path
    assert SWITCHES.keys() <= set(leaves(load_config("configs/quickstart.yaml").model_dump()))
    assert leaves({"engine_args": {"sizes": {1: 2}}}) == {"engine_args.sizes.1": 2}  # any key of a library's


def test_paths_in_the_home_folder_are_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    overrides = ["model.tiny=null", "model.path=~/models/m", "run.output_dir=~/runs", "task.prompt=~/p.txt"]
    config = load_config("configs/quickstart.yaml", overrides)
    assert config.model.path == "/home/someone/models/m"
    assert (config.run.output_dir, config.task.prompt) == ("/home/someone/runs", "/home/someone/p.txt")


def test_corrections_are_none_one_or_several() -> None:
    def corrections(text: str) -> tuple[str, ...]:
        overrides = [f"algorithm.off_policy_correction={text}", "algorithm.old_log_probs=proximal"]
        return load_config("configs/quickstart.yaml", overrides).algorithm.corrections

    assert corrections("none") == ()
    assert corrections("veto") == ("veto",)
    assert corrections("[truncate_token, my.module:mask]") == ("truncate_token", "my.module:mask")
    for band in ("[null, 3]", "[0.5, null]", "null"):  # it may be open
        load_config("configs/quickstart.yaml", [f"algorithm.correction_band={band}"])


def test_a_default_made_of_other_fields_is_no_second_problem(tmp_path: Path) -> None:
    message = error_of(write(tmp_path, "task: {kind: sorting}"), ("generator.engine=sglang",))
    assert "generator.engine" in message
    assert "max_num_seqs" not in message
