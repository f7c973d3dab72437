"""Every public method, on every front, for the owner of a folder, for its clients, and for who only reads: the same
result, or the same error (R9)."""

from __future__ import annotations

import asyncio
import functools
import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio

import perco
import perco.aio
import perco.sync
from tests.integration.fronts.cases import CASES, COVERED, SCHEMA, Asked, Case, at_once
from tests.integration.fronts.owners import OPTIONS, TOKEN
from tests.integration.fronts.reads import READS, REFUSED, fill

FRONTS: dict[str, ModuleType] = {"trio": perco, "asyncio": perco.aio, "blocking": perco.sync}
PLACES = ["owner", "folder", "tcp", "tablets"]
READING = ["alone", "beside", "beside-tablets"]  # folders that are opened with readonly=True
ELSEWISE = {
    "compacting": "are open in tablet servers (perco serve --processes), which do not compact",
    "backing": "tablet servers have the store's tablets open (perco serve --processes)",
    "bulk_loading": "are open in tablet servers (perco serve --processes), which take no bulk loads",
}
CLASSES = ["Database", "Retrying", "Snapshot", "Transaction", "PinnedSnapshot", "Scan", "WorkerHandle"]

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs

Answers = dict[str, Any]


async def ask_all(front: ModuleType, cases: dict[str, Case], opening: Any) -> Answers:
    """The results of the cases, one after the other."""
    answers: Answers = {}

    async def ask(db: Any) -> None:
        for name, case in cases.items():
            try:
                answers[name] = await case(Asked(front, db))
            except Exception as error:
                error.add_note(f"in case {name}")
                answers[name] = error

    if front is perco.sync:
        with opening as db:
            await ask(db)
    else:
        async with opening as db:
            await ask(db)
    return answers


def run(front: ModuleType, main: Callable[[], Any]) -> Any:
    match front:
        case perco.sync:
            return at_once(main())
        case perco.aio:
            return asyncio.run(main())
        case _:
            return trio.run(main)


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], str]]:
    """The address of each client's own store, and of one for all that only read; one process owns them all."""
    folder = tmp_path_factory.mktemp("served")
    served = [(front, place) for front in FRONTS for place in PLACES[1:]]
    served += [("reading", place) for place in READING]
    folders = [str(folder / f"{front}-{place}") for front, place in served]
    for front, path in zip([front for front, _ in served], folders, strict=True):
        if front == "reading":
            trio.run(fill, path)
    alone = folders.pop(served.index(("reading", "alone")))
    served.remove(("reading", "alone"))
    command = [sys.executable, "-m", "tests.integration.fronts.owners", *folders]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[3], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            told = [process.stdout.readline().strip() for _ in folders]
            assert all(told), "an owner could not open its folder"
            yield {
                ("reading", "alone"): alone,
                **{
                    (front, place): url if place == "tcp" else path
                    for (front, place), url, path in zip(served, told, folders, strict=True)
                },
            }
        finally:
            process.stdin.close()
            process.wait(timeout=60)


def test_every_answer_is_the_same(addresses: dict[tuple[str, str], str], tmp_path: Path) -> None:  # R9
    def of(front: str, place: str) -> Answers:
        url = tmp_path / front if place == "owner" else addresses[front, place]
        opening = FRONTS[front].open(url, SCHEMA, options=OPTIONS, token=TOKEN)
        found: Answers = run(FRONTS[front], functools.partial(ask_all, FRONTS[front], CASES, opening))
        return found

    compare(of, CASES, PLACES, at_once=True)  # they mostly wait


def test_every_answer_to_who_only_reads_is_the_same(addresses: dict[tuple[str, str], str]) -> None:  # R9
    def of(front: str, place: str) -> Answers:
        opening = FRONTS[front].open(addresses["reading", place], SCHEMA, options=OPTIONS, readonly=True)
        found: Answers = run(FRONTS[front], functools.partial(ask_all, FRONTS[front], READS, opening))
        return found

    answers = compare(of, READS, READING, at_once=False)  # a process opens a folder once
    refused = {name for name, answer in answers.items() if answer[:2] == ("raises", "ReadOnly")}
    assert refused == REFUSED, "what writes, runs observers or waits for them"


def compare(of: Callable[[str, str], Answers], cases: dict[str, Case], places: list[str], *, at_once: bool) -> Answers:
    """What each place gives on each front, all compared with the first one, which is returned."""
    where = [(front, place) for front in FRONTS for place in places]
    with ThreadPoolExecutor(len(where) if at_once else 1) as pool:
        answers = dict(zip(where, pool.map(lambda at: of(*at), where), strict=True))
    wanted = answers["trio", places[0]]
    assert set(wanted) == set(cases)
    assert not [answer for answer in wanted.values() if isinstance(answer, Exception)], wanted
    for front in FRONTS:
        for case, error in ELSEWISE.items() if "tablets" in places else ():
            told = answers[front, "tablets"].pop(case)
            told = told if isinstance(told, tuple) else told[-2]
            assert told[:2] == ("raises", "UsageError")
            assert error in told[2]
            answers[front, "tablets"][case] = wanted[case]
    others = []
    for (front, place), found in answers.items():
        for case in cases:
            have, want = dict(parts(found[case])), dict(parts(wanted[case]))
            differ = [at for at in {**have, **want} if have.get(at) != want.get(at)]
            others += [f"{case}{at}, {front}, {place}: {have.get(at)!r}, not {want.get(at)!r}" for at in differ]
    assert not others, "\n".join(others)
    return wanted


def parts(answer: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """An answer, piece by piece: so that a difference can be located."""
    if isinstance(answer, list | tuple):
        for i, each in enumerate(answer):
            yield from parts(each, f"{at}[{i}]")
    yield at, len(answer) if isinstance(answer, list | tuple) else answer


def public(kind: type) -> set[str]:
    return {name for name, _ in inspect.getmembers(kind) if not name.startswith("_")}


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_has_a_case(name: str) -> None:
    """The names of the fronts' classes are those of the engine's, `tests/component/fronts/test_twins.py` says."""
    names = public(getattr(perco.aio, name)) | public(getattr(perco.sync, name))
    covered = {attribute for kind, _, attribute in (each.partition(".") for each in COVERED) if kind == name}
    assert covered == names


def test_every_public_method_of_a_store_is_asked_by_who_only_reads() -> None:
    names = public(perco.aio.Database) | public(perco.sync.Database)
    assert set(READS) == names | {"snapshot.scan", "snapshot.row", "pinned"}
