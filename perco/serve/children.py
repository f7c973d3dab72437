"""Child processes, which do not outlive this one.

The kernel kills a child when its parent ends (`die_with`) or, more exactly, when the *thread* that started it ends. So
the loop's thread starts the children; trio would start them from a worker thread, which may end earlier.

A new Python process takes a third of a second for its imports. Copying (forking) a process that has already done them
takes a few milliseconds. But a process with an event loop and threads cannot be forked safely. So a program that wants
copies makes a `Mould` before it starts a loop or threads. The `Mould` is a fork server: a copy of the program that only
makes further copies.
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
    """A child process."""

    pid: int

    async def wait(self) -> object:
        """Wait until it has ended."""

    def kill(self) -> None: ...
    def close(self) -> None:
        """Release the resources of a process that has ended."""


class Command:
    """A running program. Loop thread only."""

    pid: int

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
    ) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=pass_fds, env=environment)
        self.pid = self._process.pid

    async def wait(self) -> int:
        """Wait until it has ended. Returns its exit code, or the negative number of a signal."""
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
        """There is nothing to release."""


async def _ended(handle: int) -> None:
    """Wait for the end of a process. `handle`: its pidfd, which is closed afterwards."""
    try:
        await trio.lowlevel.wait_readable(handle)
    finally:
        trio.lowlevel.notify_closing(handle)
        os.close(handle)


class Copy:
    """A copy that a `Mould` has made. Loop thread only."""

    pid: int

    def __init__(self, pid: int, handle: int) -> None:
        self.pid, self._handle = pid, handle  # a pidfd: valid even if the number is reused

    async def wait(self) -> None:
        """Wait until it has ended."""
        await _ended(os.dup(self._handle))

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ValueError):
            signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Mould:
    """Makes copies of this process as it is now. Create it before there are threads, loops or open stores.

    Args:
        act: called in a copy, with a descriptor and a text; when it returns, the copy ends. The other descriptors that
            `copy` gets stay open in the copy.
    """

    possible: Final = sys.platform == "linux" and hasattr(os, "pidfd_open")

    def __init__(self, act: Callable[[int, str], None]) -> None:
        assert threading.active_count() == 1, "threads are not copied, and the locks that they hold are never released"
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
        self._whole = True  # no answer is outstanding

    async def copy(self, text: str, descriptors: Sequence[int]) -> Copy:
        """Make a copy that has these descriptors; `act` gets the first. Raises: OSError; once a call has failed or been
        cancelled, every later call raises it."""
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
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # not reaped before its pidfd is open
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
    """Have the kernel kill this process when its parent ends, even if this process is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent has ended already
        os._exit(1)
