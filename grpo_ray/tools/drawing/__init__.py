"""Drawing for several commands: figures as PNG (figures.py), and a reward curve as text."""
