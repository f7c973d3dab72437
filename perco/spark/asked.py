"""The options of `format("perco")`."""

from __future__ import annotations

import os
from collections import Counter
from datetime import datetime
from typing import Any, Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pyspark.sql.types import StructType

import perco
from perco.errors import UsageError
from perco.spark import sink
from perco.spark.following import NOW, SNAPSHOT
from perco.spark.store import Store, reached

OF_FRAMES: Final = (
    "table",
    "url",
    "path",
    "columns",
    "ts",
    "at",
    "start",
    "stop",
    "prefix",
    "key",
    "partitions",
    "read",
)
FILES, PAGES, BY_ROWS = "files", "pages", "rows"  # values of the option `read`
_ALIASES: Final = {"timestampasof": "at", "versionasof": "ts"}  # names that other formats of Spark use
_PARTITIONS_MAX: Final = 10_000  # each takes a Spark task and a connection to the store
FEED: Final = "readchangefeed"  # an option that tells the schema of a stream from that of a frame
OF_CHANGES: Final = (
    *("table", "url", "path", "columns", "key", "partitions", "read", "since", "startingversion", "startingtimestamp"),
    *("maxrows", "net", "preimages", "lease", FEED),
)
_VIEW: Final = (
    "In SQL, declare a view: create temporary view NAME using perco options (table 'TABLE'); with an option url, if no "
    "store is registered"
)


class Asked:
    """The options of `format("perco")`, for a read or a write."""

    columns: list[Any] | None
    ts: int | None
    at: datetime | None
    start: Any | None
    stop: Any | None
    prefix: Any | None
    partitions: int | None
    read: str
    batch: int
    nulls: str
    failures_max: int
    failures_to: str

    def __init__(self, options: Any, store: Store | None, known: tuple[str, ...], zone: str = "UTC") -> None:
        """`zone`: the session's time zone."""
        given = {name: options[name] for name in options}
        for theirs, ours in _ALIASES.items():
            for name in [name for name in given if name.lower() == theirs and ours in known]:
                if ours in given:
                    raise UsageError(f"{name} is another name for {ours}: give one of them")
                given[ours] = given.pop(name)
        if "provider" in given or any(name.startswith("option.") for name in given):  # `create table`
            raise UsageError(f"perco's tables cannot be in Spark's catalogue. {_VIEW}")
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise UsageError(f"format('perco') has no option {unknown[0]!r}; it has {', '.join(known)}")
        self.table: str = given.get("table", "")
        if not self.table:
            raise UsageError(
                "format('perco') needs .option('table', NAME); `perco status STORE` lists the tables. Spark does not "
                f"pass options on from `create table ... using perco`. {_VIEW}"
            )
        url = given.get("url") or given.get("path")
        if url is not None and (store is None or store.url != url):  # a store's token is not for another store
            store = reached(url) or Store(url=url)
        if store is None:
            raise UsageError("format('perco') needs .option('url', ...), or a store that it is registered with")
        self.store = store
        self.key: str = given.get("key", "key")
        self.columns = [name.strip() for name in given["columns"].split(",")] if "columns" in given else None
        twice = [name for name, count in Counter(self.columns or ()).items() if count > 1]
        if twice:
            raise UsageError(f"columns={given['columns']!r} names {twice[0]!r} more than once")
        self.ts = number("ts", given.get("ts"))
        self.at = _moment("at", given.get("at"), zone)
        if self.ts is not None and self.at is not None:
            raise UsageError("give either ts or at, not both")
        self.start, self.stop, self.prefix = (given.get(name) for name in ("start", "stop", "prefix"))
        self.partitions = number("partitions", given.get("partitions"), most=_PARTITIONS_MAX)
        self.read = one_of("read", given.get("read"), FILES, PAGES, BY_ROWS)
        self.nulls = one_of("nulls", given.get("nulls"), "keep", "delete")
        self.job: str = given.get("job", "")
        self.batch = number("batch", given.get("batch"), least=0) or 0
        self.failures_max = number("failures_max", given.get("failures_max"), least=0) or 0
        self.failures_to = os.path.abspath(given["failures_to"]) if given.get("failures_to") else ""
        if bool(self.job) != ("batch" in given):
            raise UsageError("give job and batch together: .option('job', NAME).option('batch', batch_id)")

    def sink(self, schema: StructType, overwrite: bool) -> sink.Sink:
        """Where a frame is written to."""
        return sink.Sink(
            *(self.store, self.table, self.key, schema),
            overwrite=overwrite,
            failures_max=self.failures_max,
            failures_to=self.failures_to,
        )

    def table_of(self, db: perco.Database) -> perco.Table[Any]:
        if self.table not in db.schema.tables:
            raise UsageError(f"there is no table {self.table!r}; there are: {', '.join(sorted(db.schema.tables))}")
        return db.schema.tables[self.table]

    def columns_of(self, table: perco.Table[Any]) -> list[perco.Column[Any, Any]]:
        return [table.columns[name] for name in (table.columns if self.columns is None else self.columns)]


def number(name: str, text: str | None, least: int = 1, most: int | None = None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{name}={text!r}: it must be a whole number of at least {least}")
    if most is not None and int(text) > most:
        raise UsageError(f"{name}={text!r}: it must be {most} at most")
    return int(text)


def one_of(name: str, text: str | None, *values: str) -> str:
    """The value of an option, which has a few; the first one by default."""
    value = values[0] if text is None else text.lower()
    if value not in values:
        raise UsageError(f"{name}={text!r}: it is {' or '.join(values)}")
    return value


def _moment(name: str, text: str | None, zone: str) -> datetime | None:
    """The time that an option gives; `zone`: the time zone of a time that has none."""
    if text is None:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{name}={text!r}: write a time as in 2026-11-22T18:30:00+00:00") from None
    if at.tzinfo is not None:
        return at
    try:
        return at.replace(tzinfo=ZoneInfo(zone))
    except (ZoneInfoNotFoundError, ValueError):
        raise UsageError(
            f"{name}={text!r}: give its offset, as in {text}+00:00: Python does not know {zone!r}"
        ) from None


def since_of(options: dict[str, str], zone: str) -> int | datetime | str:
    """Where a stream begins: see `Following.since`. Delta's names are other names for the option."""
    version, time = options.get("startingversion"), options.get("startingtimestamp")
    since = options.get("since")
    if sum(each is not None for each in (since, version, time)) > 1:
        raise UsageError("give only one of since, startingVersion and startingTimestamp")
    if version is not None:  # Delta's is the first version to be read
        return NOW if version.lower() == "latest" else (number("startingVersion", version) or 1) - 1
    if since is not None and since.lower() in (NOW, SNAPSHOT):
        return since.lower()
    if since is not None and since.isdecimal():
        return int(since)
    return _moment("since" if time is None else "startingTimestamp", since or time, zone) or SNAPSHOT
