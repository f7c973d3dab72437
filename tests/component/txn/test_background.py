"""The store's background tasks: what is told about one that fails."""

from __future__ import annotations

import pytest

from perco.errors import StoreLocked
from perco.txn.background import Background

LOST = StoreLocked("web/", 7, "perco serve", "Stop it.")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LOST, "this process has lost the store: web/ is in use"),
        (ExceptionGroup("", [ExceptionGroup("", [LOST])]), "this process has lost the store: web/ is in use"),
        (ExceptionGroup("", [ValueError("x"), LOST]), "this process has lost the store: web/ is in use"),
        (ExceptionGroup("", [ValueError("x")]), "died of ValueError: x"),
        (ExceptionGroup("two", [ValueError("x"), TypeError("y")]), "died of ExceptionGroup: two"),
    ],
)
async def test_the_cause_is_told_also_if_it_is_in_a_group(error: Exception, said: str) -> None:
    background = Background()

    async def fails() -> None:
        raise error

    background.start(fails, "test")
    await background.aclose()
    failure = background.failure()
    assert failure is not None
    assert said in str(failure)
