"""tools/preflight.py: checks of machines, flags and data before a run."""
