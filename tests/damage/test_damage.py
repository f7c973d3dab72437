"""However a file of a store is damaged, `perco check` ends in a report or in a clear error."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
import typer

from perco.cli.containing import Watch, contained
from perco.cli.screen import FAILED, FOUND
from perco.errors import Corruption
from perco.storage import LmdbEngine, LmdbOptions
from perco.storage.pages import _TREE, _Walk, meta_page
from tests.damage.running import Bench, command, in_child, make_store

CASES = 24
PAGE = 4096


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    store = tmp_path_factory.mktemp("damage") / "store"
    make_store(store)
    return Bench(store)


@pytest.fixture
def store(bench: Bench, tmp_path: Path) -> Path:
    path = tmp_path / "store"
    for name, data in bench.files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def damage(store: Path, tablet: str, data: bytes, at: int) -> None:
    file = store / "tablets" / tablet / "data.mdb"
    before = file.read_bytes()
    assert len(before) > at
    file.write_bytes(before[:at] + data + before[at + len(data) :])


def pages_of(store: Path, tablet: str, flags: int) -> list[int]:
    """The offsets of pages that say that they are of a kind (LMDB: 1 a branch, 2 a leaf)."""
    data = (store / "tablets" / tablet / "data.mdb").read_bytes()
    places = range(2 * PAGE, len(data), PAGE)
    return [at for at in places if int.from_bytes(data[at + 10 : at + 12], "little") & 0x0F == flags]


@pytest.mark.parametrize("seed", range(CASES))
def test_a_damaged_file_is_reported_or_refused(bench: Bench, seed: int) -> None:
    case, kind, wrong = bench.run(seed)
    assert not wrong, f"{case.file}: {case.what} ({kind}): {wrong}"


def test_a_file_on_which_lmdb_gives_up_does_not_hide_the_others(store: Path) -> None:
    for at in pages_of(store, "numbers-0", 2):  # leaves that say that they are branches: LMDB asserts
        damage(store, "numbers-0", b"\x01\x00", at + 10)
    done = command("check", store)
    assert done.code == FOUND
    first, remedy = done.out.splitlines()[:2]
    assert first.startswith("error    S1   tablet numbers-0: page ")
    assert "restore" in remedy
    assert "4 tables, " in done.out
    assert done.err == ""
    found = json.loads(command("check", store, "--json").out)
    assert [finding["where"] for finding in found["findings"]] == ["tablet numbers-0"]
    assert found["rows"] > 300, "the other tablets were checked"


def test_two_files_that_were_cut_short(store: Path) -> None:
    for tablet in ("docs-0", "links-0"):
        os.truncate(store / "tablets" / tablet / "data.mdb", 8 * PAGE)
    done = command("check", store)
    assert done.code == FOUND
    assert [line.split(": ")[0].split()[-1] for line in done.out.splitlines() if "cut short" in line] == [
        "docs-0",
        "links-0",
    ]
    refused = command("scan", store, "docs")
    assert refused.code == FAILED
    assert "the file is cut short" in refused.err
    assert "run `perco check`" in refused.err


def test_without_a_catalogue_the_tablets_are_read_all_the_same(store: Path) -> None:
    os.truncate(store / "tablets" / "_perco-0" / "data.mdb", 3 * PAGE)
    os.truncate(store / "tablets" / "blobs-0" / "data.mdb", 3 * PAGE)
    done = command("check", store)
    assert done.code == FOUND
    assert "tablet _perco-0: " in done.out
    assert "tablet blobs-0: " in done.out
    assert "only the pages were checked" in done.out


def test_a_damaged_store_is_not_repaired(store: Path) -> None:
    os.truncate(store / "tablets" / "links-0" / "data.mdb", 3 * PAGE)
    before = {path: path.read_bytes() for path in store.glob("tablets/*/data.mdb")}
    done = command("check", store, "--repair")
    assert done.code == FOUND
    assert "nothing is repaired" in done.err
    assert {path: path.read_bytes() for path in store.glob("tablets/*/data.mdb")} == before


def live_branches(store: Path, tablet: str) -> list[int]:
    """The numbers of the pages that lead to others, of trees that are in use."""
    engine = LmdbEngine(store / "tablets" / tablet, (), LmdbOptions(), readonly=True, lock=True)
    file = os.open(store / "tablets" / tablet / "data.mdb", os.O_RDONLY)
    try:
        with engine._begin() as txn:
            walk = _Walk(file, PAGE, 1 << 20)
            meta = meta_page(file, PAGE, txn.id())
            named: list[tuple[str, bytes]] = []
            list(walk.tree("", meta[88:136], named))
            found = [
                page
                for _, tree in named
                for page, data in walk._pages(_TREE.unpack(tree)[7], _TREE.unpack(tree)[2])
                if data is None
            ]
    finally:
        os.close(file)
        engine.close()
    return found


def test_pages_above_that_lead_to_the_wrong_cells(store: Path) -> None:
    """The cells are there, in order, and a search for one misses it: a read would not find it."""
    found = live_branches(store, "docs-0")
    assert found
    data = (store / "tablets" / "docs-0" / "data.mdb").read_bytes()
    for branch in found:
        page = data[branch * PAGE :][:PAGE]
        for node in range(1, (int.from_bytes(page[12:14], "little") - 16) // 2):  # keys that part two pages
            at = int.from_bytes(page[16 + 2 * node : 18 + 2 * node], "little")
            damage(store, "docs-0", b"\xfe", branch * PAGE + at + 8)
    done = command("check", store)
    assert done.code == FOUND
    assert "tablet docs-0: group " in done.out
    assert "a search misses the cell" in done.out


def free_list(store: Path, tablet: str) -> int:
    """Where the first free page is noted."""
    data = (store / "tablets" / tablet / "data.mdb").read_bytes()
    meta = max((data[at : at + PAGE] for at in (0, PAGE)), key=lambda page: int.from_bytes(page[144:152], "little"))
    root = int.from_bytes(meta[80:88], "little") * PAGE
    place = root + int.from_bytes(data[root + 16 : root + 18], "little")
    return place + 8 + 8 + 8


def test_a_page_in_use_that_is_noted_as_free(store: Path) -> None:
    """All can be read; but the next writer would write over it."""
    [branch, *_] = live_branches(store, "docs-0")
    damage(store, "docs-0", branch.to_bytes(8, "little"), free_list(store, "docs-0"))
    done = command("check", store)
    assert done.code == FOUND
    assert f"tablet docs-0: page {branch} is on the list of free pages, and has another use already" in done.out


# ------------------------------------------------------------------ a process of its own


def tablet(number: int) -> Path:
    return Path(f"/store/tablets/t-{number}")


def run(deaths: dict[Path, int], *, silence_s: float = 60.0) -> tuple[int, str]:
    """Work that touches three tablets, some of which end the process with a signal."""

    def act(watch: Watch) -> None:
        for path in map(tablet, range(3)):
            if path in watch.damaged:
                continue
            watch.at(path)
            if number := deaths.get(path):
                os.write(2, b"mdb.c:1: Assertion\n")
                os.kill(os.getpid(), number)
        for path, error in watch.damaged.items():
            assert isinstance(error, Corruption)
            print(path.name, error.what)
        raise typer.Exit(FOUND if watch.damaged else 0)

    done = in_child(lambda: contained(act, silence_s=silence_s))
    assert done.code is not None
    return done.code, done.out + done.err


def test_work_that_ends_well_is_passed_on() -> None:
    assert run({}) == (0, "")


def test_each_tablet_ends_one_child_at_most() -> None:
    code, told = run({tablet(0): signal.SIGABRT, tablet(2): signal.SIGBUS})
    assert code == FOUND
    assert told.splitlines() == [
        "t-0 LMDB gave up on it: mdb.c:1: Assertion (SIGABRT); the other tablets were checked",
        "t-2 LMDB gave up on it: mdb.c:1: Assertion (SIGBUS); the other tablets were checked",
    ]


def test_a_child_that_goes_no_further_is_ended() -> None:
    code, told = run({tablet(1): signal.SIGSTOP}, silence_s=0.2)
    assert code == FOUND
    assert told.startswith("t-1 LMDB gave up on it: no answer in 0.2 s (SIGKILL)")


def test_a_child_that_somebody_killed_is_not_a_damaged_tablet() -> None:
    code, told = run({tablet(1): signal.SIGKILL})
    assert code == FAILED
    assert told.startswith("perco: the check was ended by SIGKILL")


def test_a_death_at_no_tablet_ends_the_command() -> None:
    def act(watch: Watch) -> None:
        watch.at(None)
        os.abort()

    done = in_child(lambda: contained(act))
    assert done.code == FAILED
    assert "LMDB gave up on the store" in done.err
    assert "Restore the folder" in done.err


def test_an_error_that_nobody_foresaw_is_a_sentence() -> None:
    def act(watch: Watch) -> None:
        watch.at(tablet(1))
        raise IndexError("list index out of range")

    done = in_child(lambda: contained(act))
    assert done.code == FAILED
    assert "Traceback" not in done.err
    assert "read /store/tablets/t-1: IndexError" in done.err
    assert "a bug in perco" in done.err
