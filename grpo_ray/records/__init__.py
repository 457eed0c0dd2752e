"""All that a run leaves: `run_files.py` names it, and each file has a module that writes and reads it.

`json_lines.py` and `durable.py` survive power cuts and full disks, `rollout_log.py` is the schema of rollouts,
`checkpoint.py` what a run resumes from, and `run_lock.py` keeps two runs out of one folder.
"""
