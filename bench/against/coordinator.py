"""`perco serve --direct --standby` in a process of its own: it leads, or stands by."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from bench.against.load import cpu_of


class Coordinator:
    """Args: `url` of the store in a database; `socket`, where to listen."""

    def __init__(self, url: str, socket: Path) -> None:
        command = [sys.executable, "-m", "perco", "serve", url, "--direct", "--standby", "--listen", f"unix:{socket}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """The next line that it prints; "" at its end."""
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def says(self, what: str) -> str:
        """The next line that begins so: "serving" once it leads, "standing by" while it waits, and again with each
        new reason. Raises: RuntimeError, if another line comes first."""
        line = self.line()
        while line.startswith("standing by: ") and not line.startswith(what):
            line = self.line()
        if not line.startswith(what):
            raise RuntimeError(f"perco serve says {line!r}, not {what!r}")
        return line

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def cpu_s(self) -> float:
        """Its processor time so far."""
        return cpu_of(self._process.pid)

    def ended(self) -> int | None:
        """Its exit code; None, while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int:
        """Its exit code. Raises: subprocess.TimeoutExpired."""
        return self._process.wait(seconds)

    def end(self) -> None:
        """Kill it, even if it is stopped."""
        for number in (signal.SIGKILL, signal.SIGCONT):
            self._process.send_signal(number)
        self._process.communicate()
