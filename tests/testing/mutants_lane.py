"""Faults in the lanes, which tests find that drive them beside the machine; and in first reads that draw timestamps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import pytest

from perco.errors import Unavailable
from perco.rpc.link import LostError
from perco.serve import draws, one_step, remote, rows, starting
from perco.storage import LOCK, NOTIFY, WRITE, Mutation
from perco.txn import lane
from tests.testing.mutants import without_checks, without_writes
from tests.testing.mutants_components import by

_TEST: Final = "tests/component/txn/test_lane.py::test_the_lane_and_the_machine_do_the_same"
_WAITS: Final = (
    "tests/component/serve/test_starting.py::test_a_first_read_waits_for_a_commit_that_came_before_its_timestamp[plain]"
)
_DRAWS: Final = "tests/component/serve/test_starting.py::test_every_kind_of_first_read_draws_the_timestamp[plain]"
_SERVED: Final = "tests/component/serve/test_client_lane.py::test_one_step_is_the_same_in_the_lanes"


def _sends(patch: pytest.MonkeyPatch, change: Callable[[Mutation], Mutation]) -> None:
    right = lane.one_step
    patch.setattr(lane, "one_step", lambda *args: change(right(*args)))


@by(_TEST, "C2 the lane does not look at the cells that are entered")
def blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lane, "in_the_way", lambda *_: False)


@by(_TEST, "C5 the lane does not check for locks")
def over_locks(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_checks(mutation, LOCK))


@by(_TEST, "C5 the lane does not check for newer records")
def over_records(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_checks(mutation, WRITE))


@by(_TEST, "N1 the lane puts no notify cells")
def silent(patch: pytest.MonkeyPatch) -> None:
    _sends(patch, lambda mutation: without_writes(mutation, NOTIFY))


@by(f"{_SERVED}[behind]", "C2 the owner's lane does not look at the cells that are entered")
def owner_blind(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(one_step, "in_the_way", lambda *_: False)


@by(f"{_SERVED}[late]", "C5 the owner's lane does not check for newer records")
def owner_over_records(patch: pytest.MonkeyPatch) -> None:
    right = one_step.one_step
    patch.setattr(one_step, "one_step", lambda *args: without_checks(right(*args), WRITE))


@by(f"{_SERVED}[lost]", "T4 a client's lane takes a commit whose answer was lost for one that was never sent")
def client_forgets(patch: pytest.MonkeyPatch) -> None:
    right = remote.RemoteDriver.go_on

    async def go_on(self: Any, commit: Any, began: float, *, asked: Any = None, **more: Any) -> int:
        if asked is not None and isinstance(asked[0], LostError):
            self.never_sent(commit.header.start_ts, observed=more["observed"])
            raise Unavailable("the server is away")
        return await right(self, commit, began, asked=asked, **more)

    patch.setattr(remote.RemoteDriver, "go_on", go_on)


@by(_WAITS, "C4 the server ignores entered cells when a first read draws its timestamp")
def blind_starts(patch: pytest.MonkeyPatch) -> None:
    right = starting.Starts.start

    def start(self: starting.Starts, session: Any, peer: Any, id: int, asked: Any) -> None:
        with pytest.MonkeyPatch.context() as blind:
            blind.setattr(rows.Rows, "entered", lambda self, session, requests: [])
            right(self, session, peer, id, asked)

    patch.setattr(starting.Starts, "start", start)


@by(_DRAWS, "G1 the server does not hold a timestamp that a first read has drawn")
def loose_starts(patch: pytest.MonkeyPatch) -> None:
    right = draws.Draws.one

    def one(self: draws.Draws, session: Any, peer: Any) -> int:
        ts = right(self, session, peer)
        self._sessions.done(session, (ts,))
        return ts

    patch.setattr(draws.Draws, "one", one)
