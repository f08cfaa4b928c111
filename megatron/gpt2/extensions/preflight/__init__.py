"""Check machines, flags and data before a run (tools/preflight.py)."""
