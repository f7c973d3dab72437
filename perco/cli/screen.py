"""Where commands meet the terminal: tables, JSON, errors and exit codes.

    0  fine            1  findings, or not found            2  wrong usage, or the store cannot be used
    130  interrupted

On a terminal tables have coloured heads; elsewhere they are aligned text, and nothing else.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, ParamSpec

import trio
import typer
from rich.console import Console
from rich.table import Table

from perco.cli.values import plain
from perco.errors import PercoError, StoreLocked

P = ParamSpec("P")

FINE: Final = 0
FOUND: Final = 1
FAILED: Final = 2
INTERRUPTED: Final = 130

GOES_ON: Final = "interrupted; what was committed is kept, and the same command goes on from there"


def perform(action: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Run a command and end with the exit code that it returns; what it cannot do, in a sentence or two on stderr."""
    perform_or("interrupted", action, *args, **kwargs)


def perform_or(interrupted: str, action: Callable[P, Awaitable[int]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """Likewise; `interrupted`: what to say after Ctrl-C."""
    code = FINE
    failed: list[Exception] = []  # as it is, without the group of the nursery below

    async def run() -> None:
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
            done = await action(*args, **kwargs)
            code = code or done
        except Exception as error:
            failed.append(_leaf(error))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _warn  # type: ignore[assignment]
        try:
            trio.run(run)
            if failed:
                raise failed[0]
        except StoreLocked as error:
            _fail(
                f"{error.path} is in use by process {error.pid or 'unknown'} ({error.command or 'unknown command'}). "
                "End it first; status, get, scan, check, wait and pins also work beside it."
            )
        except PercoError as error:
            _fail(str(error))
    if code == INTERRUPTED:
        complain(interrupted)
    raise typer.Exit(code)


def _leaf(error: Exception) -> Exception:
    """What is in a group, if it is one thing."""
    while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _near(path: str | Path) -> str:
    """Relative where that is below this folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def called() -> str:
    """How this program was called, for what to try next: `perco` is not on everybody's path."""
    program = Path(sys.argv[0])
    if program.name == "__main__.py":
        return f"{_near(sys.executable)} -m perco"
    found = shutil.which(program.name)
    on_path = found is not None and Path(found).resolve() == program.resolve()
    return program.name if on_path else _near(program)


def _fail(message: str) -> NoReturn:
    complain(message)
    raise typer.Exit(FAILED)


def complain(message: str) -> None:
    """A line on stderr."""
    print(f"perco: {message}", file=sys.stderr)


def _warn(message: Warning | str, *_: Any) -> None:
    complain(f"warning: {message}")


def show_json(document: Any) -> None:
    """One line of JSON; bytes as {"hex": ...}."""
    print(json.dumps(plain(document), ensure_ascii=False, separators=(", ", ": ")))


def show_table(head: Sequence[str], rows: Sequence[Sequence[object]], *, numbers: Sequence[str] = ()) -> None:
    """Rows under heads; `numbers`: the heads of columns that are aligned to the right."""
    lines = [[str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in head:
            table.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
        for line in lines:
            table.add_row(*line)
        Console(markup=False, highlight=False, emoji=False).print(table)
        return
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    for line in [list(head), *lines]:
        cells = zip(line, widths, head, strict=True)
        print("  ".join(c.rjust(w) if name in numbers else c.ljust(w) for c, w, name in cells).rstrip())


def show_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Names and values, one to a line."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        print(f"{name.ljust(width)}  {value}")


def counted(count: int, noun: str) -> str:
    """A number and what it counts, in singular or plural. Numbers are plain digits everywhere, to be copied."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def size(count: int) -> str:
    """Bytes for people."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount, units = amount / 1024, units[1:]
    return f"{amount:.0f} {units[0]}" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def ago(seconds: float) -> str:
    """How long ago, for people."""
    if seconds < 120:
        return f"{seconds:.1f} s ago"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min ago"
    return f"{seconds / 3600:.1f} h ago" if seconds < 172800 else f"{seconds / 86400:.0f} days ago"
