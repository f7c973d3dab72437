"""Commits without the lanes: the machine (perco/protocol/commit.py) makes them all, as it does what is unusual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from perco.protocol.commit import Commit
from perco.protocol.mutations import Header, Intent
from perco.serve.one_step import OneStep
from perco.serve.sessions import Session
from perco.txn.driver import Driver


def without_lanes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Driver, "laned", False)
    patch.setattr(OneStep, "lane", _by_machine)


def _by_machine(
    self: OneStep,
    session: Session,
    header: Header,
    part: Sequence[Intent],
    version: int,
    answer: Callable[[int, Any], None],
) -> bool:
    """In the place of `OneStep.lane`."""
    commit = Commit(header, [part], one_step=True)
    if self._ends_commit(session, header.start_ts) is not None or self._parts.driver.entered.in_the_way(commit):
        return False
    if self._enter(commit, version) != ():
        return False

    def told(answers: list[Any]) -> None:
        [(_, verdict, commit_ts)] = answers
        answer(commit_ts, verdict)

    self._write(session, [commit], told)
    return True
