"""The same everywhere: property tests have no deadline, and Ctrl-C arrives also where whoever started the tests ignored
it (a shell does so for what it runs in the background, and every child would inherit it)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

EXTENSION = "perco.storage._native"

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
    parser.addoption(
        "--some",
        type=int,
        default=1,
        metavar="NUMBER",
        help="run one test in so many, chosen by its name and the commit: each commit runs others",
    )
    parser.addoption(
        "--extension", metavar="FILE", help="use another build of perco's C extension: see make test-native"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--extension")) is not None:
        loader = ExtensionFileLoader(EXTENSION, path)
        spec = spec_from_file_location(EXTENSION, path, loader=loader)
        assert spec is not None
        sys.modules[EXTENSION] = module_from_spec(spec)
        loader.exec_module(sys.modules[EXTENSION])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    some = config.getoption("--some")
    if some <= 1:
        return
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False).stdout
    left = [item for item in items if crc32(f"{commit}{item.nodeid}".encode()) % some]
    chosen = set(items).difference(left)
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left)
