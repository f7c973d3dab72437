"""Reading a record of strace, and what a disk may hold of it: small cases by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.powerloss import trace
from tests.powerloss.disk import Disk, sectors
from tests.powerloss.trace import TraceError

BASE = Path("/base")


def text(value: str) -> str:
    return '"' + "".join(f"\\x{byte:02x}" for byte in value.encode()) + '"'


def disk_of(*lines: str) -> Disk:
    return Disk(BASE, BASE / "reports").follow(trace.read(lines))


def opened(name: str, number: int, flags: str = "O_RDWR|O_CREAT") -> str:
    return f"7 openat(AT_FDCWD, {text(f'/base/{name}')}, {flags}, 0644) = {number}"


def wrote(data: str, offset: int = 0, number: int = 3) -> str:
    return f"7 pwrite64({number}, {text(data)}, {len(data)}, {offset}) = {len(data)}"


def left(disk: Disk, folder: Path, moment: int = 99, **torn: object) -> dict[str, bytes]:
    """The files after a power loss at which only durable changes have arrived."""
    disk.leave(folder, moment, torn.get("kept", ()), torn.get("torn", {}))  # type: ignore[arg-type]
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_write_is_durable_when_a_later_sync_of_its_file_has_returned(tmp_path: Path) -> None:
    disk = disk_of(
        "7 openat(AT_FDCWD, " + text("/base") + ", O_RDONLY|O_DIRECTORY) = 9",
        opened("a", 3),
        "7 fsync(9) = 0",
        wrote("old"),
        "7 fdatasync(3) = 0",
        wrote("new"),
    )
    assert left(disk, tmp_path / "durable") == {"a": b"old"}
    assert left(disk, tmp_path / "all", kept=[2]) == {"a": b"new"}
    assert left(disk, tmp_path / "before", moment=4) == {"a": b""}
    assert disk.unsure(4) == [1]
    assert disk.unsure(5) == [], "the sync has returned"
    assert disk.unsure(99) == [2]
    assert disk.syncs == 2


def test_a_sync_does_not_cover_a_write_of_another_thread_that_had_not_returned(tmp_path: Path) -> None:
    disk = disk_of(
        opened("a", 3),
        f"7 pwrite64(3, {text('x')}, 1, 0 <unfinished ...>",
        "8 fdatasync(3 <unfinished ...>",
        "7 <... pwrite64 resumed>) = 1",
        "8 <... fdatasync resumed>) = 0",
    )
    assert disk.unsure(99) == [0, 1]
    assert [change.began for change in disk.changes] == [0, 1]


def test_a_write_through_a_synchronous_file_is_durable_when_it_returns() -> None:
    disk = disk_of(opened("a", 3), opened("a", 4, "O_WRONLY|O_DSYNC"), wrote("meta", number=4))
    assert disk.unsure(3) == [0], "only that the file is there"
    assert disk.unsure(2) == [0]


def test_a_file_that_is_synced_is_not_there_until_its_folder_is_synced(tmp_path: Path) -> None:
    lines = [
        f"7 mkdir({text('/base/inner')}, 0777) = 0",
        opened("inner/a", 3),
        wrote("x"),
        "7 fsync(3) = 0",
        f"7 openat(AT_FDCWD, {text('/base')}, O_RDONLY|O_DIRECTORY) = 4",
        "7 fsync(4) = 0",
        f"7 openat(AT_FDCWD, {text('/base/inner')}, O_RDONLY|O_DIRECTORY) = 5",
        "7 fsync(5) = 0",
    ]
    assert left(disk_of(*lines[:6]), tmp_path / "one") == {}
    assert left(disk_of(*lines), tmp_path / "two") == {"inner/a": b"x"}


def test_a_folder_is_renamed_wholly_or_not_at_all(tmp_path: Path) -> None:
    disk = disk_of(
        f"7 openat(AT_FDCWD, {text('/base')}, O_RDONLY|O_DIRECTORY) = 4",
        f"7 mkdir({text('/base/new')}, 0777) = 0",
        "7 fsync(4) = 0",
        f"7 rename({text('/base/new')}, {text('/base/there')}) = 0",
        opened("there/a", 3),
    )
    disk.leave(tmp_path / "before", 99, [])
    disk.leave(tmp_path / "after", 99, [1])
    assert [path.name for path in (tmp_path / "before").iterdir()] == ["new"]
    assert [path.name for path in (tmp_path / "after").iterdir()] == ["there"]


def test_positions_vectors_lengths_and_truncation(tmp_path: Path) -> None:
    disk = disk_of(
        opened("a", 3),
        "7 fallocate(3, 0, 0, 10) = 0",
        "7 lseek(3, 2, SEEK_SET) = 2",
        f"7 writev(3, [{{iov_base={text('bc')}, iov_len=2}}, {{iov_base={text('d')}, iov_len=1}}], 2) = 3",
        f"7 write(3, {text('ef')}, 2) = 1",
        "7 ftruncate(3, 6) = 0",
        opened("b", 4, "O_RDWR|O_CREAT|O_TRUNC"),
        wrote("gone", number=4),
        opened("b", 5, "O_RDWR|O_CREAT|O_TRUNC"),
    )
    kept = range(len(disk.changes))
    assert left(disk, tmp_path / "all", kept=kept) == {"a": b"\0\0bcde", "b": b""}


def test_of_a_torn_write_some_sectors_arrive(tmp_path: Path) -> None:
    disk = disk_of(opened("a", 3), wrote("x" * 1500, 100))
    assert list(sectors(disk.changes[1])) == [0, 1, 2, 3]
    found = left(disk, tmp_path / "torn", kept=[0, 1], torn={1: {1, 3}})["a"]
    assert len(found) == 1600
    assert found == bytes(512) + b"x" * 512 + bytes(512) + b"x" * 64


def test_what_was_reported_is_known_from_then_on() -> None:
    disk = disk_of(opened("reports", 3), f"7 write(3, {text('ack 1')}, 5) = 5", opened("a", 4), "7 close(3) = 0")
    assert disk.known(1) == []
    assert disk.known(2) == ["ack 1"]
    assert [list(change.entries or ()) for change in disk.changes] == [["a"]], "the reports are no part of it"


def test_what_lies_elsewhere_or_failed_is_left_out() -> None:
    disk = disk_of(
        f"7 openat(AT_FDCWD, {text('/etc/passwd')}, O_RDWR|O_CREAT) = 3",
        wrote("x"),
        "7 fsync(3) = 0",
        f"7 mkdir({text('/base/a')}, 0777) = -1 EEXIST (File exists)",
        "7 --- SIGCHLD {si_signo=SIGCHLD} ---",
        "7 +++ exited with 0 +++",
    )
    assert disk.changes == []
    assert disk.syncs == 0


@pytest.mark.parametrize(
    "line",
    [
        "7 mmap(NULL, 4096, PROT_READ|PROT_WRITE, MAP_SHARED, 3, 0) = 0x7f0000000000",
        "7 fallocate(3, FALLOC_FL_PUNCH_HOLE, 0, 10) = 0",
        "7 dup(3) = 9",
        f"7 link({text('/base/a')}, {text('/base/b')}) = 0",
        f"7 rename({text('/base/a')}, {text('/elsewhere')}) = 0",
        "7 sync() = 0",
        f"7 pwrite64(3, {text('x')}..., 4000, 0) = 4000",
        "strace: exec: Permission denied",
    ],
)
def test_what_is_not_understood_is_said_and_not_passed_over(line: str) -> None:
    with pytest.raises(TraceError):
        disk_of(opened("a", 3), line)
