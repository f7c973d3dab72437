"""Who may open a folder, and what is said to those who may not."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import pytest

from perco.errors import (
    FormatUnknown,
    NeedsCheck,
    PercoWarning,
    StoreFull,
    StoreLocked,
    UnsuitableFolder,
    UsageError,
)
from perco.storage import Folder, file_system, folder as folders, owner
from tests.component.storage.stores import TABLE, lmdb_engine, put
from tests.integration.storage.children import SMALL_MAP, child


def claim(path, *, durable=True, accept_loss=False):
    return Folder.claim(path, durable=durable, accept_loss=accept_loss)


def everything_in(path):
    return {found.relative_to(path): found.read_bytes() for found in path.rglob("*") if found.is_file()}


# ------------------------------------------------------------ one owner


def test_a_folder_is_made_marked_and_let_go_of(tmp_path):
    folder = claim(tmp_path / "deep" / "web")
    assert (folder.path / "perco-format").read_text() == "perco 1\n"
    assert owner(folder.path)[0] == os.getpid()
    folder.release(clean=True)
    folder.release(clean=True)
    claim(folder.path).release(clean=True)


def test_the_other_owner_is_named_with_its_command(tmp_path):
    with child("claim", tmp_path, "durable") as other:
        assert other.line() == "claimed"
        with pytest.raises(StoreLocked) as caught:
            claim(tmp_path)
        assert caught.value.pid == other.pid
        assert "children.py claim" in caught.value.command
        assert str(other.pid) in str(caught.value)
        assert other.ask("go on") == "released"
        claim(tmp_path).release(clean=True)


def test_who_only_looks_for_an_owner_does_not_keep_one_out(tmp_path, monkeypatch):
    claim(tmp_path).release(clean=True)
    glance = os.open(tmp_path / "owner", os.O_RDONLY)
    fcntl.flock(glance, fcntl.LOCK_SH)
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            os.close(glance)

    monkeypatch.setattr(folders.time, "sleep", sleep)
    claim(tmp_path).release(clean=True)
    assert len(slept) == 3


def test_a_killed_owner_leaves_no_lock(tmp_path):  # O1
    with child("claim", tmp_path, "durable") as other:
        assert other.line() == "claimed"
        other.kill()
    claim(tmp_path).release(clean=True)


def test_opening_twice_in_one_process_is_a_usage_error_and_leaves_the_first_its_folder(tmp_path):
    first = claim(tmp_path / "web")
    (tmp_path / "link").symlink_to(tmp_path / "web")
    for path in (tmp_path / "web", tmp_path / "link", tmp_path / "link" / ".." / "web"):
        for _ in range(2):
            with pytest.raises(UsageError, match="already open in this process"):
                claim(path)
            with pytest.raises(UsageError, match="already open in this process"):
                Folder.beside(path)
    with child("claim", tmp_path / "web", "durable") as other:
        assert other.line() == ""  # it could not: we still own it
    first.release(clean=True)
    reader = Folder.beside(tmp_path / "web")
    with pytest.raises(UsageError, match="already open in this process"):
        claim(tmp_path / "web")
    reader.release(clean=False)
    claim(tmp_path / "web").release(clean=True)


def test_who_reads_beside_sees_whether_there_is_an_owner(tmp_path):
    claim(tmp_path).release(clean=True)
    (tmp_path / "tablets").mkdir()
    reader = Folder.beside(tmp_path)
    assert not reader.owner_alive
    assert not reader.owned_by_another()
    with child("claim", tmp_path, "durable") as other:
        assert other.line() == "claimed"  # a reader keeps nobody out
        assert reader.owned_by_another()
        reader.release(clean=False)
        reader = Folder.beside(tmp_path)
        assert reader.owner_alive
        assert other.ask("go on") == "released"
        assert not reader.owned_by_another()
    reader.release(clean=False)


def test_reading_what_is_not_there_says_how_a_store_is_made(tmp_path):
    with pytest.raises(UnsuitableFolder, match="made by the program that opens it with its schema"):
        Folder.beside(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    with pytest.raises(FormatUnknown, match="not a perco store: the folder is empty"):
        Folder.beside(tmp_path)
    claim(tmp_path).release(clean=True)


@pytest.mark.parametrize("open_it", [claim, Folder.beside])
def test_a_path_that_is_not_utf_8_is_refused_and_nothing_is_made(tmp_path, open_it):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/x\xff"))
    with pytest.raises(UsageError, match=r"/x\\xff/store: the path of a store must be UTF-8"):
        open_it(path / "store")
    assert not path.exists()


def test_a_file_in_the_folders_place_is_unsuitable(tmp_path):
    (tmp_path / "web").write_text("a file")
    with pytest.raises(UnsuitableFolder):
        claim(tmp_path / "web")


def test_taking_over_a_store_needs_no_space(tmp_path):  # S4
    claim(tmp_path).release(clean=True)
    before = os.stat(tmp_path / "owner")
    with child("claim", tmp_path, "durable") as other:
        assert other.line() == "claimed"
        now = os.stat(tmp_path / "owner")
        assert (now.st_size, now.st_ino, now.st_blocks) == (before.st_size, before.st_ino, before.st_blocks)
        assert owner(tmp_path)[0] == other.pid


def test_a_disk_without_space_for_a_new_store_is_an_error_of_the_store(tmp_path, monkeypatch):  # S4
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(StoreFull):
            claim(tmp_path)
    claim(tmp_path).release(clean=True)


# ------------------------------------------------------------ the format


def test_another_version_is_refused_by_name_and_left_as_it_is(tmp_path):
    (tmp_path / "perco-format").write_text("perco 2\n")
    (tmp_path / "tablets").mkdir()
    before = everything_in(tmp_path)
    for opening in (claim, Folder.beside):
        with pytest.raises(FormatUnknown, match=r"'perco 2'.*perco 1"):
            opening(tmp_path)
    assert everything_in(tmp_path) == before


def test_a_folder_with_other_files_is_refused_by_name_and_left_as_it_is(tmp_path):
    (tmp_path / "thesis.tex").write_text("ten years of work")
    before = everything_in(tmp_path)
    for opening in (claim, Folder.beside):
        with pytest.raises(FormatUnknown, match=r"thesis\.tex"):
            opening(tmp_path)
    assert everything_in(tmp_path) == before


@pytest.mark.parametrize("left", [{}, {"owner": ""}, {"owner": "", "perco-format": ""}])
def test_what_a_crash_during_the_making_left_can_be_claimed(tmp_path, left):
    for name, text in left.items():
        (tmp_path / name).write_text(text)
    claim(tmp_path).release(clean=True)
    assert (tmp_path / "perco-format").read_text() == "perco 1\n"


def test_tablets_without_a_format_are_refused(tmp_path):
    (tmp_path / "perco-format").write_text("")
    (tmp_path / "tablets").mkdir()
    with pytest.raises(FormatUnknown):
        claim(tmp_path)


def test_tables_of_any_name_have_folders_of_their_own(tmp_path):
    folder = claim(tmp_path)
    names = ["docs", "docs/..", "..", "a b", "ä", "%2F", "/", "a-0"]
    paths = [folder.make_tablet_folder(name, number) for name in names for number in (0, 1)]
    assert len(set(paths)) == len(paths)
    assert {path.parent for path in paths} == {tmp_path / "tablets"}
    folder.release(clean=True)


# ------------------------------------------------------------ file systems

MOUNTS = b"""\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /data rw shared:9 - nfs4 server:/export rw
31 30 8:2 / /data/local rw - xfs /dev/sdb1 rw
32 21 0:41 / /with\\040space\\134 rw - cifs //server/share rw
33 21 0:42 / /donn\xc3\xa9es rw - nfs server:/export rw
34 21 0:43 / /\xff\xfe rw - lustre somewhere rw
35 21 0:44 / /twice rw - nfs server:/export rw
36 35 8:3 / /twice rw - ext4 /dev/sdc1 rw
37 21 0:45 / /shm rw - tmpfs tmpfs rw
"""


@pytest.fixture
def mounts(monkeypatch):
    monkeypatch.setattr(folders, "_mount_table", lambda: MOUNTS)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/me/web", "ext4"),
        ("/data", "nfs4"),
        ("/data/web", "nfs4"),
        ("/database", "ext4"),
        ("/data/local/web", "xfs"),
        ("/with space\\/web", "cifs"),
        ("/données/web", "nfs"),
        (os.fsdecode(b"/\xff\xfe/web"), "lustre"),
        ("/twice/web", "ext4"),  # the later mount hides the earlier
    ],
)
@pytest.mark.usefixtures("mounts")
def test_a_path_lies_on_the_file_system_mounted_nearest_above_it(path, kind):
    assert file_system(Path(path)) == kind


def test_the_kernels_own_mount_table_can_be_read(tmp_path, monkeypatch):
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(tmp_path / "not there yet")
    monkeypatch.setattr(folders, "_mount_table", bytes)
    assert file_system(tmp_path) == ""


def test_a_remote_file_system_is_refused_and_nothing_is_made(tmp_path, monkeypatch):
    claim(tmp_path / "there").release(clean=True)
    monkeypatch.setattr(folders, "_mount_table", lambda: MOUNTS + b"40 21 0:9 / %b rw - nfs x rw\n" % bytes(tmp_path))
    with pytest.raises(UnsuitableFolder, match=r"nfs.*Put the store on a local disk"):
        claim(tmp_path / "web")
    assert not (tmp_path / "web").exists()
    with pytest.raises(UnsuitableFolder, match="nfs"):
        Folder.beside(tmp_path / "there")


def test_tmpfs_is_warned_about():
    if file_system(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with pytest.warns(PercoWarning, match="do not survive power loss"):
            claim(path / "web").release(clean=True)
        Folder.beside(path / "web").release(clean=False)  # nothing is written: no warning
    finally:
        shutil.rmtree(path)


# ------------------------------------------------------------ permissions


@pytest.fixture
def readonly_store():
    """A store that the test owns and that others may read; in a folder that others can reach."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    before = os.umask(0o022)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PercoWarning)  # wherever temporary files lie
        folder = claim(path / "web")
        engine = lmdb_engine(folder.make_tablet_folder(TABLE, 0), SMALL_MAP)
        engine.commit([put(b"a", b"stored")], 0)
        engine.close()
        folder.release(clean=True)
        os.umask(before)
        folders_below = [path / "web", path / "web/tablets", path / "web/tablets/t-0"]
        if os.geteuid() != 0:
            for found in (path / "web").rglob("*"):
                found.chmod(0o444 if found.is_file() else 0o755)
            for found in folders_below:
                found.chmod(0o555)
        yield path / "web"
    for found in folders_below:
        found.chmod(0o755)
    shutil.rmtree(path)


def test_a_folder_one_may_only_read_can_be_read_and_says_so_to_who_would_write(readonly_store):
    before = everything_in(readonly_store)
    with child("read_without_permission", readonly_store, "a") as reader:
        refused = reader.line()
        assert refused.startswith("UnsuitableFolder")
        assert "Permission denied" in refused
        assert "readonly=True" in refused
        assert reader.line() == "read stored without lock"
        # LMDB's table of readers cannot be used by them, so they keep the next writer out.
        with pytest.raises((StoreLocked, UnsuitableFolder)):
            claim(readonly_store)
    assert everything_in(readonly_store) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="needs two users: one who writes, one who may not")
def test_beside_a_writer_one_needs_write_permission(readonly_store):
    folder = claim(readonly_store)
    with child("read_without_permission", readonly_store, "a") as reader:
        assert reader.line().startswith("UnsuitableFolder")
        assert f"process {os.getpid()} is writing to it" in reader.line()
    folder.release(clean=True)


# ------------------------------------------------------------ not synced


@pytest.fixture
def reboot(monkeypatch):
    """From here on the machine has been restarted."""
    return lambda: monkeypatch.setattr(folders, "_boot_id", lambda: "another boot")


def killed_owner(path):
    """A process that had the store open with durable=False and was killed."""
    with child("claim", path, "not durable") as other:
        assert other.line() == "claimed"
        other.kill()


@pytest.mark.parametrize("durable", [True, False])
def test_unsynced_and_not_closed_before_a_restart_needs_a_check(tmp_path, reboot, durable):  # S2
    killed_owner(tmp_path)
    reboot()
    for _ in range(2):  # a refusal changes nothing
        with pytest.raises(NeedsCheck, match="perco check"):
            claim(tmp_path, durable=durable)
    claim(tmp_path, durable=durable, accept_loss=True).release(clean=True)
    claim(tmp_path, durable=durable).release(clean=True)


def test_unsynced_and_not_closed_is_fine_as_long_as_the_machine_runs(tmp_path, reboot):  # S2
    killed_owner(tmp_path)
    claim(tmp_path, durable=False).release(clean=False)
    reboot()
    with pytest.raises(NeedsCheck):
        claim(tmp_path)


def test_a_clean_release_removes_the_mark(tmp_path, reboot):  # S2
    claim(tmp_path, durable=False).release(clean=True)
    assert not (tmp_path / "unsynced").exists()
    reboot()
    claim(tmp_path).release(clean=True)


def test_a_durable_store_that_was_killed_needs_no_check(tmp_path, reboot):  # S2
    with child("claim", tmp_path, "durable") as other:
        assert other.line() == "claimed"
        other.kill()
    reboot()
    claim(tmp_path).release(clean=True)


@pytest.mark.parametrize("clean_release", [True, False])
def test_the_mark_goes_only_after_every_tablet_has_been_synced(tmp_path, monkeypatch, clean_release):  # S2
    folder = claim(tmp_path, durable=False)
    data = [folder.make_tablet_folder(table, 0) / "data.mdb" for table in ("a", "b")]
    for path in data:
        path.write_bytes(b"")
    synced = []

    def fsync(handle):
        synced.append((os.readlink(f"/proc/self/fd/{handle}"), (tmp_path / "unsynced").exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    if clean_release:
        folder.release(clean=True)
    else:  # killed; the next owner, who is durable, inherits what the kernel has not written yet
        folder.release(clean=False)
        synced.clear()
        claim(tmp_path, durable=True).release(clean=True)
    assert sorted(name for name, marked in synced if marked) == [str(path) for path in data]
    assert synced[-1] == (str(tmp_path), False)
