"""When a store is made, and when a mistyped name must not make one."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

import perco
import perco.aio
import perco.sync
from tests.support import bigtable, postgresql

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
schema = perco.Schema(docs)


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody listens."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def serve(store: Path, *more: str) -> subprocess.CompletedProcess[str]:
    """Of a server that cannot begin."""
    command = [sys.executable, "-m", "perco", "serve", str(store), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_server_whose_port_is_taken_makes_no_store(tmp_path: Path, taken: int, processes: int) -> None:
    done = serve(tmp_path / "store", "--listen", f"tcp://127.0.0.1:{taken}", "--processes", str(processes))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"another process listens at tcp://127.0.0.1:{taken} already" in done.stderr
    assert not (tmp_path / "store").exists()


def test_neither_does_one_that_has_no_certificate(tmp_path: Path) -> None:
    done = serve(tmp_path / "store", "--listen", "tls://127.0.0.1:0")
    assert done.returncode == 2
    assert "--tls-cert" in done.stderr
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize("address", ["localhost:7999", "10.0.0.1:7999", "[::1]:7999"])
async def test_an_address_without_its_scheme_makes_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(perco.UsageError) as told:
        async with perco.open(address, schema):
            pass
    assert f"write tcp://{address}; " in str(told.value)
    assert not os.listdir(tmp_path)
    async with perco.open(f"./{address}", schema):  # as it says
        pass
    async with perco.open(address, schema):  # which there is by now
        pass


def test_every_front_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(perco.UsageError, match="write tcp://localhost:7999"), perco.sync.open("localhost:7999", schema):
        pass
    done = serve(Path("localhost:7999"))
    assert done.returncode == 2
    assert "write tcp://localhost:7999" in done.stderr
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- create=False

FRONTS = ["trio", "asyncio", "blocking"]


def enter(front: str, url: str, **how: bool) -> None:
    """Open a store and close it."""

    async def in_trio() -> None:
        async with perco.open(url, schema, **how):
            pass

    async def in_asyncio() -> None:
        async with perco.aio.open(url, schema, **how):
            pass

    if front == "trio":
        trio.run(in_trio)
    elif front == "asyncio":
        asyncio.run(in_asyncio())
    else:
        with perco.sync.open(url, schema, **how):
            pass


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("place", ["folder", "postgresql", "bigtable"])
def test_without_create_only_a_store_that_exists_is_opened(tmp_path: Path, front: str, place: str) -> None:
    fresh = {"folder": lambda: str(tmp_path / "store"), "postgresql": postgresql.fresh, "bigtable": bigtable.fresh}
    url = fresh[place]()
    for _ in range(2):  # the first one has made nothing
        with pytest.raises(perco.UsageError, match="there is no store at"):
            enter(front, url, create=False)
    assert not os.listdir(tmp_path)
    enter(front, url)
    enter(front, url, create=False)


def test_a_store_that_another_process_has_open_exists(tmp_path: Path) -> None:
    with perco.sync.open(tmp_path / "store", schema):
        program = (
            "import sys, perco.sync\n"
            "t = perco.Table('docs', key=perco.TEXT)\n"
            "with perco.sync.open(sys.argv[1], perco.Schema(t), create=False): print('open')\n"
        )
        command = [sys.executable, "-c", program, str(tmp_path / "store")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout == "open\n", done.stderr


def test_a_store_in_memory_never_exists() -> None:
    with pytest.raises(perco.UsageError, match="there is no store at memory:"):
        enter("trio", "memory:", create=False)


def test_create_makes_no_difference_to_a_program_that_only_reads(tmp_path: Path) -> None:
    for create in (True, False):
        with pytest.raises(perco.errors.UnsuitableFolder, match="there is no such folder"):
            enter("trio", str(tmp_path / "store"), readonly=True, create=create)
    enter("trio", str(tmp_path / "store"))
    enter("trio", str(tmp_path / "store"), readonly=True, create=False)


def test_a_folder_of_other_files_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(perco.errors.FormatUnknown, match=r"letter\.txt"):
        enter("trio", str(tmp_path), create=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(perco.errors.UnsuitableFolder, match="it is a file"):
        enter("trio", str(tmp_path / "file"), create=False)
