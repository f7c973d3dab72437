"""Processes for the command: `python -m tests.acceptance.cli.prefork`.

A start of `perco` is half a second of imports, and the tests start it hundreds of times. This program imports the
command once, before any store is opened (S5), and forks a process for each call: with the arguments, the environment,
the folder and the three streams that the call names. Such a process is a user's in all but its imports; tests of
the start itself use `stores.command`.

The parent's side is `call`.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from io import BufferedRandom
from pathlib import Path

import perco
from perco import __main__ as program

ROOT = Path(perco.__file__).parents[1]


@cache
def _prefork() -> socket.socket:
    """The socket of this process's own forker, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def call(args: Sequence[str], env: Mapping[str, str], input: bytes) -> tuple[int, bytes, bytes]:
    """Run the command to its end. Returns: its exit status (negative: the signal), its output, its errors."""
    forker = _prefork()
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(input)
        stdin.seek(0)
        fds = [file.fileno() for file in (stdin, out, err)]
        socket.send_fds(forker, [json.dumps([list(args), dict(env)]).encode()], fds)
        status = int(forker.recv(100))
        return status, _all(out), _all(err)


def _all(file: BufferedRandom) -> bytes:
    file.seek(0)
    return file.read()


# ------------------------------------------------------------ the forked process


def _live(args: list[str], env: dict[str, str], fds: list[int]) -> int:
    """Returns: the exit status."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", closefd=False)  # noqa: SIM115
    warnings.simplefilter("error")
    sys.argv = ["perco", *args]
    try:
        program.main()
    except SystemExit as ending:
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
            return 1
        return ending.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    importlib.import_module("perco.cli")  # once, for all processes
    forker = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, fds, _, _ = socket.recv_fds(forker, 1 << 20, 3)
        if not message:
            return
        args, env = json.loads(message)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                forker.close()
                status = _live(args, env, fds)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        for fd in fds:
            os.close(fd)
        forker.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
