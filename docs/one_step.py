"""One GRPO step, top to bottom in one process, without Ray: python docs/one_step.py

Shapes: N prompts with G responses each make `batch` = N * G rows of at most `seq` tokens.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils.logging import disable_progress_bar

from grpo_ray.config.loading import load_config
from grpo_ray.engines.torch_engine import TorchEngine
from grpo_ray.learning.loading import load_policy
from grpo_ray.learning.model_files import load_tokenizer
from grpo_ray.objectives import Objective, group_advantages, policy_gradient_step, token_log_probs
from grpo_ray.run.tiny_model import tiny_model_folder
from grpo_ray.tasks import load_examples
from grpo_ray.tasks.prompts import load_template
from grpo_ray.transfer.snapshot import pack_weights
from grpo_ray.types import Completion, SamplingSettings

N, G = 32, 8
Groups = list[tuple[Completion, ...]]
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = "{hidden_size: 64, num_layers: 2, intermediate_size: 128, warmup: {num_steps: 60, batch_size: 32}}"


def reward_fn(response: str) -> float:
    """Return 1 if the response sets out to sort upwards, one of three habits of the warmed-up model."""
    return float("ascending" in response)


async def main() -> None:
    disable_progress_bar()
    # The quickstart's prompts, and its model made smaller and warmed up for a few seconds.
    config = load_config(QUICKSTART, [f"model.tiny={SMALL}"])
    folder = str(tiny_model_folder(config))
    tokenizer, policy = load_tokenizer(folder), load_policy(folder)
    engine = TorchEngine(config, folder, 64, seed=0)  # has its own copy of the weights
    await engine.start(version=0)
    end = (tokenizer.eos_token_id,)
    settings = SamplingSettings(G, temperature=1.0, top_p=1.0, min_tokens=0, max_tokens=24, end_token_ids=end)

    # 1. Sample. The engine records the logprob of every token that it draws.
    template = load_template("short")
    questions = [example.question for example in load_examples(config.task, seed=0).train[:N]]
    prompts = [tokenizer.encode(template.render(question, tokenizer)) for question in questions]
    groups = await sample(engine, prompts, settings)  # N groups of G completions

    # 2. Score, and compare each reward with the others of its group.
    rewards = score(groups)  # [N, G]
    advantages = group_advantages(rewards, "mean_std")  # [N, G]; 0 where all G rewards are equal
    print(f"version 0: mean reward {rewards.mean():.3f} over {N} prompts x {G} responses")

    # 3. Make rows: prompt, response, padding. In mask and old, [batch, seq], column t is about token t + 1.
    rows = [(prompt, done) for prompt, group in zip(prompts, groups, strict=True) for done in group]
    tokens = padded([[*prompt, *done.token_ids] for prompt, done in rows])  # [batch, seq + 1]
    mask = padded([[0] * (len(prompt) - 1) + [1] * len(done.token_ids) for prompt, done in rows])
    old = padded([[0.0] * (len(prompt) - 1) + done.logprobs.tolist() for prompt, done in rows])

    # 4. Update: GRPO-Clip on the ratio of each token's probability now to the one that it was sampled with.
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    logits = policy(input_ids=tokens[:, :-1], use_cache=False).logits  # [batch, seq, vocab]
    log_probs = token_log_probs(logits, tokens[:, 1:], settings.temperature)  # [batch, seq]
    loss, sums = policy_gradient_step(
        log_probs, mask, objective=Objective("grpo_clip"), advantages=advantages.view(-1, 1), old_log_probs=old,
    )  # fmt: skip
    loss.backward()  # the loss is about 0, its gradient not: every ratio is 1, and advantages sum to 0
    optimizer.step()
    mismatch = (log_probs - old)[mask.bool()].abs().max()
    print(f"update:    {sums['num_tokens']} tokens; sampler and policy agree to {mismatch:.0e} nats")

    # 5. Sync: the engine loads the new weights, samples as version 1 from here on, and earns more.
    await engine.stage(pack_weights(policy.named_parameters(), 1, torch.float32))
    await engine.pause()
    await engine.load()
    await engine.finish(version=1)
    await engine.resume()
    print(f"version 1: mean reward {score(await sample(engine, prompts, settings)).mean():.3f}, same prompts")
    await engine.shutdown()


async def sample(engine: TorchEngine, prompts: list[list[int]], settings: SamplingSettings) -> Groups:
    return list(await asyncio.gather(*(engine.generate(tuple(prompt), settings) for prompt in prompts)))


def score(groups: Groups) -> torch.Tensor:
    return torch.tensor([[reward_fn(done.text) for done in group] for group in groups])


def padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


if __name__ == "__main__":
    asyncio.run(main())
