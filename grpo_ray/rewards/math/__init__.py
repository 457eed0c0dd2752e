r"""Mathematical equality: `1/2`, `0.5` and `\frac{1}{2}` are the same answer; docs/grading.md states the rules.

Start with `grade` of equality.py. text.py brings every answer into one spelling;
numbers.py, units.py and structure.py read its parts; algebra.py compares expressions by computer algebra.
"""
