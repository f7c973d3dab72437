"""`perco check`: verify the stored data, repair it, and accept it after a loss (S2).

A folder is checked in a process of its own (`containing.py`), because a damaged file may kill the process that reads
it, and the other files must still be checked. A served store, given by its address, is checked by a client,
which reads the cells, but not the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import starmap
from pathlib import Path
from typing import Any, NoReturn, TextIO

import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TextColumn

import perco
from perco.check.check import CheckResult, Progress, check
from perco.check.examine import Finding
from perco.check.repair import RepairResult, repair, repair_elsewhere
from perco.check.system import Groups
from perco.cli.containing import Watch, contained
from perco.cli.screen import FINE, FOUND, complain, counted, is_elsewhere, must_be_folder, perform, show_json
from perco.database.database import Database
from perco.database.inside import inside, local_owner
from perco.errors import Corruption, PercoError, SessionEnded, StoreError, TooLarge, Unavailable, UsageError
from perco.schema.catalogue import SYSTEM_TABLE
from perco.serve.client import is_client, remote_owner
from perco.serve.messages import FolderIs
from perco.serve.opening import joining, offline
from perco.storage import PROTOCOL_GROUPS, Folder, LmdbTablet
from perco.storage.damaged import DamagedTablet, verify
from perco.storage.folder import accept, doubt_of
from perco.tablets.local import RESTORE

_NOTES_SHOWN = 10
_RESTORE = f"{RESTORE}; the other tablets can be read in the copy, as of the time when it was made"


def check_contained(store: str, *, json: bool, accepting: bool, repairing: bool) -> NoReturn:
    """Run `check_store` in a child process; if reading a tablet kills the child, run another child without that tablet.
    Then exit. A served store is checked in this process."""
    if is_elsewhere(store):
        perform(check_served, store, json=json, accepting=accepting, repairing=repairing)

    def act(watch: Watch) -> None:
        perform(check_store, store, watch, json=json, accepting=accepting, repairing=repairing)

    raise typer.Exit(contained(act))


async def check_store(store: str, watch: Watch, *, json: bool, accepting: bool, repairing: bool) -> int:
    """Print findings and counts; with `repairing`, those that are left after the repair. With `accepting`, if there are
    no errors, a store that needed a check can be opened again."""
    await _verify(store, watch)
    await _set_missing_aside(store, watch)
    if watch.damaged and repairing:
        complain("nothing is repaired while a tablet cannot be read: restore the folder from a copy")
        repairing = False
    repaired: tuple[Finding, ...] = ()
    settled = 0
    path, marked = Path(store), ""
    try:
        opening = perco.open(store, readonly=True, accept_loss=True)
        opening.damaged = watch.damaged
        async with opening as db:
            path = must_be_folder(inside(db).place.path, "perco check")
            marked = doubt_of(path)
            if not repairing or (accepting and marked):
                _watched(db, watch)
                with _progress(watch.terminal, _total(db), watch.step) as tell:
                    result = await check(
                        inside(db).driver.store,
                        ts=await inside(db).oracle.draw(),
                        alive=_alive(db),
                        progress=tell,
                        told=[(each.table, each.start) for each in _damaged(db)],
                    )
    except (Corruption, StoreError) as error:  # a store that has moved refuses to open, but its files may be damaged
        if not watch.damaged:
            raise
        result = _unread(error)
    if repairing and (not (accepting and marked) or _curable(result)):
        watch.at(None)
        async with offline(store, accept_loss=accepting) as db:
            _watched(db, watch)
            with _progress(watch.terminal, _total(db), watch.step) as tell:
                done = await repair(
                    inside(db).driver, local_owner(db).local.store, ts=inside(db).oracle.last, progress=tell
                )
        repaired, settled, result = done.repaired, done.settled, done.after
    result = replace(result, findings=(*starmap(_of_tablet, watch.damaged.items()), *result.findings))
    accepted = accepting and bool(marked) and not result.errors
    if accepted and not repairing:
        accept(path)
    done = RepairResult(repaired, settled, result)
    if json:
        _show_json(str(path.absolute()), done, marked, accepted=accepted, files=True)
    else:
        _render_all(done, repairing=repairing)
        _render_mark(path, result, marked, accepted=accepted, accepting=accepting)
    return FINE if result.clean else FOUND


async def check_served(store: str, *, json: bool, accepting: bool, repairing: bool) -> int:
    """Check the cells of a served store through its server and, with `repairing`, repair them."""
    if accepting:
        raise UsageError(
            "--accept is for a folder that perco refuses to open after a restart; a served store is open, so there is "
            "nothing to accept"
        )
    async with joining(store) if repairing else perco.open(store, readonly=True) as db:
        assert is_client(db)
        folder = await remote_owner(db).folder()
        try:
            done = await _over_the_wire(db, folder, repairing=repairing)
        except (SessionEnded, Unavailable) as error:
            raise StoreError(
                f"the check was cut short: {_reason(error)}. The rest of the store was not read: run the check again"
                + (" (its repairs so far are kept)" if repairing else "")
            ) from error
        except TooLarge as error:
            raise StoreError(
                f"the check was cut short: a row does not fit into a message ({error.what}: {error.size} is over the "
                f"limit of {error.limit}). On the host that serves {store} run `perco check {folder.path}`"
            ) from error
    if json:
        _show_json(folder.path, done, folder.mark, accepted=False, files=False)
    else:
        _render_all(done, repairing=repairing)
        print(
            f"only the cells were checked: to check the files too, run `perco check {folder.path}` on the host that "
            f"serves {store}"
        )
    return FINE if done.after.clean else FOUND


async def _over_the_wire(db: Database, folder: FolderIs, *, repairing: bool) -> RepairResult:
    store, ts = remote_owner(db).store, await inside(db).oracle.newest()

    async def groups() -> list[Groups]:
        return [(file.table, file.start, file.groups) for file in (await remote_owner(db).folder()).files]

    total = sum(sum(file.entries.values()) for file in folder.files if file.table != SYSTEM_TABLE)
    with _progress(sys.stderr if sys.stderr.isatty() else None, total, lambda: None) as tell:
        if repairing:
            return await repair_elsewhere(inside(db).driver, store, ts=ts, progress=tell, groups=groups)
        return RepairResult((), 0, await check(store, ts=ts, progress=tell, groups=groups))


def _reason(error: SessionEnded | Unavailable) -> str:
    return error.what if isinstance(error, Unavailable) else str(error.args[0])


def _show_json(store: str, done: RepairResult, marked: str, *, accepted: bool, files: bool) -> None:
    result = done.after
    found: dict[str, Any] = {"store": store, "clean": result.clean, **_plain(result)}
    found |= {"findings": list(map(_as_json, result.findings)), "repaired": list(map(_as_json, done.repaired))}
    found |= {"settled": done.settled, "errors": result.errors, "warnings": result.warnings}
    show_json({**found, "mark": marked, "accepted": accepted, "files_checked": files})


def _render_all(done: RepairResult, *, repairing: bool) -> None:
    result = done.after
    for finding in done.repaired:
        assert finding.repair is not None
        print(f"repaired {finding.invariant:<3}  {finding.where}: {finding.what} ({finding.repair.what})")
    if done.settled:
        print(f"settled  {counted(done.settled, 'lock')} left behind")
    _render(result)
    if repairing:
        left = sum(finding.severity != "note" for finding in result.findings) + result.dropped
        print(_done(len(done.repaired), left, done.settled))


async def _verify(store: str, watch: Watch) -> None:
    """Read each tablet's file once, page by page, before its cells are interpreted. Set aside the files that cannot
    be read, so that the others can be checked."""
    try:
        folder = Folder.beside(Path(store).expanduser(), accept_loss=True)  # noqa: ASYNC240
    except PercoError:
        return  # opening the store reports this error
    try:
        for tablet in sorted(folder.tablet_paths()):
            if tablet in watch.damaged:
                continue
            watch.at(tablet)
            try:
                for _ in verify(tablet, lock=not folder.without_lock):
                    watch.step()
                    await trio.lowlevel.checkpoint()
            except (Corruption, StoreError) as error:
                if tablet.exists():  # otherwise the owner has compacted it meanwhile, into another folder (P6)
                    found = error if isinstance(error, Corruption) else Corruption(str(tablet), str(error))
                    watch.damaged[tablet] = found
    finally:
        folder.release(clean=False)


async def _set_missing_aside(store: str, watch: Watch) -> None:
    """Set missing tablets aside, so that the others can be checked."""
    while True:
        opening = perco.open(store, readonly=True, accept_loss=True)
        opening.damaged = watch.damaged
        try:
            async with opening:
                return
        except Corruption as error:
            path = Path(error.where)
            if path in watch.damaged or not error.what.endswith(RESTORE):
                return
            watch.damaged[path] = Corruption(str(path), error.what.removesuffix(f": {RESTORE}"))
        except PercoError:
            return  # opening the store reports this error


def _watched(db: perco.Database, watch: Watch) -> None:
    """Make every tablet announce that it is about to be read."""
    for tablet in inside(db).place.store.tablets_here():
        if isinstance(tablet, LmdbTablet):
            for name in ("read", "scan", "submit", "entries", "groups"):
                setattr(tablet, name, _telling(watch, tablet.engine.path, getattr(tablet, name)))


def _damaged(db: perco.Database) -> list[DamagedTablet]:
    return [tablet for tablet in inside(db).place.store.tablets_here() if isinstance(tablet, DamagedTablet)]


def _telling(watch: Watch, path: Path, call: Callable[..., Any]) -> Callable[..., Any]:
    def told(*args: Any) -> Any:
        watch.at(path)
        return call(*args)

    return told


def _of_tablet(path: Path, error: Corruption) -> Finding:
    return Finding("error", "S1", f"tablet {path.name}", error.what, advice=_RESTORE)


def _unread(error: PercoError) -> CheckResult:
    """The report if the catalogue cannot be read, or belongs to a store that has moved."""
    said = f"{error.where}: {error.what}" if isinstance(error, Corruption) else str(error)
    what = f"{said}; only the pages were checked, not the cells of the tablets"
    finding = Finding("error", "N10", "catalogue", what, advice=_RESTORE)
    return CheckResult(ts=0, findings=(finding,))


def _alive(db: perco.Database) -> Callable[[int], bool]:
    """L1: without an owner, all clients are gone. A new owner would settle the locks as those of dead clients."""
    return lambda start_ts: inside(db).place.owner_alive


def _curable(result: CheckResult) -> bool:
    """Whether every error has a repair. Otherwise a store whose newest writes may be lost is not opened (S2)."""
    return not result.dropped and all(f.repair for f in result.findings if f.severity == "error")


def _plain(result: CheckResult) -> dict[str, Any]:
    return {field.name: getattr(result, field.name) for field in fields(result) if field.name != "findings"}


def _as_json(finding: Finding) -> dict[str, Any]:
    shown = {name: getattr(finding, name) for name in ("severity", "invariant", "where", "what")}
    return {**shown, "repair": finding.repair.what if finding.repair else None, "remedy": finding.remedy}


def _done(repaired: int, left: int, settled: int) -> str:
    if repaired or left:
        return f"{repaired} repaired" + (f", {left} cannot be" if left else "")
    return "nothing else to repair" if settled else "nothing to repair"


def _render(result: CheckResult) -> None:
    notes = 0
    for finding in result.findings:
        notes += finding.severity == "note"
        if finding.severity != "note" or notes <= _NOTES_SHOWN:
            print(f"{finding.severity:<7}  {finding.invariant:<3}  {finding.where}: {finding.what}")
            if finding.severity != "note":
                print(f"              {finding.remedy}")
    if notes > _NOTES_SHOWN:
        more = result.unsettled + result.orphans - _NOTES_SHOWN
        print(f"note          and {counted(more, 'more lock')} left behind")
    if result.dropped:
        print(f"error    and {counted(result.dropped, 'more finding')}")
    print(
        f"{verdict(result)}: {counted(result.tables, 'table')}, {counted(result.rows, 'row')}, "
        f"{counted(result.cells, 'cell')} ({counted(result.records, 'record')}, {counted(result.locks, 'lock')}, "
        f"{counted(result.notifications, 'notification')}) as of timestamp {result.ts}, in {result.seconds:.1f} s"
    )
    if result.failed:
        print(f"{counted(result.failed, 'change')} on the failed list; to see them: perco failed list")
    if result.waste:
        wait = "waits" if result.waste == 1 else "wait"
        print(f"{counted(result.waste, 'cell')} that no reader needs any more {wait} for the next vacuum")
    if result.sampled > 1:
        print(f"only one transaction in {result.sampled} was compared across all of its cells")


def verdict(result: CheckResult) -> str:
    """The result in a word, or as the numbers of errors and warnings."""
    return "clean" if result.clean else f"{counted(result.errors, 'error')}, {counted(result.warnings, 'warning')}"


def _render_mark(path: Path, result: CheckResult, marked: str, *, accepted: bool, accepting: bool) -> None:
    if accepted:
        print("accepted: the store can be opened again; its newest writes may be missing")
    elif accepting and not marked:
        print("there was nothing to accept: no write is in doubt")
    elif accepting:
        print("not accepted, because of the errors: restore a copy, or open this store with accept_loss=True")
    elif marked == "before a restart":
        print(f"the store's newest writes may be lost (S2); to accept that: perco check --accept {path}")
    elif marked == "copied while open":
        print(f"this is a copy of a store that was open (I1); to accept it as a store: perco check --accept {path}")


def _total(db: perco.Database) -> int:
    """The number of cells to check."""
    return sum(
        tablet.entries(group)
        for tablet in inside(db).place.store.tablets_here()
        if tablet.table != SYSTEM_TABLE
        for group in (*PROTOCOL_GROUPS, *inside(db).catalogue.groups(tablet.table))
    )


@contextmanager
def _progress(terminal: TextIO | None, total: int, step: Callable[[], None]) -> Iterator[Callable[[Progress], None]]:
    """Show a progress bar on a terminal; elsewhere, show nothing."""
    if terminal is None:
        yield lambda _: step()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} of {task.total} cells"))
    with Bar(*columns, console=Console(file=terminal), transient=True) as bar:
        task = bar.add_task("checking", total=total)

        def tell(seen: Progress) -> None:
            step()
            bar.update(task, description=f"checking {seen.table}", completed=seen.cells)

        yield tell
