"""What a type checker says of a user's program: exact types of keys and values, in every front, and errors for wrong
ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAD = """
import perco, perco.aio, perco.sync
docs = perco.Table("docs", key=perco.TEXT)
n = docs.column("n", perco.INT64)
grown = docs.signal("grown")
schema = perco.Schema(docs)
"""

SYNC = """
def bump(txn: perco.sync.Transaction, key: str, by: int = 1) -> float:
    reveal_type(txn.get(n, key, lock=True))  # int | None
    reveal_type(txn.get_many(n, [key]))  # dict[str, int | None]
    reveal_type(txn.row(docs, key, [n])[n])  # int | None
    reveal_type([row.key for row in txn.scan(docs, prefix="a")])  # list[str]
    txn.set(n, key, 1)
    txn.signal(grown, key)
    txn.set(n, key, "one")  # error: Cannot infer
    txn.set(n, 5, 1)  # error: Cannot infer
    txn.get(n)  # error: Missing positional argument
    txn.get(n, key, locked=True)  # error: Unexpected keyword
    txn.signal(n, key)  # error: Argument 1
    return 0.5

@schema.observe(n, id="o")
@perco.sync.observer
def observed(txn: perco.sync.Transaction, change: perco.Change[str, int]) -> None:
    reveal_type(change.value)  # int | None

with perco.sync.open("memory:", schema) as db:
    reveal_type(db)  # perco.sync.database.Database
    reveal_type(db.run(bump, "a", by=2))  # float
    reveal_type(db.options(attempts=3).run(bump, "a"))  # float
    db.run(bump, 5)  # error: Argument 2
    db.run(bump)  # error: Missing positional
    for attempt in db.attempts():
        with attempt as txn:
            reveal_type(txn)  # perco.sync.held.Transaction
    with db.transaction(isolation="serializable") as txn:
        reveal_type(txn.commit())  # int
    with db.snapshot() as snap:
        reveal_type(snap.get(n, "a"))  # int | None
        reveal_type(snap.scan(docs).all())  # list[perco.txn.row.Row[str]]
    with db.pin("p", lease_s=5) as pin:
        reveal_type(pin.renew(6.0))  # None
    with db.worker(concurrency=3) as worker:
        reveal_type(worker.statistics())  # dict[str, perco.notify.options.ObserverCounters]
    reveal_type(db.wait_idle(timeout=3.0))  # int
    reveal_type(db.failed("o", limit=3))  # list[perco.notify.failures.FailedChange]
    db.transaction(isolation="weak")  # error: Argument "isolation"
    db.wait_idle(timeout="3")  # error: Argument "timeout"
"""


AWAITED = (
    r"(?<!def )\b((?:txn|snap|pin|db)(?:\.options\(.*?\))?)\.(get|get_many|row|run|commit|renew|wait_idle|failed)\("
)


def asynchronous(text: str) -> str:
    """The same program, awaiting."""
    text = text.replace("perco.sync.observer\ndef", "perco.aio.observer\nasync def")
    text = text.replace("def bump", "async def bump")
    text = re.sub(r"\b(with|for) (?=perco|db|attempt)", r"async \1 ", text)
    text = text.replace("[row.key for row in", "[row.key async for row in")
    text = re.sub(AWAITED, r"await \1.\2(", text)
    text = text.replace("await txn.row(docs, key, [n])[n]", "(await txn.row(docs, key, [n]))[n]")
    text = text.replace("snap.scan(docs).all()", "await snap.scan(docs).all()")
    head, main = text.replace("perco.sync", "perco.aio").split("async with perco.aio.open")
    main = f"async with perco.aio.open{main}".replace("\n", "\n    ")
    return f"{head}async def main() -> None:\n    {main}"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, list[str]]]:
    """What mypy --strict says, by line, of both programs: one run."""
    folder = tmp_path_factory.mktemp("typing")
    programs = {"sync": HEAD + SYNC, "aio": HEAD + asynchronous(SYNC)}
    for name, text in programs.items():
        (folder / f"user_{name}.py").write_text(text)
    files = [str(folder / f"user_{name}.py") for name in programs]
    root = str(Path(__file__).parents[3])
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--no-incremental",
        "--config-file=",
        "--follow-imports=silent",
    ]
    done = subprocess.run([*command, *files], cwd=root, capture_output=True, text=True, timeout=300)
    assert "error" in done.stdout, done.stdout + done.stderr
    return {
        name: (text, [line for line in done.stdout.splitlines() if f"user_{name}.py" in line])
        for name, text in programs.items()
    }


@pytest.mark.parametrize("front", ["sync", "aio"])
def test_types_are_exact_and_wrong_ones_are_errors(front: str, checked: dict[str, tuple[str, list[str]]]) -> None:
    text, said = checked[front]
    wanted = {i: line.split("  # ")[1] for i, line in enumerate(text.splitlines(), 1) if "  # " in line}
    assert len(wanted) >= 25
    for number, what in wanted.items():
        here = [line for line in said if f".py:{number}: " in line]
        if what.startswith("error: "):
            assert any(f" {what}" in line for line in here), (text.splitlines()[number - 1], here)
        else:
            what = what.replace("perco.sync.", f"perco.{front}.")
            assert any(f'Revealed type is "{what}"' in line for line in here), (text.splitlines()[number - 1], here)
    surprises = [line for line in said if ": error: " in line and int(line.split(":")[1]) not in wanted]
    assert not surprises, "\n".join(surprises)
