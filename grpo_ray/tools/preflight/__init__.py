"""`grpo-ray preflight`: an environment or a reward, played before anything is trained.

subject.py    the target as an episode function, its examples, template and limits
policies.py   the scripted, the random and the tiny policy
plays.py      episodes in a forked process; a fault, with its place and its cure
checks.py     the faults that plays, histories and the chat template show
fixture.py    pytest's fixture
preflight.py  all of it, and a conversation as the tokens that would be trained, for the terminal and as HTML
"""
