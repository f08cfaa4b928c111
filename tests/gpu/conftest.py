"""Print each failure immediately. If a later test hangs the GPU, pytest never prints its own report."""

from __future__ import annotations

import pytest


class FailuresAtOnce:
    """Prints the traceback directly after the line of a failed test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and report.nodeid.startswith("tests/gpu/"):
            terminal = self._config.get_terminal_writer()
            terminal.line(f"\n{report.longreprtext}")
            terminal.flush()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailuresAtOnce(config))
