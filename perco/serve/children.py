"""Processes that this one starts, and that do not outlive it.

The kernel kills a child whose parent has ended (`die_with`) - the parent's *thread*, to be exact: so they are started
by the thread of the loop, and not, as trio would, by one of those that come and go.

A new Python takes a third of a second to import what it needs; a copy of one that has done so takes some milliseconds.
What runs an event loop and threads cannot be copied, so a program that wants that makes a `Mould` before it begins: a
copy of itself that does nothing but make copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

import trio

_PR_SET_PDEATHSIG: Final = 1
_TEXT_MAX: Final = 64 * 1024
_PID_BYTES: Final = 32
_DESCRIPTORS_MAX: Final = 8


class Child(Protocol):
    """A process."""

    pid: int

    async def wait(self) -> object:
        """Until it has ended."""

    def kill(self) -> None: ...
    def close(self) -> None:
        """It has ended, and nobody will ask for it any more."""


class Command:
    """A program, run. Loop thread only."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environment)
        self.pid = self._process.pid

    async def wait(self) -> int:
        """Until it has ended; its exit code, or the negative number of a signal."""
        if not hasattr(os, "pidfd_open"):
            return await trio.to_thread.run_sync(self._process.wait, abandon_on_cancel=True)
        if self._process.poll() is None:
            await _ended(os.pidfd_open(self.pid))
        return self._process.wait()

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        """Nothing is kept of it."""


async def _ended(handle: int) -> None:
    """`handle`: of a process (pidfd), closed at the end."""
    try:
        await trio.lowlevel.wait_readable(handle)
    finally:
        trio.lowlevel.notify_closing(handle)
        os.close(handle)


class Copy:
    """A copy that a `Mould` has made. Loop thread only."""

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self._handle = pid, handle  # of that process (pidfd), whoever has its number later

    async def wait(self) -> None:
        """Until it has ended."""
        await _ended(os.dup(self._handle))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Mould:
    """Makes copies of this process as it is now; to be made before there are threads, loops or open stores.

    Args:
        act: what a copy does, with a descriptor and a text; the copy ends with it. It keeps open whatever else is given
            to `copy`.
    """

    possible: Final = sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __init__(self, act: Callable[[int, str], None]) -> None:
        assert threading.active_count() == 1, "threads are not copied, and what they hold is never let go of"
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        owner = os.getpid()
        if os.fork() == 0:
            try:
                self._socket.close()
                die_with(owner)
                _make_copies(theirs, act)
            finally:
                os._exit(1)
        theirs.close()
        self._asking = trio.Lock()
        self._whole = True  # no answer is left to come

    async def copy(self, text: str, descriptors: Sequence[int]) -> Copy:
        """Another one, which has these descriptors; `act` is told the first. Raises: OSError; if it was cancelled once,
        always."""
        data = text.encode()
        assert len(data) < _TEXT_MAX
        async with self._asking:
            if not self._whole:
                raise OSError("the process that makes copies of this one did not answer")
            self._whole = False
            socket.send_fds(self._socket, [data], list(descriptors), socket.MSG_DONTWAIT)
            await trio.lowlevel.wait_readable(self._socket)
            pid, handles, _, _ = socket.recv_fds(self._socket, _PID_BYTES, 1, socket.MSG_DONTWAIT)
            if not handles:
                raise OSError("the process that makes copies of this one has ended, or could not make one")
            self._whole = True
            return Copy(int(pid), handles[0])


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _make_copies(asked: socket.socket, act: Callable[[int, str], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    mould = os.getpid()
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, _TEXT_MAX, _DESCRIPTORS_MAX)
        if not data:
            os._exit(0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not to be reaped before it is known
        try:
            pid = os.fork()
        except OSError as error:
            asked.send(str(error).encode()[:_PID_BYTES])
            pid = -1
        if pid == 0:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                asked.close()
                die_with(mould)
                act(descriptors[0], data.decode())
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            handle = os.pidfd_open(pid)
            socket.send_fds(asked, [str(pid).encode()], [handle])
            os.close(handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, even where it stands still."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was quicker
        os._exit(1)
