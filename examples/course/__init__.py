"""Course material, run in the root of the source tree as `python -m examples.course COMMAND`.

playground/ has the small examples of a lecture on policy gradients; keyword_data/ (`data keywords`)
makes data sets for the keywords task.
"""
