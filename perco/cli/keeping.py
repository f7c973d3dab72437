"""Keeps processes running: restarts those that die, and ends them all when this process ends."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
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
    return await _Keeping(what, again_s, done, ready, environment or os.environ).run(commands)


class _Keeping:
    """Commands that run; the arguments are those of `keep`."""

    def __init__(
        self, what: str, again_s: float, done: Collection[int], ready: str, environment: Mapping[str, str]
    ) -> None:
        self._what, self._again_s, self._done = what, again_s, done
        self._ready, self._environment = ready, environment
        self._running: set[Command] = set()
        self._stopped = trio.Event()
        self._worst = FINE

    async def run(self, commands: Sequence[Sequence[str]]) -> int:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async with trio.open_nursery() as outer:
                outer.start_soon(self._listen, signals)
                async with trio.open_nursery() as nursery:
                    for command in commands:
                        nursery.start_soon(self._keep, command)
                outer.cancel_scope.cancel()
        return self._worst

    async def _keep(self, command: Sequence[str]) -> None:
        """Run a command, again and again, until it ends by itself or all stop."""
        pause_s = self._again_s
        has_begun = False
        while not self._stopped.is_set():
            began = trio.current_time()
            process, told = _begin(command, self._environment, self._ready)
            self._running.add(process)
            code = await process.wait()
            self._running.discard(process)
            has_begun |= _has_begun(told)
            if self._stopped.is_set() or code in self._done:
                self._worst = max(self._worst, code if code in self._done else FINE)
                return
            if code == _REFUSED and not has_begun:
                self._worst = code
                self._stop()
                return
            complain(
                f"process {process.pid} of {self._what} {_how_it_ended(code)}; another one starts in {pause_s:g} s"
            )
            with trio.move_on_after(pause_s):
                await self._stopped.wait()
            pause_s = self._again_s if trio.current_time() - began > _LIVED_S else min(2 * pause_s, _AGAIN_MAX_S)

    async def _listen(self, signals: AsyncIterator[int]) -> None:
        async for _ in signals:
            if not self._stopped.is_set():
                self._stop()
                continue
            for process in self._running:
                process.kill()

    def _stop(self) -> None:
        self._stopped.set()
        for process in self._running:
            process.terminate()


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
