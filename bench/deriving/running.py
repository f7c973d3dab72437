"""A system's program as a process: its time, CPU time and memory, and how it is ordered, killed and waited for."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from bench.deriving.child import Job
from bench.deriving.systems import ROOT, System

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_STOP_S: Final = 20.0


class LateError(Exception):
    """A system has not done in time what it should do."""


class DiedError(Exception):
    """A system's program has ended by itself."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of what a process has done since its start. `calls`: of the pure function, as far as known."""

    seconds: float
    cpu_s: float
    peak_mib: float
    calls: int | None = None


class Running:
    """A system's program, from its start until it is stopped or killed.

        with Running(system, job) as running:
            running.heard("ready", 60.0)

    Its errors go to a file beside its state.
    """

    def __init__(self, system: System, job: Job) -> None:
        self.system, self.job = system, job
        job.state.mkdir(parents=True, exist_ok=True)
        self._errors = job.state.parent / f"{job.state.name}.errors"
        arguments = [str(part) for part in (job.state, job.files, job.documents, job.version)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **system.environment}
        with open(self._errors, "ab") as errors:
            self.began = time.perf_counter()
            self._process = subprocess.Popen(
                [*system.command(), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                start_new_session=True,
                env=environment,
            )
        self._lines: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.calls: int | None = None
        self.ready = False  # whether it has said so

    def __enter__(self) -> Running:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError):  # a peer may print, too
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def heard(self, word: str, timeout: float) -> dict[str, Any]:
        """Wait until the program says this word. Raises: LateError, DiedError."""
        deadline = time.perf_counter() + timeout
        while True:
            try:
                said = self._lines.get(timeout=max(0.001, deadline - time.perf_counter()))
            except queue.Empty:
                raise LateError(f"not {word} within {timeout:.0f} s") from None
            if said is None:
                raise DiedError(f"the program has ended: {self.last_error()}")
            self.calls = said.get("calls", self.calls)
            self.ready = self.ready or "ready" in said
            if word in said:
                return said

    def order(self, **order: Any) -> None:
        """Raises: DiedError."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(order) + "\n")
        except BrokenPipeError:
            raise DiedError(f"the program has ended: {self.last_error()}") from None

    def last_error(self) -> str:
        lines = self._errors.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without an error"

    def cost(self) -> Cost:
        """So far."""
        cpu_s, peak_mib = 0.0, 0.0
        for name in os.listdir("/proc"):
            if not name.isdigit():
                continue
            with suppress(OSError, IndexError):  # it has just ended
                after = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                if int(after[3]) == self._process.pid:  # of its session
                    cpu_s += sum(map(int, after[11:15])) / _TICKS
                    peak_mib += _peak_mib(name)
        return Cost(time.perf_counter() - self.began, cpu_s, peak_mib, self.calls)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """`kill -9` of the process and all of its children."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._close()

    def stop(self) -> None:
        """Let it end by itself; kill it if it does not."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close()

    def _close(self) -> None:
        self._listener.join()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()


def _peak_mib(pid: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0
