"""Two indexes of the same people: one of addresses, which must never be wrong, and one of towns, which may lag behind.

    python examples/unique.py [FOLDER]

Kill it at any moment and start it again; every start moves people about, and compares both indexes with the people.

What to look at:

- An address has only one owner. This must be decided in the transaction that writes the person. If two transactions
  want the same address, both write `holder[address]`, so one of them runs again, and then finds the address taken. An
  observer would be too late, because it runs after the person has been written.
- The index of towns is derived from the people, so an observer maintains it. The transactions that write people do not
  wait for the observer. `db.wait_idle()`, or `db.wait_for(ts)` for one commit, waits until it has caught up. In
  `filed`, the observer notes the town of its last run, because a change does not contain the old value.
"""

import argparse
import random
from collections import Counter
from pathlib import Path

import trio

import perco

PEOPLE, ADDRESSES, STEPS, AT_ONCE = 120, 80, 400, 32
TOWNS = ["Aberdeen", "Bath", "Cork", "Durham"]

people = perco.Table("people", key=perco.INT64)
email = people.column("email", perco.TEXT)
town = people.column("town", perco.TEXT)
filed = people.column("filed", perco.TEXT)  # the town under which the index has this person

emails = perco.Table("emails", key=perco.TEXT)  # unique: an address -> its one owner
holder = emails.column("holder", perco.INT64)

by_town = perco.Table("by_town", key=perco.Tuple(perco.TEXT, perco.INT64))  # not unique: (town, person)
since = by_town.column("since", perco.INT64)  # the commit timestamp of the move

schema = perco.Schema(people, emails, by_town)


class EmailTakenError(Exception):
    """Raised inside a transaction: this discards the transaction, and `db.run` raises the error."""


async def register(txn: perco.Transaction, person: int, address: str, home: str) -> None:
    """Write a person, new or known, with an address that no other person has."""
    owner = await txn.get(holder, address)
    if owner not in (None, person):
        raise EmailTakenError(f"{address} belongs to person {owner}")
    old = await txn.get(email, person)
    if old is not None and old != address:
        txn.delete(holder, old)
    txn.set(holder, address, person)
    txn.set(email, person, address)
    txn.set(town, person, home)


async def leave(txn: perco.Transaction, person: int) -> None:
    old = await txn.get(email, person)
    if old is not None:
        txn.delete(holder, old)
        txn.delete(email, person)
        txn.delete(town, person)


@schema.observe(town, id="index by town")
async def index(txn: perco.Transaction, change: perco.Change[int, str]) -> None:
    person, home = change.key, change.value  # None: the person has left
    old = await txn.get(filed, person)
    if old is not None:
        txn.delete(since, (old, person))
        txn.delete(filed, person)
    if home is not None:
        txn.set(since, (home, person), change.commit_ts)
        txn.set(filed, person, home)


async def inhabitants(snap: perco.Snapshot, home: str) -> list[int]:
    return [row.key[1] async for row in snap.scan(by_town, prefix=(home,))]


async def compare(snap: perco.Snapshot) -> tuple[int, int, int]:
    """How many people there are, and, for each index, how many of its entries disagree with the rows of the people."""
    known = {row.key: (row.get(email, ""), row.get(town, "")) async for row in snap.scan(people, columns=[email, town])}
    owners = {(row.key, row[holder]) async for row in snap.scan(emails)}
    listed = {(home, person) for home in TOWNS for person in await inhabitants(snap, home)}
    wrong = owners ^ {(address, person) for person, (address, _) in known.items()}
    late = listed ^ {(home, person) for person, (_, home) in known.items()}
    return len(known), len(wrong), len(late)


async def main(folder: Path) -> None:
    came: Counter[str] = Counter()
    async with perco.open(folder, schema) as db, db.worker():

        async def move_about() -> None:
            for _ in range(STEPS // AT_ONCE):
                person = random.randrange(PEOPLE)
                try:
                    if random.random() < 0.1:
                        await db.run(leave, person)
                        came["gone"] += 1
                    else:
                        address = f"{random.randrange(ADDRESSES)}@mail.example"
                        await db.run(register, person, address, random.choice(TOWNS))
                        came["written"] += 1
                except EmailTakenError:
                    came["told that the address is taken"] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(AT_ONCE):
                nursery.start_soon(move_about)
        print(", ".join(f"{count} {what}" for what, count in came.most_common()))
        for when in "at once", "when the observer has caught up":
            async with db.snapshot() as snap:
                known, wrong, late = await compare(snap)
            print(f"{known} people, {when}: {wrong} wrong entries for addresses, {late} for towns")
            await db.wait_idle()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("example-unique"), metavar="FOLDER")
    try:
        trio.run(main, parser.parse_args().folder)
    except* KeyboardInterrupt:
        print("stopped; start it again to continue")
