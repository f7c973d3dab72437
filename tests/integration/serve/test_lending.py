"""A folder that is lent to a job is free again when its borrower has ended, however it ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio
import trustme

import perco
from perco.errors import StoreLocked, WrongToken
from perco.rpc.crossing import unpack_error
from perco.serve.opening import joining

COMMAND = [sys.executable, "-m", "perco.serve.lending"]
PLAIN = {"durability": "process", "listen": [], "token": "", "certificate": "", "key": ""}
table = perco.Table("docs", key=perco.TEXT)
body = table.column("body", perco.TEXT)
SCHEMA = perco.Schema(table)


def lend(path: Path, **more: Any) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    child = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    return child, ordered(child, path, **more)


def ordered(child: subprocess.Popen[bytes], path: Path, **more: Any) -> dict[str, Any]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps({"path": str(path), "pid": os.getpid(), **PLAIN, **more}).encode() + b"\n")
    child.stdin.flush()
    answer: dict[str, Any] = json.loads(child.stdout.readline())
    return answer


@pytest.fixture
def lent(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    child, answer = lend(tmp_path / "s")
    assert answer == {"at": []}
    with child:
        yield child, tmp_path / "s"


async def _write(path: Path) -> None:
    async with perco.open(path, SCHEMA) as db, db.transaction() as txn:
        txn.set(body, "a", "b")


async def _owns(path: Path) -> bool:
    options = perco.Options(shared=False)
    async with perco.open(path, SCHEMA, options=options) as db, db.snapshot() as snap:
        return await snap.get(body, "a") == "b"


async def test_it_ends_with_what_its_borrower_holds(lent: tuple[subprocess.Popen[bytes], Path]) -> None:
    child, path = lent
    await _write(path)
    with pytest.raises(StoreLocked):
        await _owns(path)
    assert child.stdin is not None
    child.stdin.close()
    assert await trio.to_thread.run_sync(child.wait) == 0
    assert await _owns(path)


def borrow(path: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """A process that has a folder lent to it, and does nothing; and that which lends."""
    program = (
        "import json, os, subprocess, time\n"
        f"child = subprocess.Popen({COMMAND!r}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)\n"
        f"order = {{'path': {str(path)!r}, 'pid': os.getpid(), **{PLAIN!r}}}\n"
        "child.stdin.write(json.dumps(order) + '\\n')\n"
        "child.stdin.flush()\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
    )
    program += "".join(f"{line}\n" for line in more) + "time.sleep(1000)\n"
    borrower = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert borrower.stdout is not None
    return borrower, int(borrower.stdout.readline())


@pytest.mark.parametrize("forks", [False, True])
async def test_a_borrower_that_is_killed_leaves_the_folder_free(tmp_path: Path, forks: bool) -> None:
    """Though a child of its own goes on, which has all that it held."""
    more = ("other = os.fork()", "print(other, flush=True) if other else None") if forks else ()
    borrower, pid = borrow(tmp_path / "s", *more)
    assert borrower.stdout is not None
    forked = int(borrower.stdout.readline()) if forks else 0
    await _write(tmp_path / "s")
    handle = os.pidfd_open(pid)
    borrower.kill()
    borrower.wait()
    with trio.fail_after(60):
        await trio.lowlevel.wait_readable(handle)
    os.close(handle)
    if forks:
        os.kill(forked, signal.SIGKILL)
    borrower.communicate()
    assert await _owns(tmp_path / "s")


async def test_an_interrupt_is_for_the_borrower(lent: tuple[subprocess.Popen[bytes], Path]) -> None:
    child, path = lent
    child.send_signal(signal.SIGINT)
    await _write(path)
    assert child.poll() is None


async def test_what_keeps_it_from_opening_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    child, answer = lend(tmp_path / "file")
    with child:
        error = unpack_error(msgpack.unpackb(bytes.fromhex(answer["error"])))
        assert isinstance(error, perco.StoreError)
        assert child.wait() == 1


async def test_who_has_it_open_already_serves_it(lent: tuple[subprocess.Popen[bytes], Path]) -> None:
    second, answer = lend(lent[1], listen=["tcp://127.0.0.1:0"], token="x")
    with second:
        assert answer == {"at": []}
        second.kill()


async def test_when_that_one_ends_the_next_serves_it(lent: tuple[subprocess.Popen[bytes], Path]) -> None:
    first, path = lent
    await _write(path)
    second, _ = lend(path)
    with second:
        async with joining(path) as db:
            await db.run(_append)
            assert first.stdin is not None
            first.stdin.close()
            await db.run(_append)  # as soon as it has come
            async with db.snapshot() as snap:
                assert await snap.get(body, "a") == "bcc"
        assert second.stdin is not None
        second.stdin.close()
        assert await trio.to_thread.run_sync(second.wait) == 0
    assert first.wait() == 0


async def test_over_tls_with_the_token_of_the_order(tmp_path: Path) -> None:
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    certificate = b"".join(blob.bytes() for blob in made.cert_chain_pems).decode()
    child, answer = lend(
        tmp_path / "s",
        listen=["tls://127.0.0.1:0"],
        token="secret",
        certificate=certificate,
        key=made.private_key_pem.bytes().decode(),
    )
    with child:
        [url] = answer["at"]
        await _write(tmp_path / "s")
        options = perco.Options(wire=perco.options.WireOptions(ca_file=authority.cert_pem.bytes().decode()))
        async with joining(url, options=options, token="secret") as db:
            await db.run(_append)
        with pytest.raises(WrongToken):
            async with joining(url, options=options, token="other"):
                pass
        with pytest.raises(perco.Unavailable):  # whom nobody vouches for
            async with joining(url, token="secret"):
                pass
        child.kill()


async def _append(txn: perco.Transaction) -> None:
    """With a table of this program, under the store's own schema."""
    txn.set(body, "a", (await txn.get(body, "a") or "") + "c")


async def test_a_copy_of_a_declaration_will_do_and_another_will_not(lent: tuple[subprocess.Popen[bytes], Path]) -> None:
    await _write(lent[1])
    async with joining(lent[1]) as db:
        await db.run(_append)
        for other in (
            perco.Table("docs", key=perco.TEXT).column("body", perco.BYTES),
            perco.Table("docs", key=perco.BYTES).column("body", perco.TEXT),
            perco.Table("docs", key=perco.TEXT).column("body", perco.TEXT, group="long"),
            perco.Table("docs", key=perco.TEXT).column("nobody", perco.TEXT),
            perco.Table("other", key=perco.TEXT).column("body", perco.TEXT),
        ):
            async with db.transaction() as txn:
                with pytest.raises(perco.errors.SchemaMismatch):
                    txn.set(other, "a", "x")
            async with db.snapshot() as snap:
                with pytest.raises(perco.errors.SchemaMismatch):
                    await snap.get(other, "a")
        signal_of = perco.Table("docs", key=perco.TEXT).signal("body")
        async with db.transaction() as txn:
            with pytest.raises(perco.PercoError):
                txn.signal(signal_of, "a")


async def test_nobody_joins_what_nobody_serves(tmp_path: Path) -> None:
    async with perco.open(tmp_path / "s", SCHEMA):
        pass
    with pytest.raises(perco.Unavailable, match="no process has"):
        async with joining(tmp_path / "s"):
            pass
