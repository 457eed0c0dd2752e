"""The two guards that bound how old a trained token can be.

Group g belongs to the batch of step `g // prompts_per_step`, and the Learner trains on that batch at
version `g // prompts_per_step`.

1. Admission: g may be dispatched only while `g < (published + 1 + max_lag) * prompts_per_step`, where
   `published` is the version that every admitted Generator already runs. So the batch of step b is sampled
   by versions `b - max_lag` and later.
2. Consumption: the Learner at version v refuses a token older than `v - max_lag`.

Under FIFO the first implies the second; the second would catch a mistake in the first.
"""


def admission_limit(published_version: int, max_lag: int, prompts_per_step: int) -> int:
    """Group ids below this may be dispatched."""
    return (published_version + 1 + max_lag) * prompts_per_step


def oldest_allowed(learner_version: int, max_lag: int) -> int:
    """The smallest token version the Learner may train on."""
    return learner_version - max_lag


class StaleBatchError(RuntimeError):
    """A batch reached the Learner with a token older than `max_lag` allows."""
