"""A deployment is what its name says: else all that runs over it would show nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

import perco
from perco.serve.client import is_client, remote_owner
from perco.serve.direct import DirectRowStore
from perco.serve.served_tablet import ServedTablet
from tests.support.everywhere import BIGTABLE_DIRECT, CLIENTS, DIRECT, FOLDER, TABLETS, TLS, owning
from tests.support.machines import Machine
from tests.support.places import local_of

docs = perco.Table("docs", key=perco.TEXT, splits=["m"])
n = docs.column("n", perco.INT64)
SCHEMA = perco.Schema(docs)


async def check_is(deployment: str, db: perco.Database) -> None:
    async with db.transaction() as txn:
        txn.set(n, "a", 1)
        txn.set(n, "z", 2)
    async with db.snapshot() as snap:
        assert await snap.get_many(n, ["a", "z"]) == {"a": 1, "z": 2}
    assert is_client(db) == (deployment in CLIENTS)
    assert (owning(db) is db) == (deployment not in CLIENTS)
    tablets = [tablet for tablet in local_of(db).store.tablets() if tablet.table == "docs"]
    written = [
        tablet.entries("write") + tablet.entries("lock") for tablet in tablets
    ]  # the secondary's lock goes later
    assert written == [1, 1], "a look inside finds what was written"
    assert all(isinstance(tablet, ServedTablet) == (deployment == TABLETS) for tablet in tablets)
    if is_client(db):
        assert remote_owner(db).link.name.startswith("tls://127.0.0.1:" if deployment == TLS else "unix:")
        direct = deployment in (DIRECT, BIGTABLE_DIRECT)
        assert remote_owner(db).store.spread == (direct or deployment == TABLETS)
        assert isinstance(remote_owner(db).store, DirectRowStore) == direct
        assert sorted(remote_owner(db).store._links) == ([0, 1, 2] if deployment == TABLETS else [0])


@pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")
@pytest.mark.parametrize("folder", [False, True])
async def test_what_is_opened_is_reached_so(deployment: str, folder: bool, tmp_path: Path) -> None:
    if folder and deployment == TABLETS:
        pytest.skip("tablet servers in this process have their tablets in memory")
    async with perco.open(tmp_path / "store" if folder else "memory:", SCHEMA) as db:
        await check_is(deployment, db)
        if folder and deployment == FOLDER:
            assert (tmp_path / "store" / "socket").is_socket()


async def test_what_a_machine_opens_is_reached_so_and_found_again(deployment: str) -> None:
    machine = Machine(SCHEMA)
    for first in (True, False):
        async with machine.opened() as db:
            async with db.snapshot() as snap:
                found = await snap.get(n, "a")
            assert found == (None if first else 1)
            if first:
                await check_is(deployment, db)
    assert machine.store.tablet("docs", b"a").entries("write") == 1
