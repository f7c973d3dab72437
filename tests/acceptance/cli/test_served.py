"""`perco status`, `check` and `vacuum` of a store that is named by where it is served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.acceptance.cli import stores


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


async def test_check_of_an_address_names_the_command_to_run_on_its_host(store: Path) -> None:
    async with stores.owned(store):
        done = await stores.run("check", f"unix:{store / 'socket'}")
    assert done.code == 2
    assert f"run `perco check {store}`" in done.err
