"""The same everywhere: property tests have no deadline, and Ctrl-C arrives also where whoever started the tests ignored
it (a shell does so for what it runs in the background, and every child would inherit it)."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")

if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than there are cores: some tests mostly wait, for a process that is silent or for a disk."""
    return (os.cpu_count() or 1) + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--over",
        default="owner",
        metavar="NAMES",
        help="where the suites that run everywhere run: deployments (owner, folder, tls, tablets, bare, ...) "
        "with commas between them, or all. See tests/support/everywhere.py",
    )
    parser.addoption(
        "--each",
        default="0",
        metavar="NUMBER",
        help="run each test over so many of the deployments that --over names, chosen by its name; 0: over all",
    )
