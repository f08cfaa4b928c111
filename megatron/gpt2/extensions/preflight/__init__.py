"""What tools/preflight.py looks at before a run."""
