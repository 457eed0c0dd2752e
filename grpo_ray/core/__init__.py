"""The heart of a run: what dispatches, holds, scores, trains and publishes. It imports neither Ray nor vLLM.

Begin with controller.py: its docstring is the loop. groups.py (with batch_queue.py) owns the state of every
group, and staleness.py is the rule that bounds the age of a token. producer.py has each admitted group sampled
and scored by the actors that pool.py keeps alive (dispatch.py, stateless_actors.py, environment_pool.py,
starting.py).

The five actors are generator.py, scorer.py, buffer.py (with replay.py), learner.py and sync.py. Distillation
adds teacher.py, and episodes add episodes/environment_worker.py. clients.py declares every call to one.
checkpointing.py, validation.py, step_metrics.py and stalls.py do what their names say, between two steps.
"""
