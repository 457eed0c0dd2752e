"""Episode functions made of other packages' environments; each package is imported when it is first needed.

gymnasium.py     an environment of Gymnasium: observations as messages, replies as actions
trl.py           an environment class as TRL's GRPOTrainer takes it: its methods are tools
verifiers.py     an environment of verifiers, over the session's URL; verifiers_chat.py: its plain chat loop
rehearsal.py     warm-up pairs for a tiny model, from episodes that a script plays
packages.py      the error for a package that is missing
"""
