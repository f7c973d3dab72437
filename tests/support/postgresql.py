"""A PostgreSQL server for the tests of a process, started when the first of them needs it; each test has tables of its
own."""

from __future__ import annotations

import atexit
import functools
import itertools
import os
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from bench.against.postgres import NoPostgresError, Server, server

_numbers = itertools.count()


@functools.cache
def running() -> Server:
    """The server of this process. Skips the test if PostgreSQL is not installed."""
    stack = ExitStack()
    atexit.register(stack.close)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perco-pg-")))
    try:
        return stack.enter_context(server(folder))
    except NoPostgresError as error:
        pytest.skip(str(error))


def fresh() -> str:
    """The address of a store that does not exist yet."""
    return f"postgresql://bench@/postgres?host={running().socket}&prefix=t{os.getpid()}_{next(_numbers)}"
