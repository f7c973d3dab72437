"""The output of commands: tables, JSON, errors and exit codes.

    0  fine            1  findings, or not found            2  wrong usage, or the store cannot be used
    130  interrupted

On a terminal, tables have bold heads; elsewhere, they are plain aligned text.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, ParamSpec

import trio
import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from perco.cli.values import plain
from perco.errors import PercoError, StoreLocked, UsageError
from perco.rpc import addresses
from perco.serve.databases import is_database

P = ParamSpec("P")

FINE: Final = 0
FOUND: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130

_GAP: Final = 2  # between columns
_FOLDED: Final = 8  # text is not folded to fewer characters

GOES_ON: Final = "interrupted; all commits so far are kept, and the same command continues from there"


def perform(action: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Run a command and exit with the code that it returns; errors of perco become a sentence or two on stderr."""
    perform_or("interrupted", action, *args, **kwargs)


def perform_alone(action: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Like `perform`, but for a command that handles SIGTERM and Ctrl-C itself."""
    _perform(None, trio.run, functools.partial(action, *args, **kwargs))


def perform_on_asyncio(action: Callable[P, Coroutine[Any, Any, int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Like `perform_alone`, but for a command that runs on asyncio."""
    _perform(None, lambda run: asyncio.run(run()), functools.partial(action, *args, **kwargs))


def perform_or(interrupted: str, action: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Like `perform`, with `interrupted` as the message after Ctrl-C."""
    _perform(interrupted, trio.run, functools.partial(action, *args, **kwargs))


def _perform(
    interrupted: str | None,
    loop: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
    action: Callable[[], Awaitable[int]],
) -> NoReturn:
    code = FINE
    failed: list[BaseException] = []  # kept here, because the nursery below would wrap it in a group

    async def run() -> None:
        if interrupted is None:
            await work()
            return
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(interrupt, signals, nursery.cancel_scope)
                await work()
                nursery.cancel_scope.cancel()

    async def interrupt(signals: AsyncIterator[int], scope: trio.CancelScope) -> None:
        nonlocal code
        async for _ in signals:
            code = INTERRUPTED
            scope.cancel()
            return

    async def work() -> None:
        nonlocal code
        try:
            done = await action()
            code = code or done
        except SystemExit as error:  # rich raises it when the reader of its output is gone
            failed.append(error)
        except Exception as error:
            failed.append(_leaf(error))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _warn  # type: ignore[assignment]
        try:
            loop(run)
            if failed:
                raise failed[0]
        except StoreLocked as error:
            if error.remedy:
                _fail(str(error))
            _fail(
                f"{error.path} is in use by process {error.pid or 'unknown'} ({error.command or 'unknown command'}). "
                "Stop that process first. Commands that only read rows work while it runs; those that only write rows "
                "do, too, if it shares the store."
            )
        except PercoError as error:
            _fail(str(error))
    if code == INTERRUPTED:
        complain(interrupted or "interrupted")
    raise typer.Exit(code)


def _leaf(error: Exception) -> Exception:
    """The error; if it is a group with only one error in it, that error."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _near(path: str | Path) -> str:
    """The path, relative if it is below the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def called() -> str:
    """The command that starts this program, for messages: `perco` may not be on the user's PATH."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{_near(sys.executable)} -m perco"
    found = shutil.which(program.name)
    on_path = found is not None and Path(found).resolve() == program.resolve()
    return program.name if on_path else _near(program)


def _fail(message: str) -> NoReturn:
    complain(message)
    raise typer.Exit(FAILED)


def must_be_folder(path: Path | None, command: str) -> Path:
    """The store's folder. Raises: UsageError if the store has none here."""
    if path is None:
        raise UsageError(f"{command} reads the files of a store: run it on the folder, on the host that has it")
    return path


def complain(message: str) -> None:
    """Print a line on stderr."""
    print(f"perco: {message}", file=sys.stderr)


def is_elsewhere(store: str) -> bool:
    """Whether `store` is the address of a server or of a database, and not a folder on this host."""
    return addresses.is_address(store) or is_database(store)


def is_new(store: str) -> bool:
    """Whether opening `store` would make a new store: it is a path, and nothing is there."""
    return not is_elsewhere(store) and store != "memory:" and not Path(store).expanduser().exists()


def tell_new(store: str) -> None:
    """Say that a store is new, because its path may have been mistyped."""
    complain(f"there was no store at {store}: a new, empty one was made")


def _warn(message: Warning | str, *_: Any) -> None:
    complain(f"warning: {message}")


def show_json(document: Any) -> None:
    """Print one line of JSON; bytes as {"hex": ...}."""
    print(json.dumps(plain(document), ensure_ascii=False, separators=(", ", ": ")))


def show_table(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    numbers: Sequence[str] = (),
    whole: Sequence[str] = (),
    spare: Sequence[str] = (),
) -> None:
    """Print rows under heads. The columns in `numbers` are aligned to the right. On a terminal, these and the `whole`
    columns are never folded. If the terminal is too narrow, `spare` columns are left out, one by one."""
    lines = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        Columns(head, numbers=numbers, whole=whole, spare=spare).show(lines)
        return
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in [list(head), *lines]:
        cells = zip(line, widths, head, strict=True)
        print("  ".join(c.rjust(w) if name in numbers else c.ljust(w) for c, w, name in cells).rstrip())


class Columns:
    """A table that may grow, on a terminal: it prints the heads once, then rows as they arrive. The first rows decide
    how wide the columns are.

    Text that is too wide is folded, except in heads and in `whole` columns.
    """

    def __init__(
        self,
        head: Sequence[str],
        *,
        numbers: Sequence[str] = (),
        whole: Sequence[str] = (),
        spare: Sequence[str] = (),
    ) -> None:
        self._head, self._numbers, self._whole, self._spare = list(head), numbers, {*numbers, *whole}, list(spare)
        self._console = Console(markup=False, highlight=False, emoji=False)
        self._shown: list[tuple[int, int]] = []  # (index of a column in the head, its width)

    def show(self, lines: Sequence[Sequence[str]]) -> None:
        """Print more rows; the first call chooses the columns and their widths."""
        first = not self._shown
        if first:
            self._shown = self._fitting([max(map(cell_len, c)) for c in zip(self._head, *lines, strict=True)])
        table = Table(box=None, pad_edge=False, header_style="bold", show_header=first)
        for at, width in self._shown:
            name = self._head[at]
            table.add_column(name, justify="right" if name in self._numbers else "left", overflow="fold", width=width)
        for line in lines:
            table.add_row(*(line[at] for at, _ in self._shown))
        least = sum(width + _GAP for _, width in self._shown)
        self._console.print(table, width=max(self._console.width, least), crop=False)

    def _fitting(self, wanted: list[int]) -> list[tuple[int, int]]:
        head, room = self._head, self._console.width
        least = [
            want if name in self._whole else min(want, max(cell_len(name), _FOLDED))
            for name, want in zip(head, wanted, strict=True)
        ]
        chosen = list(range(len(head)))
        for name in self._spare:
            if sum(least[at] + _GAP for at in chosen) > room:
                chosen = [at for at in chosen if head[at] != name]
        widths = {at: wanted[at] for at in chosen}
        while sum(widths.values()) + _GAP * len(widths) > room:
            wide = [at for at in chosen if widths[at] > least[at]]
            if not wide:
                break
            widths[max(wide, key=widths.__getitem__)] -= 1
        return list(widths.items())


def show_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print names and values, a pair on each line."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        print(f"{name.ljust(width)}  {value}")


def counted(count: int, noun: str) -> str:
    """A number and what it counts, in singular or plural. Numbers are plain digits, so that they can be copied."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: int) -> str:
    """A number of bytes, in readable units."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def ago(seconds: float) -> str:
    """How long ago, in readable units."""
    if seconds < 120:
        return f"{seconds:.1f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.1f} h ago" if seconds < 172800 else f"{seconds / 86400:.0f} days ago"
