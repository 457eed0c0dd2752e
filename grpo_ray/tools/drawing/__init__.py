"""Drawing for several commands: figures as PNG (figures.py), a run's reward curve, and a curve as text."""
