"""The command `data keywords`: prompts for given words, with answers that were checked to have them.

generate.py runs it; writers.py has the sources of answers, and keyword_dataset.py the files.
"""
