"""The verifiers of the package reasoning-gym, as the reward of the tasks that it generates."""

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from grpo_ray.config.schema import nearest_name
from grpo_ray.rewards.base import Scores, scores

IN_TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def verified(response: str, ground_truth: str, row: Mapping[str, Any]) -> Scores:
    """Return the verifier's score of the answer, from 0 to 1; many give a part for one among other words.

    The answer is the text in the last `<answer>` tags, or else the whole response.

    Args:
        row: the entry's `name`, `config`, `seed`, `size` and `index`, from which it is generated again.
    """
    tagged = IN_TAGS.findall(response)
    answer = (tagged[-1] if tagged else response).strip()
    dataset = dataset_of(row["name"], json.dumps(row["config"], sort_keys=True), row["seed"], row["size"])
    entry = dataset[row["index"]]
    try:
        score = float(dataset.score_answer(answer, entry))
    except Exception:  # some verifiers raise for a text in another form than theirs
        score = 0.0
    return scores(score, has_format=bool(answer), is_right=score >= 1.0)


@lru_cache(maxsize=8)
def dataset_of(name: str, config: str, seed: int, size: int) -> Any:
    """Return a dataset of the package.

    Args:
        config: its configuration, as JSON.

    Raises:
        ValueError: the package is not installed, or has no such dataset or value.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise ValueError(
            f"task.kind: reasoning_gym needs the package of that name ({error}); install it with "
            "`pip install 'grpo-ray[reasoning-gym]'`"
        ) from None
    if name not in DATASETS:
        nearest = nearest_name(name, sorted(DATASETS))
        hint = f"did you mean {nearest}?" if nearest else f"it has {', '.join(sorted(DATASETS))}"
        raise ValueError(f"task.name: reasoning_gym has no {name!r}; {hint}")
    try:
        return create_dataset(name, **json.loads(config), seed=seed, size=size)
    except (TypeError, AssertionError, ValueError) as error:
        fields = [field for field in DATASETS[name][1].__dataclass_fields__ if field not in ("seed", "size")]
        raise ValueError(
            f"task.config: {name} of reasoning_gym refuses it ({error}); its fields are {', '.join(fields)}"
        ) from None
