"""Pictures of a run: as PNG, and as text for a terminal."""
