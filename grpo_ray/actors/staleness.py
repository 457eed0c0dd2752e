"""The two guards that bound how old a trained token can be.

Without look-ahead, drops or replay, group g belongs to the batch of step `g // prompts_per_step`, and the
Learner trains on that batch at version `g // prompts_per_step`.

1. Admission: g may be dispatched only while `g < (published + 1 + max_lag) * prompts_per_step`, where
   `published` is the version that every admitted Generator already runs. So the batch of step b is sampled
   by versions `b - max_lag` and later.
2. Consumption: the buffer hands out no fresh token older than `max_lag`, and the Learner at version v refuses
   one older than `v - max_lag` (with replay, than `v - max_age`).

The first implies the second; the second would catch a mistake in the first. The first stays exact when

- a batch takes fewer fresh groups, because others are replayed: `prompts_per_step` is then the fresh ones;
- a group leaves the line of groups without being trained (set aside, or dropped for lack of signal): its
  place goes to one more group, as all that were admitted before stand before that one;
- a look-ahead lets a group come d steps late: `max_lag - d` stands for `max_lag`;
- more groups are started than a step needs (`extra_places`): those that the next step could not train are
  cut off and asked again, so none comes late.
"""


def admission_limit(published_version: int, max_lag: int, prompts_per_step: int, extra_places: int = 0) -> int:
    """Group ids below this may be dispatched."""
    return (published_version + 1 + max_lag) * prompts_per_step + extra_places


def places_beyond(
    version: int, num_trained: int, num_left: int, num_oversampled: int, prompts_per_step: int
) -> int:
    """`extra_places` of a run at `version`, by its own account of groups that were trained or left the line."""
    return num_trained - version * prompts_per_step + num_left + num_oversampled


def oldest_allowed(learner_version: int, max_lag: int) -> int:
    """The smallest token version the Learner may train on."""
    return learner_version - max_lag


class StaleBatchError(RuntimeError):
    """A batch reached the Learner with a token older than the schedule allows."""
