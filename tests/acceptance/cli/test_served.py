"""`perco status`, `check` and `vacuum` of a store that is named by where it is served."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.cli.checking import check_served
from perco.errors import StoreError
from perco.serve import opening
from perco.serve.remote_rows import RemoteRowStore
from perco.storage import ScanPage, ScanRequest
from tests.acceptance.cli import stores
from tests.acceptance.cli.test_checking import damage


def steady(status: str) -> dict[str, Any]:
    """Without what changes as time goes by."""
    found: dict[str, Any] = json.loads(status)
    for name in ("clock", "watermark", "pins"):
        found.pop(name)
    found["owner"].pop("heartbeat_age_s")
    for table in found["tables"]:
        table.pop("readable_since")
    return found


async def test_status_of_an_address_tells_what_status_of_the_folder_tells(store: Path) -> None:  # R9
    async with stores.owned(store) as owner:
        beside = await stores.run("status", store, "--json")
        served = await stores.run("status", f"unix:{store / 'socket'}", "--json")
        assert served.code == beside.code == 0, served.err
        assert steady(served.out) == steady(beside.out)
        found = json.loads(served.out)
        assert (found["store"], found["owner"]["pid"]) == (str(store), owner.pid)
        assert sum(tablet["entries"]["write"] for table in found["tables"] for tablet in table["tablets"]) > 0
        people = await stores.run("status", f"unix:{store / 'socket'}", "--groups")
        assert f"process {owner.pid}" in people.out


async def test_vacuum_of_a_served_store_counts_its_records(store: Path) -> None:
    async with stores.owned(store):
        for named in store, f"unix:{store / 'socket'}":
            done = await stores.run("vacuum", named, "--json")
            assert done.code == 0, done.err
            records = json.loads(done.out)["records"]
            assert records["before"] >= records["after"] > 0


# ------------------------------------------------------------------ check


async def test_check_of_an_address_finds_what_check_of_the_folder_finds(store: Path) -> None:  # R9
    await damage(store, severity="error")
    async with stores.owned(store):
        beside = await stores.run("check", store, "--json")
        served = await stores.run("check", f"unix:{store / 'socket'}", "--json")
        people = await stores.run("check", f"unix:{store / 'socket'}")
    assert (served.code, served.err) == (beside.code, beside.err) == (1, "")
    here, there = json.loads(beside.out), json.loads(served.out)
    assert (here.pop("files_checked"), there.pop("files_checked")) == (True, False)
    assert [finding["invariant"] for finding in there["findings"]] == ["N1"]
    for found in (here, there):
        for changing in ("seconds", "ts"):
            del found[changing]
    assert here == there
    assert people.code == 1
    address = f"unix:{store / 'socket'}"
    assert people.out.splitlines()[-1] == (
        f"only the cells were checked: to check the files too, run `perco check {store}` on the host that serves "
        f"{address}"
    )


@pytest.mark.parametrize("processes", [1, 2])
async def test_check_of_an_address_under_traffic_reports_nothing(store: Path, processes: int) -> None:
    async with perco.open(store, perco.Schema(stores.docs, keep=perco.Keep(seconds=0))):
        pass  # the store keeps that in mind
    command = stores.command("serve", store, "--processes", processes)
    async with stores.started(command) as server:
        assert (await stores.Lines(server.stdout).next()).startswith("serving")
        async with stores.owned(store) as client:
            await client.tell("work")
            await client.tell("write")
            await client.tell("vacuum")
            before = int(await client.tell("commits"))
            for _ in range(2):
                done = await stores.run("check", f"unix:{store / 'socket'}", "--json")
                found = json.loads(done.out)
                assert [each for each in found["findings"] if each["severity"] != "note"] == []
                assert (done.code, done.err, found["tables"]) == (0, "", 4)
            assert int(await client.tell("commits")) > before
        server.terminate()
        assert await server.wait() == 0


async def test_check_of_an_address_fetches_no_long_values(store: Path) -> None:
    """A row with more of them than fit into a message is checked."""
    async with perco.open(store, stores.schema) as db:
        for _ in range(4):
            async with db.transaction() as txn:
                txn.set(stores.contents, "heavy", b"x" * (8 << 20))
        async with db.worker():
            await db.wait_idle()
    async with stores.owned(store):
        done = await stores.run("check", f"unix:{store / 'socket'}")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("clean: 4 tables, ")


async def test_what_can_be_repaired_is_repaired_through_the_server(store: Path) -> None:
    await damage(store, severity="error")
    async with stores.owned(store) as owner:
        await owner.tell("write")
        done = await stores.run("check", f"unix:{store / 'socket'}", "--repair")
        assert (done.code, done.err) == (0, "")
        first, *between, last, files = done.out.splitlines()  # between: notes of what is just being written, too
        assert first.startswith("repaired N1   docs['lost'].contents: lost notification: observer 'measure'")
        assert [line for line in between if line.startswith("clean: ")]
        assert last == "1 repaired"
        assert files.startswith("only the cells were checked")
        await owner.tell("work")
        assert (await stores.run("wait", store, "--until-ts", 1)).code == 0
    assert (await stores.run("check", store)).code == 0


async def test_accept_of_an_address_is_refused_before_anything_is_asked(store: Path) -> None:
    for more in ((), ("--repair",)):
        done = await stores.run("check", f"unix:{store / 'socket'}", "--accept", *more)  # where nobody listens
        assert (done.code, done.out) == (2, "")
        assert done.err.startswith("perco: --accept is for a folder")


async def test_where_nobody_serves_check_says_so(store: Path) -> None:
    for more in ((), ("--repair",), ("--json",)):
        done = await stores.run("check", f"unix:{store / 'socket'}", *more)
        assert (done.code, done.out) == (2, "")
        [line] = done.err.splitlines()
        assert str(store / "socket") in line


@pytest.mark.parametrize("more", [(), ("--repair",)])
async def test_a_check_whose_server_goes_away_says_that_it_was_cut_short(
    store: Path, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stores.started(stores.command("serve", store)) as server:
        assert (await stores.Lines(server.stdout).next()).startswith("serving")

        async def gone(self: RemoteRowStore, request: ScanRequest) -> ScanPage:
            monkeypatch.undo()  # the first scan finds its server gone
            server.kill()
            await server.wait()
            return await self.scan(request)

        monkeypatch.setattr(RemoteRowStore, "scan", gone)
        monkeypatch.setattr(opening, "Options", partial(perco.Options, wire=perco.options.WireOptions(patience_s=0.05)))
        with pytest.raises(StoreError, match=r"^the check was cut short: the server at .* was not reached") as caught:
            await check_served(f"unix:{store / 'socket'}", json=False, accepting=False, repairing=bool(more))
    assert "run the check again" in str(caught.value)
    assert capsys.readouterr().out == ""
