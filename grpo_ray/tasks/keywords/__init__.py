"""The keywords task (course material): write a sentence with given words.

Start with examples.py. `python -m examples.course data keywords` makes files of prompts and answers,
which pairs.py reads; without files, it draws prompts from a list of words.
"""
