"""The simulation: it finds nothing wrong with perco, and the same seed gives the same run."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from types import ModuleType
from typing import Any

import pytest

from perco.serve.messages import Method, Order
from perco.serve.operating import Operating
from perco.storage import lmdb_tablet, splitting
from perco.testing import simulate as command
from perco.testing.disk import MemoryEnvironment
from perco.testing.embedded import CRASHES, FAULTS, STEPS
from perco.testing.network import FAULTS as WIRE_FAULTS, LOCAL_FAULTS
from perco.testing.served import DISK_FAULTS, ORDERED, SENT, WRITTEN
from perco.testing.simulation import SimulationOptions, simulate
from tests.testing.happening import never_seen


@pytest.mark.parametrize("seed", range(100, 250))
def test_nothing_goes_wrong(seed: int) -> None:
    nothing_goes_wrong(seed)


def nothing_goes_wrong(seed: int) -> None:
    """A tenth of the runs are as long as those of the command, the others half as long, to save time."""
    options = SimulationOptions() if seed % 10 == 0 else SimulationOptions(commits=100)
    outcome = simulate(seed, options)
    assert outcome.problems == []
    assert outcome.committed >= options.commits // (1 if outcome.processes == 1 else 3)
    assert outcome.runs >= 20
    assert outcome.fired.total() >= 5
    assert len({fault for _, fault in outcome.fired}) >= 3


def test_a_message_that_comes_late_does_not_make_wait_what_was_given_up() -> None:  # N6 N10
    late = {"a message came late": lambda runs: any(run.fired["give up", "DELAY"] or run.late for run in runs)}
    assert never_seen(late, SimulationOptions(), first=[294]) == []


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_the_same_seed_is_the_same_run(processes: int) -> None:
    options = SimulationOptions(processes=processes)
    assert simulate(processes, options) == simulate(processes, options)


def test_another_seed_is_another_run() -> None:
    assert simulate(1).digest != simulate(2).digest


def test_clients_wait_for_observers_and_find_what_they_waited_for() -> None:  # N7
    waited = {"ten waits": lambda runs: sum(run.waits for run in runs) >= 10}
    assert never_seen(waited, SimulationOptions(processes=1), first=(10, 28, 29)) == []


def test_operations_are_carried_out_and_a_server_is_sent_some(monkeypatch: pytest.MonkeyPatch) -> None:  # C9
    sent = 0
    operate = Operating.operate

    def counted(self: Operating, *args: Any) -> None:
        nonlocal sent
        sent += 1
        operate(self, *args)

    monkeypatch.setattr(Operating, "operate", counted)
    found = [simulate(12, SimulationOptions(processes=processes)) for processes in (1, 3)]
    assert [outcome.problems for outcome in found] == [[], []]
    assert min(outcome.operations for outcome in found) >= 10
    assert sent >= 5


def test_the_table_names_what_never_happened() -> None:
    everything = Counter({(step, fault): 1 for step in STEPS for fault in [*FAULTS, *CRASHES]})
    everything += Counter({(step, fault): 1 for step in SENT for fault in WIRE_FAULTS})
    everything += Counter({(step, fault): 1 for step in ORDERED for fault in LOCAL_FAULTS})
    everything += Counter({(step, fault): 1 for step in WRITTEN for fault in DISK_FAULTS})
    text, empty = command.table(everything)
    assert empty == []
    assert len(text.splitlines()) == 4 + len(STEPS) + len(SENT) + len(ORDERED) + len(WRITTEN)
    del everything["marker", "DELAY"], everything["CUT", "CUT"]
    assert command.table(everything)[1] == ["marker x DELAY", "CUT x CUT"]


def test_what_can_be_sent_is_in_the_table_or_left_out_on_purpose() -> None:
    told = {name.removesuffix(" answer") for name in (*SENT, *ORDERED)} | {"APPLY"}
    left_out = {
        *("COMPACT", "FOLDER", "EXCUSE"),  # `perco compact`, the files of a folder, a client's pulse: not simulated
        *("REPACK", "LEAVES"),  # there are no pages
        *("BEGIN_LOAD", "PUBLISH_LOAD", "END_LOAD"),  # there are no files: tests/integration/storage/test_bulk_load.py
        *("PARK", "GO_ON"),  # the same: tests/integration/backup
        "LAG",  # it counts what waits: tests/component/notify/test_lagging.py
        *("HINTS", "USES", "USES_ARE"),  # tests/component/notify/test_hints.py, tests/component/serve/test_uses.py
        "FRESH",  # it asks what UP_TO asks, for each view: tests/component/notify/test_views_fresh.py
        *("TICKET", "NEWS"),  # clients that write to a database by themselves: tests/integration/databases
    }
    assert {each.name for each in (*Method, *Order)} - told == left_out


@pytest.mark.parametrize("module", [lmdb_tablet, splitting])
def test_the_disk_is_all_that_a_tablet_asks_of_its_environment(module: ModuleType) -> None:
    asked = set(re.findall(r"(?:self\.engine|_source|_copy|engine)\.([a-z]\w*)\(", inspect.getsource(module)))
    not_simulated = {
        "grow",  # the map is large enough
        "middle",  # of the tablet in memory
        "after_failure",  # of the extension
    }
    assert asked - not_simulated <= set(dir(MemoryEnvironment))
    assert len(asked) > 5
