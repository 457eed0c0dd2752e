"""`grpo-ray preflight`: an environment or a reward, played before anything is trained.

subject.py    the target as an episode function, its examples, template and limits
policies.py   the scripted, the random and the tiny policy
plays.py      episodes in a forked process
findings.py   the faults that the plays show, each with its place and its cure
template.py   the faults of a chat template
fixture.py    pytest's fixture
show.py       a conversation as the tokens that would be trained, for the terminal and as HTML
"""
