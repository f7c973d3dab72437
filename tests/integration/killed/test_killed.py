"""Killed with SIGKILL right before and right after LMDB's commit of every batch, of a transaction, an observer's run,
a vacuum and a recovery; the folder is opened by another process, and nothing is lost or half done."""

from __future__ import annotations

import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio

import perco
from perco.check.check import CheckOptions, check
from perco.database.inside import inside
from perco.testing.sweep import Scenario, observe
from tests.integration.killed.zygote import Zygote, notes, options, zygote
from tests.support.copies import copy_as_itself
from tests.sweep.scenarios import (
    Batched,
    BatchedInOneStep,
    Delete,
    Dropped,
    DroppedLastAgent,
    GivenUp,
    GivenUpInOneStep,
    GrowingInOneStep,
    LastAgent,
    LongValues,
    ObserverChain,
    ObserverLastAgent,
    ObserverRun,
    OneStep,
    ReadLockedVacuumed,
    Renamed,
    Signalling,
    SignallingInOneStep,
    Swept,
    TwoObservers,
    Undone,
    Vacuumed,
    VacuumedObserver,
    VacuumedPinned,
)

BATCHES_MAX = 60  # of one process; a usual one makes ten
# With how many batches each makes at least.
SWEPT: list[tuple[Callable[[], Scenario], int]] = [
    (LongValues, 6),
    (Delete, 4),
    (OneStep, 1),
    (LastAgent, 3),
    (ObserverRun, 4),
    (ObserverLastAgent, 3),
    (ObserverChain, 6),
    (Batched, 3),
    (BatchedInOneStep, 2),
    (TwoObservers, 5),
    (Signalling, 6),
    (SignallingInOneStep, 5),
    (GivenUp, 6),
    (GivenUpInOneStep, 5),
    (GrowingInOneStep, 5),
    (Vacuumed, 10),
    (VacuumedObserver, 10),
    (VacuumedPinned, 10),
    (Renamed, 4),
    (Dropped, 8),
    (DroppedLastAgent, 8),
    (Undone, 7),
    (ReadLockedVacuumed, 8),
]


@pytest.fixture(scope="module")
def children() -> Iterator[Zygote]:
    with zygote() as children:
        yield children


class Store:
    """A folder, and copies of it."""

    def __init__(self, path: Path, scenario: Callable[[], Scenario]) -> None:
        self.path, self._make = path, scenario
        self.name = scenario().name

    def copy(self) -> Store:
        """A fresh copy, and what its scenario was told."""
        copy = self.path.with_name("copy")
        shutil.rmtree(copy, ignore_errors=True)
        copy.with_suffix(".notes").unlink(missing_ok=True)
        copy_as_itself(self.path, copy, ignore=shutil.ignore_patterns("socket"))
        if self.path.with_suffix(".notes").exists():
            shutil.copy(self.path.with_suffix(".notes"), copy.with_suffix(".notes"))
        return Store(copy, self._make)

    def verify(self) -> None:
        """Open it, recover, go on, and assert what the scenario says."""
        scenario = self._make()
        notes(scenario, self.path)

        async def run() -> None:
            async with perco.open(self.path, scenario.schema, options=options(scenario)) as db:
                with trio.fail_after(60):
                    await scenario.meet(db)
                    await observe(db)
                    await scenario.later(db)
                    await observe(db)
                await scenario.verify(db)
            async with perco.open(self.path, readonly=True) as db:  # phase two has ended
                result = await check(
                    inside(db).driver.store, ts=await inside(db).oracle.draw(), options=CheckOptions(pause_s=0.0)
                )
                assert result.clean, "\n".join(map(str, result.findings))
                assert not result.locks

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", perco.errors.PercoWarning)
            trio.run(run)


def prepared(children: Zygote, path: Path, scenario: Callable[[], Scenario]) -> Store:
    store = Store(path / "store", scenario)
    assert not children.live("prepare", store.name, store.path)
    return store


def kill_everywhere(children: Zygote, store: Store, what: str) -> Counter[bool]:
    """Kill a process at each batch that it makes, before and after; returns how often each."""
    killed: Counter[bool] = Counter()
    for made in (False, True):
        for batch in range(BATCHES_MAX):
            copy = store.copy()
            died = children.live(what, copy.name, copy.path, kill_at=batch, made=made)
            copy.verify()
            if not died:
                break
            killed[made] += 1
        else:
            pytest.fail("it never ends")
    return killed


@pytest.mark.parametrize(("scenario", "least"), SWEPT, ids=[make().name for make, _ in SWEPT])
def test_killed_at_every_batch(
    scenario: Callable[[], Scenario], least: int, children: Zygote, tmp_path: Path
) -> None:  # T1 T3 T5 N1 N2 N3 O1 S1 G2 G3 G4
    killed = kill_everywhere(children, prepared(children, tmp_path, scenario), "first")
    assert killed[False] >= least
    assert killed[True] >= least


def test_a_recovery_killed_at_every_batch(children: Zygote, tmp_path: Path) -> None:  # T5 T6 T8
    """Of a transaction that was killed in its prewrites, or right after the commit point, or in phase two."""
    killed: Counter[bool] = Counter()
    for dies_at in range(3):
        store = prepared(children, tmp_path / str(dies_at), Swept)
        assert children.live("first", store.name, store.path, kill_at=dies_at, made=True)
        killed += kill_everywhere(children, store, "recover")
    assert killed[False] >= 2
    assert killed[True] >= 2
