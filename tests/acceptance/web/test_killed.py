"""A parent kills the web index with SIGKILL after some store events and observer runs, again and again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgpack
import trio

import perco
from perco.check.check import check
from perco.database.inside import inside
from perco.webindex.batch import build, digest
from perco.webindex.index import WebIndex
from perco.webindex.pages import Page, pack
from perco.webindex.places import search_path
from perco.webindex.search import SearchIndex
from tests.acceptance.web.site import Site

KILLS = 40
OBSERVERS = tuple(WebIndex().schema.observers)
KINDS = ("prewrite", "commit", "secondaries", "recovery", "export", "ack", *OBSERVERS)
SEED = 2010


def live(store: Path, changes: Path, events_before: int, kill_at: Collection[str]) -> str:
    """Run the child; kill it at the first event of these kinds after so many. Returns the event, or "done"."""
    event_read, event_write = os.pipe()
    go_read, go_write = os.pipe()
    arguments = [str(store), str(changes), str(event_write), str(go_read)]
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.acceptance.web.child", *arguments],
        pass_fds=(event_write, go_read),
        stderr=subprocess.PIPE,
    )
    os.close(event_write)
    os.close(go_read)
    seen = 0
    try:
        with os.fdopen(event_read, "r") as events:
            for line in events:
                name = line.strip()
                if name == "done":
                    break
                seen += 1
                if seen > events_before and name in kill_at:
                    child.kill()
                    return name
                os.write(go_write, b".")
        _, complaints = child.communicate()
        assert child.returncode == 0, complaints.decode()
        return "done"
    finally:
        child.wait()
        assert child.stderr is not None
        child.stderr.close()
        os.close(go_write)


def checked(store: Path | str) -> None:
    """Check a folder beside its owner, or a store in a database as its owner."""

    async def run() -> None:
        opened = perco.open(store, perco.Schema()) if isinstance(store, str) else perco.open(store, readonly=True)
        async with opened as db:
            result = await check(inside(db).driver.store, ts=await inside(db).oracle.draw())
        assert result.clean, result.findings

    trio.run(run)


def test_killed_at_every_kind_of_event_it_recovers_and_ends_equal_to_a_batch_build(tmp_path: Path) -> None:
    rng, site = random.Random(SEED), Site(SEED)
    store, changes = tmp_path / "store", tmp_path / "changes"
    hit: Counter[str] = Counter()
    pending: list[bytes | str | tuple[str, float]] = []
    for _ in range(3 * KILLS):
        # Pages that the killed child may not have loaded go again, before new ones: loading is idempotent.
        fresh = [pack(change) if isinstance(change, Page) else change for change in site.change(4)]
        pending = [*pending, *fresh][-60:]
        changes.write_bytes(msgpack.packb(pending))
        least = min(hit[kind] for kind in KINDS)
        wanted = {kind for kind in KINDS if hit[kind] == least}
        wanted = {rng.choice(sorted(wanted)), rng.choice(sorted(wanted))}
        event = live(store, changes, rng.randrange(40), wanted)
        hit[event] += 1
        checked(store)
        if sum(hit[kind] for kind in KINDS) >= KILLS and all(hit[kind] >= 2 for kind in KINDS):
            break
    assert sum(hit[kind] for kind in KINDS) >= KILLS, hit
    assert all(hit[kind] >= 2 for kind in KINDS), hit

    everything = [pack(page) for page in site.pages.values()]
    gone = [f"https://site.invalid/page-{n}" for n in range(site.size)]
    last = [url for url in gone if url not in site.pages]
    changes.write_bytes(msgpack.packb([*everything, *last, *site.ranks.items()]))
    assert live(store, changes, 0, ()) == "done"
    checked(store)
    documents = build(site.pages.values(), site.ranks)
    assert any(document.duplicates for document in documents.values())
    with SearchIndex(search_path(store)) as search:
        assert search.digest() == digest(documents)
        search.check()
