"""What jobs of the tests do, where executors can import it."""

from __future__ import annotations

import os
import signal
from typing import Any

import trio

import perco

pages = perco.Table("pages", key=perco.TEXT, splits=["k000100"])
body = pages.column("body", perco.TEXT)
size = pages.column("size", perco.INT64)
raw = pages.column("raw", perco.BYTES)
rank = pages.column("rank", perco.FLOAT64)
fine = pages.column("fine", perco.BOOL)
tree = pages.column("tree", perco.JSON)
pack = pages.column("pack", perco.MSGPACK)
counts = perco.Table("counts", key=perco.TEXT, splits=["m"])
count = counts.column("count", perco.INT64)
pairs = perco.Table("pairs", key=perco.Tuple(perco.TEXT, perco.INT64))
weight = pairs.column("weight", perco.FLOAT64)
schema = perco.Schema(pages, counts, pairs)


@schema.observe(body, id="size")
async def measure(txn: perco.Transaction, change: perco.Change[str, str]) -> None:
    txn.set(size, change.key, len(change.value or ""))
    if change.value and change.value.startswith("kill the executor: "):
        kill_executor(change.value.removeprefix("kill the executor: "))


async def load(txn: perco.Transaction, row: Any) -> None:
    """A page."""
    txn.set(body, row["url"], row["body"])


async def bump(txn: perco.Transaction, row: Any) -> None:
    """One more of what the row names: an input that took effect twice would show."""
    txn.set(count, row["name"], (await txn.get(count, row["name"]) or 0) + 1)


async def refuse(txn: perco.Transaction, row: Any) -> None:
    """All but some."""
    txn.set(count, row["name"], 1)
    if row["id"] % 10 == 3:
        raise ValueError(f"{row['id']} is not to be had")


async def refuse_high(txn: perco.Transaction, row: Any) -> None:
    """As `bump`, for the first rows of each thousand."""
    await bump(txn, row)
    if row["id"] % 1000 >= 300:
        raise ValueError(f"{row['id']} is not to be had")


async def die_once(txn: perco.Transaction, row: Any) -> None:
    """As `bump`; the process that comes to a row which says where dies there, once, when others have committed."""
    await bump(txn, row)
    if row["die"]:
        try:
            os.close(os.open(row["die"], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


def not_async(txn: perco.Transaction, row: Any) -> None:
    """No loader."""


async def kill_executor_once(txn: perco.Transaction, row: Any) -> None:
    """As `bump`; where a row says so, the executor that it runs in dies, once: this process's grandparent."""
    await bump(txn, row)
    if row["die"]:
        kill_executor(row["die"])


def kill_executor(once: str) -> None:
    """This process's grandparent, if there is no such file."""
    try:
        os.close(os.open(once, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(parent(os.getppid()), signal.SIGKILL)


async def slow_first(txn: perco.Transaction, row: Any) -> None:
    """As `bump`; the first process to come to a row that says so is slow from then on, so that Spark begins another."""
    await bump(txn, row)
    if row["die"]:
        mine = f"{row['die']}-{os.getpid()}"
        if not os.path.exists(row["die"]):  # noqa: ASYNC240
            os.close(os.open(row["die"], os.O_CREAT))
            os.close(os.open(mine, os.O_CREAT))
        if os.path.exists(mine):  # noqa: ASYNC240
            await trio.sleep(3600)


def parent(pid: int) -> int:
    with open(f"/proc/{pid}/stat", encoding="ascii") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])
