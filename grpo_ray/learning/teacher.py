"""Checks of a distillation's teacher against the policy, before anything expensive starts."""

from transformers import PreTrainedTokenizerBase

from grpo_ray.config import Config
from grpo_ray.learning.model_files import check_vocabulary, load_tokenizer, max_positions


def check_teacher(config: Config, tokenizer: PreTrainedTokenizerBase, longest_prompt: int) -> None:
    """Refuse a teacher that cannot judge the policy's tokens: another vocabulary, or too few positions.

    Args:
        tokenizer: the policy's.
        longest_prompt: in tokens.

    Raises:
        ValueError: names the field, both models, and what differs.
    """
    path = config.distillation.teacher
    if path is None:
        return
    policy = config.model.path or "the tiny model"
    try:
        of_teacher = load_tokenizer(path)
        check_vocabulary(path, of_teacher, ())
    except ValueError as error:
        raise ValueError(f"distillation.teacher: {str(error).removeprefix('model.path: ')}") from error
    own, others = tokenizer.get_vocab(), of_teacher.get_vocab()
    different = sorted(token for token in {*own, *others} if own.get(token) != others.get(token))
    if different:
        token = different[0]
        raise ValueError(
            f"distillation.teacher: the vocabulary of {path!r} is not that of {policy!r} (model): "
            f"{len(different)} tokens differ, such as {token!r}, number {others.get(token, 'none')} there and "
            f"{own.get(token, 'none')} here; give a teacher of the same family"
        )
    length = config.generator.max_model_len or longest_prompt + config.sampling.max_tokens
    length += config.distillation.engine == "vllm"  # which draws a token after those that it judges
    positions = max_positions(path)
    if positions is not None and length > positions:
        raise ValueError(
            f"distillation.teacher: {path!r} has {positions} positions, and sequences have up to {length} "
            "tokens; lower sampling.max_tokens, or give a teacher with more"
        )
