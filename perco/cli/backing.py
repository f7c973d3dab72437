"""`perco backup`, `perco restore`, `perco backups`: copies of a store for bad days."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated

import trio
import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn, TransferSpeedColumn

from perco.backup import keeping
from perco.backup.layout import Manifest
from perco.backup.places import Folder, chain_of, open_place
from perco.backup.restoring import RestoreOptions, chosen, restore as restore_backup
from perco.backup.taking import BackupOptions, take
from perco.cli.numbers import App
from perco.cli.reading import When
from perco.cli.screen import FINE, FOUND, complain, counted, perform_or, show_json, show_table, size
from perco.cli.values import parse_moment
from perco.errors import Corruption, UsageError

_NOTHING_LEFT = "interrupted; no part of the backup is left"
_NOTHING_MADE = "interrupted; no part of the new store is left"
_MIB = 1 << 20


async def backup(store: str, to: str, options: BackupOptions, keep: int | None, *, verify: bool, json: bool) -> int:
    """Take a backup; then verify it and remove old ones, as asked."""
    with _progress("reading pages") as tell:
        made = await take(store, to, options, lambda progress: tell(progress.done, progress.total))
    if verify:
        await _verified(to, made.name)
    gone: list[str] = []
    if keep is not None:
        place = open_place(to)
        if not isinstance(place, Folder):
            raise UsageError("--keep is for a folder of backups; a file holds one")
        gone = keeping.prune(place, keep)
    if json:
        show_json(_told(made) | {"removed": gone})
        return FINE
    pages, stored = (sum(getattr(each, what) for each in made.tablets) for what in ("pages", "stored"))
    over = f"{stored} of {counted(pages, 'page')}; the others are in {made.base} and below" if made.base else "full"
    print(f"{made.name}: {size(made.size)} ({over}){', verified' if verify else ''}")
    print(f"It has every transaction up to timestamp {made.at}.")
    for name in gone:
        print(f"{name} removed")
    return FINE


async def restore(backups: str, store: str, name: str, when: When, *, json: bool) -> int:
    """Restore a backup into a new folder."""
    if when.ts is not None and when.at is not None:
        raise UsageError("give --ts or --at, not both")
    options = RestoreOptions(name=name, at=when.ts if when.at is None else parse_moment(when.at))
    with _progress("writing pages") as tell:
        made = await restore_backup(backups, store, options, tell)
    if json:
        show_json(_told(made) | {"restored_to": store})
    else:
        moment = f"as of {options.at}" if options.at is not None else f"at {_moment(made)}, timestamp {made.at}"
        print(f"{store} is what {made.path} was {moment}. Open it, or check it first:")
        print(f"  perco check {store}")
    return FINE


async def listed(backups: str, *, json: bool) -> int:
    """List the backups. Returns 1 if one of them cannot be used."""
    found = keeping.kept_in(open_place(backups))
    if json:
        show_json([{"name": each.name, "error": each.error or None} | _told_or_none(each.manifest) for each in found])
    else:
        head = ("backup", "taken (UTC)", "timestamp", "size", "base")
        rows = [_row(each.name, each.manifest) for each in found]
        show_table(head, rows, numbers=("timestamp", "size"))
        for each in found:
            if each.error:
                complain(each.error)
    return FOUND if any(each.error for each in found) else FINE


async def verified(backups: str, name: str, *, json: bool) -> int:
    """Verify a backup. Returns 1 if it is damaged."""
    which = chosen(open_place(backups), name)
    try:
        read = await _verified(backups, which)
    except Corruption as error:
        if json:
            show_json({"name": which, "error": str(error)})
        else:
            complain(str(error))
        return FOUND
    if json:
        show_json({"name": which, "error": None, "bytes": read})
    else:
        print(f"{which}: all digests are right, {size(read)} read")
    return FINE


async def pruned(backups: str, keep: int, *, json: bool) -> int:
    """Remove old backups."""
    place = open_place(backups)
    if not isinstance(place, Folder):
        raise UsageError(f"{backups} is a file, which holds one backup: remove the file")
    gone = keeping.prune(place, keep)
    if json:
        show_json({"removed": gone, "kept": place.names()})
    else:
        print(f"{counted(len(gone), 'backup')} removed, {len(place.names())} kept")
    return FINE


async def _verified(backups: str, name: str) -> int:
    place = open_place(backups)
    with _progress("verifying") as tell:
        total = sum(each.size for each in chain_of(place, name))

        def work() -> int:
            def told(done: int) -> None:
                trio.from_thread.check_cancelled()
                tell(done, total)

            return keeping.verify(place, name, told)

        return await trio.to_thread.run_sync(work)


def _told(made: Manifest) -> dict[str, object]:
    return {
        "name": made.name,
        "base": made.base or None,
        "store": made.store,
        "path": made.path,
        "ts": made.at,
        "last_ts": made.last,
        "time": datetime.fromtimestamp(made.time, UTC).isoformat(),
        "bytes": made.size,
        "pages": sum(each.pages for each in made.tablets),
        "stored": sum(each.stored for each in made.tablets),
    }


def _row(name: str, made: Manifest | None) -> tuple[object, ...]:
    if made is None:
        return name, "cannot be used", "", "", ""
    return name, _moment(made), made.at, size(made.size), made.base or "full"


def _told_or_none(made: Manifest | None) -> dict[str, object]:
    return {} if made is None else _told(made)


def _moment(made: Manifest) -> str:
    return datetime.fromtimestamp(made.time, UTC).strftime("%Y-%m-%d %H:%M:%S")


@contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show the progress, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# ------------------------------------------------------------ the command line

_JSON = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_BACKUPS = Annotated[str, typer.Argument(metavar="BACKUPS", help="A folder of backups, or a .tar file with one.")]
_NAME = Annotated[str, typer.Option("--backup", metavar="NAME", help="Which one; by default, the newest.")]


def _backup(
    store: Annotated[str, typer.Argument(metavar="STORE", help="The store's folder.")],
    to: Annotated[str, typer.Argument(metavar="BACKUPS", help="A folder of backups, made if needed; or FILE.tar.")],
    full: Annotated[bool, typer.Option("--full", help="Store every page, even if there is a backup already.")] = False,
    rate: Annotated[
        float, typer.Option("--rate", min=0.0, metavar="MIB", help="Read at most so many MiB a second; 0: no limit.")
    ] = 64.0,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            min=1,
            metavar="N",
            help="Afterwards, keep the newest N backups, and those that they need; remove the others.",
        ),
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Afterwards, read the backup and compare digests.")] = False,
    json: _JSON = False,
) -> None:
    """Back up a store, while it is in use or closed.

    The backup has one state of all tables: that of one moment, for which writes wait a few milliseconds. It has the
    history, and the changes that wait for observers. If BACKUPS has a backup of the store already, only the pages that
    have changed since are stored. If the command is killed, nothing is left of the backup it was taking.

    The command runs on the machine of the store. --rate limits how much it disturbs other processes; if no process has
    the store open, there is no limit.

    \b
    Examples:
      perco backup web/ /mnt/backups/web
      perco backup web/ /mnt/backups/web --verify --keep 30
      perco backup web/ web-2026-03-01.tar
    """
    options = BackupOptions(full=full, bytes_per_s=int(rate * _MIB))
    perform_or(_NOTHING_LEFT, backup, store, to, options, keep, verify=verify, json=json)


def _restore(
    backups: _BACKUPS,
    store: Annotated[str, typer.Argument(metavar="STORE", help="A new folder for the store.")],
    name: _NAME = "",
    ts: Annotated[int | None, typer.Option("--ts", metavar="N", help="Restore the store as of a timestamp.")] = None,
    at: Annotated[
        str | None,
        typer.Option("--at", metavar="TIME", help="Restore it as of TIME: 5m, 2h (ago), 2026-03-01T12:00."),
    ] = None,
    json: _JSON = False,
) -> None:
    """Restore a store from a backup, into a new folder.

    The new store is what the old one would have been if its process had died at the moment of the backup: it has all
    transactions that had committed, and the changes that wait for observers. It is a store of its own, and its
    timestamps go on far above those of the old one. Readers of changes that had read further than the backup are told
    so (TimelineLost). The digests of all pages are compared. If the command is killed, there is no store.

    With --ts or --at, the new store is what the old one was at that earlier moment, as far back as the backup has the
    history (a day, unless its schema says otherwise). Later commits are not in it. An observer
    whose run came later runs again.

    \b
    Examples:
      perco restore /mnt/backups/web web/
      perco restore /mnt/backups/web web-on-monday/ --backup 20260302T060000-7
      perco restore /mnt/backups/web web-before/ --at 2026-03-01T11:59
    """
    perform_or(_NOTHING_MADE, restore, backups, store, name, When(ts=ts, at=at), json=json)


_app = App(
    no_args_is_help=True, rich_markup_mode=None, help="Backups that `perco backup` has taken: list, verify, remove."
)


@_app.command("list")
def _list(backups: _BACKUPS, json: _JSON = False) -> None:
    """List backups, the oldest first. Exits with 1 if one of them cannot be used."""
    perform_or("interrupted", listed, backups, json=json)


@_app.command("verify")
def _verify(backups: _BACKUPS, name: _NAME = "", json: _JSON = False) -> None:
    """Read a backup, with all backups that it needs, and compare the digests. Exits with 1 if it is damaged."""
    perform_or("interrupted", verified, backups, name, json=json)


@_app.command("prune")
def _prune(
    backups: _BACKUPS,
    keep: Annotated[int, typer.Option("--keep", min=1, metavar="N", help="How many of the newest to keep.")],
    json: _JSON = False,
) -> None:
    """Remove old backups: keep the newest N, and those that these need.

    An incremental backup needs the one before it, down to the last full one. So take a full backup now and then:
    perco backup STORE BACKUPS --full.
    """
    perform_or("interrupted; each backup is there as a whole, or not at all", pruned, backups, keep, json=json)


def register(app: typer.Typer) -> None:
    """Add the commands to the app."""
    app.command(name="backup")(_backup)
    app.command(name="restore")(_restore)
    app.add_typer(_app, name="backups")
