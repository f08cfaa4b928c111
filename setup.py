"""For tools that need a setup.py. All settings are in pyproject.toml."""

from setuptools import setup

setup()
