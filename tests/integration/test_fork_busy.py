"""A process that forks while its writer is in the middle of a batch: the child does not wait for it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio

import perco
from perco.storage import LmdbEngine
from tests.support.guard import hangs_fail as hangs_fail

docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_child_lets_go_of_what_its_parent_is_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """S5. What LMDB locks for a batch stays locked in the child: to close the environment there might wait for ever."""
    inside, go_on = threading.Event(), threading.Event()
    right = LmdbEngine.commit

    def commit(self: LmdbEngine, mutations: Sequence[Any], *rest: Any) -> Any:
        if any(mutation.table == "docs" for mutation in mutations):
            inside.set()
            assert go_on.wait(60)
        return right(self, mutations, *rest)

    async with perco.open(tmp_path / "store", perco.Schema(docs), options=perco.Options(durability="process")) as db:
        await db.run(_put, 1)
        monkeypatch.setattr(LmdbEngine, "commit", commit)
        engines = [tablet.engine for tablet in db.local.store.tablets() if tablet.table == "docs"]  # type: ignore[attr-defined]
        commit_it = await db.begin()
        commit_it.set(n, "a", 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(commit_it.commit)
            await trio.to_thread.run_sync(inside.wait)
            assert engines[0].busy
            pid = os.fork()
            if pid == 0:
                signal.alarm(20)
                try:
                    engines[0]._env.info()  # it is still open: nobody closed it
                    os._exit(7)
                except BaseException:
                    os._exit(1)
            _, status = os.waitpid(pid, 0)  # noqa: ASYNC222
            go_on.set()
        assert os.waitstatus_to_exitcode(status) == 7
        async with db.snapshot() as snap:
            assert await snap.get(n, "a") == 2
        assert not engines[0].busy


async def _put(txn: perco.Transaction, value: int) -> None:
    txn.set(n, "a", value)
