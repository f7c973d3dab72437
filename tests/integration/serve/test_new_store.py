"""When a store is made, and when a mistyped name must not make one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import perco
import perco.sync

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
