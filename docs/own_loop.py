"""The loss in a training loop of your own, without Ray, vLLM or a configuration: python docs/own_loop.py

N prompts with G responses each make `batch` = N * G rows of `seq` tokens.
"""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from grpo_ray.objectives import Objective, get_response_log_probs, group_advantages, policy_gradient_step

N, G, LENGTH, VOCAB, TEMPERATURE = 8, 8, 12, 64, 0.8
OBJECTIVE = Objective("grpo_clip", "token_mean", cliprange_high=0.28)  # what is left out is as in a run


def reward_of(responses: torch.Tensor) -> torch.Tensor:
    """Return the share of even tokens of each response, `[batch]`."""
    return (responses % 2 == 0).float().mean(dim=1)


@torch.no_grad()
def sample(policy: Qwen2ForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Return the prompts `[batch, prompt]` with LENGTH sampled tokens behind each."""
    for _ in range(LENGTH):
        logits = policy(tokens, use_cache=False).logits[:, -1] / TEMPERATURE
        tokens = torch.cat([tokens, logits.softmax(-1).multinomial(1)], dim=1)
    return tokens


torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
policy = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB, num_key_value_heads=2, **sizes))
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
for step in range(1, 41):
    prompts = torch.randint(VOCAB, (N, 3)).repeat_interleave(G, dim=0)  # [batch, 3]
    tokens = sample(policy, prompts)  # [batch, seq + 1]
    ids, labels = tokens[:, :-1], tokens[:, 1:]
    mask = torch.arange(labels.shape[1]).expand_as(labels) >= prompts.shape[1] - 1  # true at the response
    rewards = reward_of(tokens[:, prompts.shape[1] :])
    advantages = group_advantages(rewards.view(N, G), "mean_std").view(-1, 1)  # [batch, 1]
    with torch.no_grad():
        old = get_response_log_probs(policy, ids, labels, False, TEMPERATURE)["log_probs"]
    for _ in range(2):  # the clip acts from the second update on
        log_probs = get_response_log_probs(policy, ids, labels, False, TEMPERATURE)["log_probs"]
        loss, sums = policy_gradient_step(
            log_probs, mask, objective=OBJECTIVE, advantages=advantages, old_log_probs=old
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if step % 10 == 1 or step == 40:
        clipped = sums["num_clipped"] / sums["num_tokens"]
        print(f"step {step:2}: reward {rewards.mean():.2f}, {clipped:.1%} clipped")
