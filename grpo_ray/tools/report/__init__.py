"""`grpo-ray report`: the web page of one or several runs.

write_report.py starts it, and puts what run_data.py collects and the scripts of web/ into one HTML file: the
head (run_header.py), charts, stage times and ranks (series.py) and sampled rollouts
(rollout_sample.py, rollout_rows.py). ending.py is printed after a run.
"""
