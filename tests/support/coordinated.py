"""Servers that give timestamps to direct clients of a database, and worker processes, to be harmed."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

from bench.against.coordinator import Coordinator

KILLED: Final = signal.SIGKILL
ENDED: Final = signal.SIGTERM
STOPPED: Final = signal.SIGSTOP
_DEPOSED_S: Final = 60.0
_LOST: Final = 2  # the exit code of a server that lost the store to another one


class Coordinators:
    """Two at a time: one leads, the other stands by."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder, self._number = url, folder, 0
        self.leader = self._start()
        self.leader.says("serving ")
        self.standby = self._stand_by()

    def _stand_by(self) -> Coordinator:
        standby = self._start()
        standby.says("standing by: ")
        return standby

    def _start(self) -> Coordinator:
        self._number += 1
        return Coordinator(self._url, self._folder / f"s{self._number}")

    def follow(self, how: signal.Signals) -> None:
        """Kill, end or stop the leader, until the other one leads, and start another standby. A leader that was stopped
        goes on then, and has to find out that it is deposed.

        Raises: RuntimeError, if it does not end with an error.
        """
        former = self.leader
        former.send(how)
        self.standby.says("serving ")
        if how == STOPPED:
            former.send(signal.SIGCONT)
            if (code := former.wait(_DEPOSED_S)) != _LOST:
                raise RuntimeError(f"a server that was deposed ended with exit code {code}")
        former.end()
        self.leader, self.standby = self.standby, self._stand_by()

    def check(self) -> bool:
        """Whether the leader was too slow to renew its lease, so that the other one leads by now.

        Raises: RuntimeError, if one of them has ended for another reason.
        """
        if (code := self.standby.ended()) is not None:
            raise RuntimeError(f"the standby has ended with exit code {code}")
        code = self.leader.ended()
        if code is None:
            return False
        if code != _LOST:
            raise RuntimeError(f"the leader has ended with exit code {code}")
        self.standby.says("serving ")
        self.leader.end()
        self.leader, self.standby = self.standby, self._stand_by()
        return True

    def replace_standby(self) -> None:
        """Kill the one that stands by, and start another."""
        self.standby.end()
        self.standby = self._stand_by()

    def end(self) -> None:
        for each in (self.leader, self.standby):
            each.end()


class Workers:
    """`perco worker` processes. Args: `schema`, as `perco worker` takes it: "module:NAME"."""

    def __init__(self, url: str, schema: str, processes: int = 2) -> None:
        self._command = [sys.executable, "-m", "perco", "worker", schema, "--store", url]
        self._all = [self._start() for _ in range(processes)]

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdout=subprocess.DEVNULL)

    def send(self, which: int, number: signal.Signals) -> None:
        self._all[which].send_signal(number)

    def check(self) -> None:
        """Raises: RuntimeError, if one of them has ended."""
        for each in self._all:
            if each.poll() is not None:
                raise RuntimeError(f"a worker has ended with exit code {each.returncode}")

    def replace(self, which: int) -> None:
        """Kill one, and start another."""
        self._kill(self._all[which])
        self._all[which] = self._start()

    def end(self) -> None:
        for worker in self._all:
            self._kill(worker)

    @staticmethod
    def _kill(worker: subprocess.Popen[bytes]) -> None:
        worker.kill()
        worker.wait()
