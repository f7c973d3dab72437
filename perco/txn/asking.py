"""The outcome of a transaction, by its token (T4)."""

from __future__ import annotations

from perco.errors import UsageError
from perco.txn.engine import Engine
from perco.txn.resolver import read_token


async def outcome(engine: Engine, token: str) -> int:
    """The outcome of a transaction: see `Database.outcome`."""
    engine.usable(writing=True)
    if not isinstance(token, str):
        raise UsageError(f"{token!r} is not a transaction's token, which is a str: txn.token, CommitUnknown.token")
    try:
        start_ts, primary = read_token(token)
    except ValueError as error:
        raise UsageError(f"{token!r} is not a transaction's token") from error
    # Other processes may have drawn timestamps that this process has not seen: ask the oracle for the newest one.
    drawn = 0 < start_ts <= engine.oracle.last or 0 < start_ts <= await engine.oracle.newest()
    if not drawn or not engine.known.catalogue.has(primary.table, primary.column):
        raise UsageError(f"{token!r} is the token of a transaction on another store")
    return await engine.driver.outcome(start_ts, primary)
