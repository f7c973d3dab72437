"""It loads two tables in bulk and dies at a step: `python -m tests.integration.storage.bulk FOLDER STEP`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

import perco
from perco.clock.timestamps import Timestamps
from perco.storage import Folder, LmdbEngine, LocalRowStore
from perco.tablets.local import LocalStore

docs = perco.Table("docs", key=perco.TEXT)
body = docs.column("body", perco.TEXT)
size = docs.column("size", perco.INT64)
thumb = docs.column("thumb", perco.BYTES, group="pictures")
words = perco.Table("words", key=perco.Tuple(perco.TEXT, perco.INT64))
count = words.column("count", perco.INT64)
lengths = perco.Table("lengths", key=perco.TEXT)
length = lengths.column("length", perco.INT64)
SCHEMA = perco.Schema(docs, words, lengths)

DOCS: dict[str, dict[perco.Column[Any, Any], Any]] = {
    f"doc {i:03}\0x": {body: f"text {i} " * (i % 50 + 1), size: i} for i in range(300)
}
for i, values in enumerate(DOCS.values()):
    if i % 7 == 0:
        values[thumb] = bytes([i % 256]) * (i * 5)
WORDS = {(f"w{i % 10}", i): {count: i} for i in sorted(range(200), key=lambda i: (f"w{i % 10}", i))}

STEPS: list[tuple[type, str]] = [
    (Folder, "begin_load"),
    (LmdbEngine, "append"),
    (LmdbEngine, "sync"),
    (Folder, "place_loaded"),
    (LocalStore, "open_loaded"),
    (LocalRowStore, "apply"),
    (Timestamps, "jump"),
    (LocalRowStore, "add_split"),
    (Folder, "end_load"),
]


@SCHEMA.observe(size, id="measure")
async def measure(txn: perco.Transaction, change: perco.Change[str, int]) -> None:
    """Counts its runs, so that a test sees one that is made twice."""
    runs = await txn.get(length, change.key) or 0
    txn.set(length, change.key, runs + 1)


def dying_at(step: int) -> None:
    """End this process at a step: before it if the number is even, else after it."""
    passed = 0

    def wrap(owner: type, name: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def die(now: int) -> None:
            nonlocal passed
            if passed == now:
                os._exit(9)

        def dying(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            die(step)
            passed += 1
            made = function(*args, **kwargs)
            if name not in ("apply", "open_loaded"):
                die(step)
                passed += 1
            return made

        async def dying_async(*args: Any, **kwargs: Any) -> Any:
            nonlocal passed
            made = await dying(*args, **kwargs)
            die(step)
            passed += 1
            return made

        setattr(owner, name, dying_async if name in ("apply", "open_loaded") else dying)

    for owner, name in STEPS:
        wrap(owner, name)


async def main(folder: Path, step: int) -> None:
    async with perco.open(folder, SCHEMA) as db:
        dying_at(step)
        await db.bulk_load({docs: DOCS.items(), words: WORDS.items()})
        print("loaded", flush=True)
        os._exit(0)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]))
