"""`grpo-ray report`: the web page of one or several runs.

write_report.py starts it. run_data.py collects what the page shows of a run: charts (series.py, panels.py),
stage times (stage_times.py), ranks (rank_totals.py) and sampled rollouts (rollout_sample.py, rollout_rows.py,
token_texts.py, log_ratios.py). page.py puts that and the scripts of web/ into one HTML file. ending.py is
printed after a run.
"""
