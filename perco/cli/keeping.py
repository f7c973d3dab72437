"""Keeps processes running: restarts those that die, and ends them all when this process ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import trio

from perco.cli.screen import FINE, complain
from perco.serve.children import Command

_AGAIN_MAX_S: Final = 30.0
_LIVED_S: Final = 60.0  # a process that lived this long is started again after the shortest pause
_REFUSED: Final = 2  # exit code of a command that cannot begin, and has said why


async def keep(
    commands: Sequence[Sequence[str]],
    what: str,
    *,
    again_s: float,
    done: Collection[int] = (FINE,),
    ready: str = "",
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run commands until all have ended by themselves. SIGTERM or SIGINT terminates them; a second signal kills them.
    Returns the worst exit code.

    Args:
        what: the name of what the commands run, for error messages.
        done: exit codes of a command that has ended by itself.
        ready: the name of an environment variable. In it, each command gets a descriptor to write to when it has begun
            its work. If a command exits with 2 before that, it cannot begin, and all commands stop. If it exits with 2
            later, it is started again.
        again_s: the pause before a command that died is started again; it doubles each time that the command dies soon
            after its start.
    """
    worst = FINE
    stopping = False

    async def run(command: Sequence[str]) -> None:
        nonlocal worst
        pause_s = again_s
        has_begun = False
        while not stopping:
            began = trio.current_time()
            process, told = _begin(command, environment or os.environ, ready)
            running.add(process)
            code = await process.wait()
            running.discard(process)
            has_begun |= _has_begun(told)
            if stopping or code in done:
                worst = max(worst, code if code in done else FINE)
                return
            if code == _REFUSED and not has_begun:
                worst = code
                stop()
                return
            complain(f"process {process.pid} of {what} {_how_it_ended(code)}; another one starts in {pause_s:g} s")
            with trio.move_on_after(pause_s):
                await stopped.wait()
            pause_s = again_s if trio.current_time() - began > _LIVED_S else min(2 * pause_s, _AGAIN_MAX_S)

    def stop() -> None:
        nonlocal stopping
        stopping = True
        stopped.set()
        for process in running:
            process.terminate()

    running: set[Command] = set()
    stopped = trio.Event()
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async with trio.open_nursery() as outer:

            async def listen() -> None:
                async for _ in signals:
                    if not stopping:
                        stop()
                        continue
                    for process in running:
                        process.kill()

            outer.start_soon(listen)
            async with trio.open_nursery() as nursery:
                for command in commands:
                    nursery.start_soon(run, command)
            outer.cancel_scope.cancel()
    return worst


def _begin(command: Sequence[str], environment: Mapping[str, str], ready: str) -> tuple[Command, int]:
    """Start a command; returns it, and the read end of a pipe for `_has_begun`."""
    told, tells = os.pipe()
    given = {**environment, **({ready: str(tells)} if ready else {})}
    process = Command(command, environment=given, pass_fds=[tells] if ready else [])
    os.close(tells)
    return process, told


def _has_begun(told: int) -> bool:
    """Whether a command that has ended had begun its work; closes the pipe."""
    os.set_blocking(told, False)
    try:
        return bool(os.read(told, 1))
    except BlockingIOError:  # a child of the command still has the other end open, and nothing was written
        return False
    finally:
        os.close(told)


def _how_it_ended(code: int) -> str:
    if code < 0:
        return f"was killed by signal {-code} ({signal.strsignal(-code)})"
    return f"ended with exit code {code}"
