"""`perco worker`: runs a program's observers, in one process or several."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Final, NamedTuple

import trio

import perco
import perco.aio
from perco import naming
from perco.aio.calling import behind
from perco.cli import systemd
from perco.cli.keeping import keep
from perco.cli.screen import FINE, FOUND, complain, counted, is_new, show_json, show_table, tell_new
from perco.cli.signals import asked_on_trio, asked_to_end
from perco.database.inside import inside
from perco.errors import UsageError
from perco.naming import named
from perco.serve.client import is_client
from perco.serve.databases import is_database
from perco.views import Views

_AGAIN_S: Final = 1.0  # before a process that died is started again


class How(NamedTuple):
    """How a worker runs. `metrics`: where to serve metrics; `drain_s`: for how long, at the end, runs in flight may go
    on; `until_idle`: until no change waits any more; `json`: show what it has done as JSON; `traces`: trace it."""

    options: perco.WorkerOptions
    metrics: str | None
    drain_s: float
    until_idle: bool
    json: bool
    traces: bool = False


async def work(what: str, store: str, how: How, *, processes: int) -> int:
    """Run observers until SIGTERM or SIGINT, or until no change waits any more."""
    schema = _schema(what)
    if processes > 1:
        if how.metrics is not None and not how.metrics.endswith(":0"):
            raise UsageError(
                "several processes cannot serve metrics at one address: give port 0, or run one process each"
            )
        done = (FINE, FOUND) if how.until_idle else (FINE,)
        return await keep([_alone(sys.argv)] * processes, "the worker", again_s=_AGAIN_S, done=done)
    made = is_new(store)
    async with (
        perco.open(store, schema, options=_opened(store)) as db,
        db.worker(options=how.options) as handle,
    ):
        with asked_on_trio() as asked:
            _tell(handle.statistics(), store, made=made and not is_client(db))
            _watch(db, how)
            inside(db).background.start(systemd.told, "systemd")
            failed = 0
            if how.until_idle:
                failed = await _idle(db, asked)
            else:
                await asked.wait()
            systemd.tell("STOPPING=1")
            await handle.drain(timeout=how.drain_s)
        _show(handle.statistics(), json=how.json)
    return _ended(failed, store)


async def _idle(db: perco.Database, asked: trio.Event) -> int:
    """`db.wait_idle()`; 0 if the program was asked to end before."""
    failed = 0

    async def wait() -> None:
        nonlocal failed
        failed = await db.wait_idle()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await asked.wait()
        nursery.cancel_scope.cancel()
    return failed


async def work_on_asyncio(what: str, store: str, how: How) -> int:
    """Like `work`, but on asyncio, and in one process."""
    schema = _schema(what)
    made = is_new(store)
    async with (
        perco.aio.open(store, schema, options=_opened(store)) as db,
        db.worker(options=how.options) as handle,
    ):
        asked = asyncio.Event()
        with asked_to_end(asyncio.get_running_loop().call_soon_threadsafe, asked.set):
            _tell(handle.statistics(), store, made=made)
            _watch(db, how)
            background = inside(behind(db)).background
            background.soon(lambda: background.start(systemd.told, "systemd"))
            failed = 0
            if how.until_idle:
                failed = await _idle_on_asyncio(db, asked)
            else:
                await asked.wait()
            systemd.tell("STOPPING=1")
            await handle.drain(timeout=how.drain_s)
        _show(handle.statistics(), json=how.json)
    return _ended(failed, store)


async def _idle_on_asyncio(db: perco.aio.Database, asked: asyncio.Event) -> int:
    """Like `_idle`."""
    idle, ends = asyncio.ensure_future(db.wait_idle()), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait([idle, ends], return_when=asyncio.FIRST_COMPLETED)
        return idle.result() if idle.done() else 0
    finally:
        idle.cancel()
        ends.cancel()
        await asyncio.gather(idle, ends, return_exceptions=True)


def _watch(db: perco.Database | perco.aio.Database, how: How) -> None:
    """Serve metrics, and trace what is done, as far as this is wanted; each of these needs an extra."""
    if how.metrics is not None:
        from perco import metrics

        print(f"metrics at {metrics.serve(db, how.metrics)}", file=sys.stderr, flush=True)
    if how.traces:
        from perco import otel

        if not otel.is_configured():
            complain("--traces: no tracer provider is set, so nothing is recorded; start with opentelemetry-instrument")
        otel.instrument(db)


def _opened(store: str) -> perco.Options:
    own = not is_database(store)  # if a worker owned a database, it would let no other process in
    return perco.Options(
        postgresql=perco.options.PostgresqlOptions(own=own), bigtable=perco.options.BigtableOptions(own=own)
    )


def _tell(statistics: dict[str, perco.ObserverCounters], store: str, *, made: bool) -> None:
    """Print what the worker does. `made`: it has just made the store."""
    print(f"running {', '.join(statistics)} on {store} (process {os.getpid()})", file=sys.stderr, flush=True)
    if made:
        tell_new(store)


def _ended(failed: int, store: str) -> int:
    if failed:
        complain(f"{counted(failed, 'change')} on the failed list; to see them: perco failed list {store}")
    return FOUND if failed else FINE


def _schema(what: str) -> perco.Schema:
    """The schema that MODULE:NAME names. Raises: UsageError."""
    found = declared(what, "MODULE:SCHEMA, such as app:schema for `schema` in app.py")
    if isinstance(found, Views):
        found = found.schema
    if not isinstance(found, perco.Schema):
        raise UsageError(f"{what} is {type(found).__name__}, not a perco.Schema")
    if not found.observers:
        raise UsageError(f"{what} declares no observers: there is nothing to run")
    return found


def loaded_views(what: str) -> Views:
    """The views that MODULE:VIEWS names, or that the function of that name returns. Raises: UsageError."""
    found = declared(what, "MODULE:VIEWS, such as app:views for `views` in app.py")
    if inspect.isfunction(found):
        found = found()
    if not isinstance(found, Views):
        raise UsageError(f"{what} is {type(found).__name__}, not a perco.views.Views")
    return found


def declared(what: str, form: str) -> object:
    """What MODULE:NAME names. Raises: UsageError, after a traceback if importing the module failed."""
    sys.path.insert(0, os.getcwd())
    try:
        return named(what, form, "in this folder, or where Python looks")
    except UsageError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "run()" in str(error):
            raise UsageError(
                f"{what}: importing the module also runs its program ({error}): put the code that runs it under "
                'if __name__ == "__main__":'
            ) from error
        traceback.print_exception(error.with_traceback(_from_there(error.__traceback__)))
        raise UsageError(f"{what}: the module cannot be imported; its error is printed above") from error


def _from_there(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the frames that lead to the imported module."""
    ways = {__file__, naming.__file__, pkgutil.__file__, importlib.__file__}
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file not in ways and not file.startswith("<frozen importlib"):
            break
        trace = trace.tb_next
    return trace


def _show(statistics: dict[str, perco.ObserverCounters], *, json: bool) -> None:
    if json:
        shown = {id: {"commits": each.commits, "failures": each.failures} for id, each in statistics.items()}
        show_json(shown)
        return
    rows = [
        (id, each.commits, each.collapsed, each.conflicts, each.failures, each.given_up, f"{each.seconds:.3f}")
        for id, each in statistics.items()
    ]
    show_table(("observer", "commits", "collapsed", "conflicts", "failures", "given up", "seconds"), rows)


# ------------------------------------------------------------------ several


def _alone(arguments: Sequence[str]) -> list[str]:
    """The command that this process was started with, without `--processes`."""
    kept: list[str] = []
    skip = False
    for argument in arguments[1:]:
        if skip or argument.startswith("--processes="):
            skip = False
        elif argument == "--processes":
            skip = True
        else:
            kept.append(argument)
    return [sys.executable, "-m", "perco", *kept]
