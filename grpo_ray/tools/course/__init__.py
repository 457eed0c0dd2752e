"""Course material: no run needs it, and no reader of GRPO.

playground/ (`grpo-ray playground`) has the small examples of a lecture on policy gradients;
keyword_data/ (`grpo-ray data keywords`) makes data sets for the keywords task.
"""
