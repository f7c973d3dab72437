"""`perco worker`: runs a program's observers, in one process or several."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import trio

import perco
from perco.cli.screen import FINE, FOUND, complain, show_json, show_table
from perco.errors import UsageError

_AGAIN_S: Final = 1.0  # before a process that died is started again
_AGAIN_MAX_S: Final = 30.0
_LIVED_S: Final = 60.0  # one that lived for so long begins with the short pause again


async def work(
    what: str, store: str, *, processes: int, options: perco.WorkerOptions, until_idle: bool, json: bool
) -> int:
    """Run observers until SIGTERM or SIGINT, or until nothing waits any more."""
    schema = _schema(what)
    if processes > 1:
        return await _many(processes)
    async with perco.open(store, schema) as db, db.worker(options=options) as handle:
        names = ", ".join(schema.observers)
        print(f"running {names} on {store} (process {os.getpid()})", file=sys.stderr, flush=True)
        failed = 0
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as nursery:

                async def listen() -> None:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        return

                nursery.start_soon(listen)
                if until_idle:
                    failed = await db.wait_idle()
                    nursery.cancel_scope.cancel()
        _show(handle.statistics(), json=json)
    if failed:
        complain(f"{failed} changes are on the failed list: perco failed list {store}")
    return FOUND if failed else FINE


def _schema(what: str) -> perco.Schema:
    """The schema that MODULE:NAME names. Raises: UsageError."""
    module, colon, name = what.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{what!r}: write MODULE:SCHEMA, such as app:schema for `schema` in app.py")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name:
            raise UsageError(f"there is no module {module!r} in this folder, or where Python looks") from error
        raise
    except AttributeError as error:
        raise UsageError(f"{what}: {error}") from error
    if not isinstance(found, perco.Schema):
        raise UsageError(f"{what} is {type(found).__name__}, not a perco.Schema")
    if not found.observers:
        raise UsageError(f"{what} declares no observers: there is nothing to run")
    return found


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


async def _many(processes: int) -> int:
    """So many processes like this one, each started again when it dies; they end with this one."""
    worst = FINE
    stopping = False

    async def keep(command: Sequence[str]) -> None:
        nonlocal worst
        pause_s = _AGAIN_S
        while not stopping:
            began = trio.current_time()
            process = await trio.lowlevel.open_process(command)
            running.add(process)
            code = await process.wait()
            running.discard(process)
            if stopping or code in (FINE, FOUND):
                worst = max(worst, code if code in (FINE, FOUND) else FINE)
                return
            if code == 2:  # it said why, and will say so again
                worst = code
                stop()
                return
            complain(f"process {process.pid} of the worker ended with {code}; another one follows in {pause_s:g} s")
            with trio.move_on_after(pause_s):
                await stopped.wait()
            pause_s = _AGAIN_S if trio.current_time() - began > _LIVED_S else min(2 * pause_s, _AGAIN_MAX_S)

    def stop() -> None:
        nonlocal stopping
        stopping = True
        stopped.set()
        for process in running:
            process.terminate()

    running: set[trio.Process] = set()
    stopped = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as outer:

            async def listen() -> None:
                async for _ in signals:
                    stop()

            outer.start_soon(listen)
            async with trio.open_nursery() as nursery:
                for _ in range(processes):
                    nursery.start_soon(keep, _alone(sys.argv))
            outer.cancel_scope.cancel()
    return worst


def _alone(arguments: Sequence[str]) -> list[str]:
    """The command that this process was started with, for one process."""
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
