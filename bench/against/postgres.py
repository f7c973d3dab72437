"""A private PostgreSQL server: made, started and removed with the block.

It runs as an unprivileged user (PostgreSQL refuses root), listens on a Unix socket only, and syncs every commit. It is
tuned as if it had the machine to itself: a cache that holds everything, rare checkpoints, no replication.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

INSTALL = "apt-get install postgresql"
VERSIONS = Path("/usr/lib/postgresql")  # where Debian puts them
CONNECTIONS_MAX = 160
SETTINGS = {
    "listen_addresses": "",
    "max_connections": CONNECTIONS_MAX,
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "shared_buffers": "256MB",
    "wal_level": "minimal",
    "max_wal_senders": 0,
    "max_wal_size": "4GB",
    "checkpoint_timeout": "30min",
    "wal_buffers": "16MB",
    "jit": "off",
    "log_min_messages": "fatal",
    "log_min_error_statement": "panic",
}
_START_S = 30.0
_PR_SET_PDEATHSIG = 1


class NoPostgresError(Exception):
    """PostgreSQL is not installed, or cannot be started here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server. `socket`: the folder of its socket, which clients give as the host."""

    bin: Path
    socket: Path
    pid: int
    version: str

    @property
    def dsn(self) -> str:
        return f"host={self.socket} user=bench dbname=postgres"

    def url(self, prefix: str) -> str:
        """The address of a store of perco's."""
        return f"postgresql://bench@/postgres?host={self.socket}&prefix={prefix}"

    def cpu_s(self) -> float:
        """Processor time of the server and its children so far, in seconds."""
        ticks = 0
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    after = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue  # it has ended
                if int(name) == self.pid:
                    ticks += sum(map(int, after[11:15]))  # with the children that have ended
                elif int(after[1]) == self.pid:
                    ticks += sum(map(int, after[11:13]))
        return ticks / os.sysconf("SC_CLK_TCK")

    def psql(self, *commands: str) -> None:
        """Run commands. Raises: NoPostgresError, with what psql says."""
        given = [part for command in commands for part in ("-c", command)]
        quietly = ["-X", "-q", "-v", "ON_ERROR_STOP=1"]
        _run([self.bin / "psql", *quietly, "-h", self.socket, "-U", "bench", "-d", "postgres", *given])

    def pgbench(self, folder: Path, statements: str, connections: int, seconds: float) -> float:
        """Transactions per second of a script of statements, by a client in C."""
        script = folder / "script.pgbench"
        script.write_text(statements)
        command: list[object] = [
            *(self.bin / "pgbench", "-n", "-M", "prepared", "-c", connections, "-j", min(2, connections)),
            *("-T", max(1, round(seconds)), "--max-tries", 1000, "-f", script),
            *("-h", self.socket, "-U", "bench", "postgres"),
        ]
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
        found = re.search(r"tps = ([\d.]+)", done.stdout)
        if done.returncode or found is None:
            raise RuntimeError(f"pgbench: {(done.stderr or done.stdout).strip()[:500]}")
        return float(found[1])


def binaries() -> Path:
    """The folder of initdb, postgres and pgbench. Raises: NoPostgresError."""
    found = sorted(VERSIONS.glob("*/bin"), key=lambda path: -_number(path.parent.name))
    on_path = shutil.which("postgres")
    for folder in [*found, *([Path(on_path).resolve().parent] if on_path else [])]:
        if all((folder / name).exists() for name in ("initdb", "postgres", "pgbench", "psql")):
            return folder
    raise NoPostgresError(f"there is no PostgreSQL server here; to compare with it: {INSTALL}")


def _number(name: str) -> float:
    try:
        return float(name)
    except ValueError:
        return 0.0


@contextmanager
def server(folder: Path) -> Iterator[Server]:
    """A server whose data is in a new folder below `folder`. Raises: NoPostgresError."""
    bin, user = binaries(), _user()
    data = folder / "postgres"
    data.mkdir(mode=0o700)
    folder.chmod(0o711)  # so that the server's user can reach what is in it
    with tempfile.TemporaryDirectory(prefix="perco-pg-") as sockets:  # a socket's path must be short
        for path in (data, Path(sockets)):
            os.chown(path, user.pw_uid, user.pw_gid)
        try:
            _run([bin / "initdb", "-D", data, "-U", "bench", "--auth=trust", "--no-sync", "--no-instructions"], user)
        except NoPostgresError as error:
            raise NoPostgresError(
                f"{error}\n(It runs as user {user.pw_name}, who has to reach {data}: --folder takes another folder.)"
            ) from None
        started = _start(bin, user, data, Path(sockets))
        try:
            yield _connectable(started, bin, Path(sockets), data / "log")
        finally:
            started.send_signal(signal.SIGINT)  # a fast shutdown: it ends connections, and waits for no client
            try:
                started.wait(20)
            except subprocess.TimeoutExpired:
                started.send_signal(signal.SIGQUIT)
                started.wait()


def _user() -> pwd.struct_passwd:
    """The user it runs as: the present one, unless that is root."""
    if os.geteuid():
        return pwd.getpwuid(os.geteuid())
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    raise NoPostgresError("PostgreSQL does not run as root, and there is neither a user `postgres` nor `nobody`")


def _start(
    bin: Path, user: pwd.struct_passwd, data: Path, sockets: Path, more: Mapping[str, object] | None = None
) -> subprocess.Popen[bytes]:
    values = {**SETTINGS, "unix_socket_directories": sockets, **(more or {})}
    settings = [f"--{name}={value}" for name, value in values.items()]
    uid, gid, groups = _as(user)
    with open(data / "log", "wb") as log:
        return subprocess.Popen(
            [bin / "postgres", "-D", data, *settings],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=data,
            start_new_session=True,  # Ctrl-C is ours to handle
            preexec_fn=partial(_ends_with_us, ctypes.CDLL(None)),
            user=uid,
            group=gid,
            extra_groups=groups,
        )


def _ends_with_us(libc: ctypes.CDLL) -> None:
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def _as(user: pwd.struct_passwd | None) -> tuple[int | None, int | None, list[int] | None]:
    """A child's user, group and further groups; None: those of this process."""
    return (None, None, None) if user is None or os.geteuid() else (user.pw_uid, user.pw_gid, [])


def _run(command: Sequence[object], user: pwd.struct_passwd | None = None) -> str:
    uid, gid, groups = _as(user)
    done = subprocess.run(
        [str(part) for part in command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        user=uid,
        group=gid,
        extra_groups=groups,
    )
    if done.returncode:
        raise NoPostgresError(f"{command[0]}: {(done.stderr or done.stdout).strip()[:500]}")
    return done.stdout


def _connectable(started: subprocess.Popen[bytes], bin: Path, sockets: Path, log: Path) -> Server:
    """Wait until it answers."""
    version = _run([bin / "postgres", "--version"]).split()[2]
    found = Server(bin, sockets, started.pid, version)
    until = time.monotonic() + _START_S
    while True:
        try:
            found.psql("SELECT 1")
            return found
        except NoPostgresError:
            if started.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace").strip().splitlines()[-5:]
                raise NoPostgresError("the PostgreSQL server did not start: " + "; ".join(said)) from None
            time.sleep(0.05)
