"""The simulation of a store on Bigtable: nothing goes wrong, a seed gives the same run, calls fail as told."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest
import trio

from perco.bigtable import filters
from perco.bigtable.calls import CallFailed, Scan
from perco.bigtable.keys import DATA_FAMILY, MICROS, qualifier
from perco.bigtable.wire import types
from perco.serve.messages import Method
from perco.storage import DATA, TS_MAX
from perco.testing import simulate as command
from perco.testing.calls import CHANGING, LATER, LOSE, LOSE_ANSWER, READING, Service, Step
from perco.testing.direct import CALL_FAULTS, CALLED, LATE_S, SENT_BY_DIRECT, call_faults_of
from perco.testing.network import FAULTS as WIRE_FAULTS
from perco.testing.processes import Process, Processes
from perco.testing.simulation import BIGTABLE, SimulationOptions, simulate

OPTIONS = SimulationOptions(store=BIGTABLE)


@pytest.mark.parametrize("seed", range(10))
def test_nothing_goes_wrong(seed: int) -> None:
    outcome = simulate(seed, OPTIONS)
    assert outcome.problems == []
    assert outcome.committed >= 66
    assert outcome.runs >= 20
    assert outcome.terms >= 1
    assert outcome.fired.total() >= 5


def test_the_same_seed_is_the_same_run() -> None:
    assert simulate(2, OPTIONS) == simulate(2, OPTIONS)


def test_the_table_names_what_never_happened() -> None:
    everything = Counter({(step, fault): 1 for step in CALLED for fault in CALL_FAULTS})
    everything += Counter({(step, fault): 1 for step in SENT_BY_DIRECT for fault in WIRE_FAULTS})
    assert command.table(everything, BIGTABLE)[1] == []
    del everything["hint", LATER], everything["renew the lease", LOSE]
    assert command.table(everything, BIGTABLE)[1] == [f"hint x {LATER}", f"renew the lease x {LOSE}"]
    assert LATER not in call_faults_of("read")


def test_what_direct_clients_send_is_in_the_table_or_left_out_on_purpose() -> None:
    told = {name.removesuffix(" answer") for name in SENT_BY_DIRECT}
    left_out = {
        # Clients reach the rows by themselves.
        *("READ", "READS", "SCAN", "LEAVES", "APPLY", "COMMIT", "COMMITS", "OPERATE"),
        *("COMPACT", "FOLDER", "BEGIN_LOAD", "PUBLISH_LOAD", "END_LOAD", "FRESH", "LAG"),  # as in others
        *("HINTS", "USES", "USES_ARE"),  # the same
        *("PARK", "GO_ON"),  # as in others
    }
    assert {each.name for each in Method} - told == left_out


# ------------------------------------------------------------ calls


class _Befalls:
    """Lets every call of the process suffer the same fault."""

    def __init__(self, fault: str) -> None:
        self.kernel, self._fault = Processes(), fault
        self.told: list[str] = []

    def call(self, process: Process, step: str, about: str, faults: Any) -> str:
        self.told.append(step)
        return self._fault

    def takes_s(self, process: Process) -> float:
        return 0.01


def _put(ts: int) -> Any:
    where = {"family_name": DATA_FAMILY, "column_qualifier": qualifier(DATA, 1)}
    cell = types().Mutation(set_cell={**where, "timestamp_micros": ts * MICROS, "value": b"v"})
    return types().MutateRow(table_name="t", row_key=b"t\x00a", mutations=[cell])


def _read() -> Scan:
    made = types().ReadRows(table_name="t", filter=filters.reading([(DATA, 1, 0, TS_MAX, 9)]))
    made.rows.row_keys.append(b"t\x00a")
    return Scan(made)


def _suffering(fault: str, request: Any, faults: tuple[str, ...] = CHANGING) -> tuple[list[Any], dict[float, int]]:
    """Make a call with a deadline of 1 s. Returns its answers, and how many cells the row had at some moments."""
    befalls = _Befalls(fault)
    service = Service(befalls, Random(0), LATE_S)
    answers: list[Any] = []
    cells: dict[float, int] = {}

    async def main() -> None:
        service.send(befalls.kernel.world, Step("a step", "", faults), request, 1.0, answers.append)
        for moment in (0.5, 1.0, 1.0 + LATE_S):
            await trio.sleep_until(moment)
            cells[moment] = len(service.table.cells(b"t\x00a"))

    trio.run(befalls.kernel.run, main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert befalls.told == ["a step"]
    return answers, cells


def test_a_call_without_a_fault_is_answered() -> None:
    answers, cells = _suffering("", _put(1))
    assert [type(answer) for answer in answers] == [types().MutateRowResponse]
    assert cells[0.5] == 1


@pytest.mark.parametrize("how", ["soon", "hangs"])
def test_a_call_that_is_lost_changes_nothing(how: str) -> None:
    answers, cells = _suffering(f"{LOSE} {how}", _put(1))
    assert [type(answer) for answer in answers] == ([CallFailed] if how == "soon" else [])
    assert cells[1.0 + LATE_S] == 0


@pytest.mark.parametrize("how", ["soon", "hangs"])
def test_a_call_whose_answer_is_lost_was_made(how: str) -> None:
    answers, cells = _suffering(f"{LOSE_ANSWER} {how}", _put(1))
    assert [type(answer) for answer in answers] == ([CallFailed] if how == "soon" else [])
    assert cells[0.5] == 1


def test_a_call_may_be_made_after_its_deadline_but_not_much_later() -> None:
    answers, cells = _suffering(f"{LATER} hangs", _put(1))
    assert answers == []
    assert list(cells.values()) == [0, 0, 1]


def test_a_read_fails_or_is_answered() -> None:
    [failed] = _suffering("FAIL soon", _read(), READING)[0]
    assert isinstance(failed, CallFailed)
    [answer] = _suffering("", _read(), READING)[0]
    assert answer.rows == []
    assert answer.ended
