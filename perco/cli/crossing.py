"""`perco crossover`: measures whether observers or a batch keep a program's views for less."""

from __future__ import annotations

import importlib
import importlib.util
import json as jsons
import logging
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import perco
from perco.cli import crossed, drawing
from perco.cli.screen import FINE, FOUND, complain, is_elsewhere, perform_or, show_json
from perco.cli.values import from_plain
from perco.cli.working import loaded_views
from perco.crossover import Batch, Making, Plan, Sampler, SourceRow, measure, must_be_enough
from perco.errors import UsageError
from perco.views import Cached, Views

_UNITS: Final = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_RATE: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)\s*/\s*(s|m|min|h|d)")
_SPAN: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(s|m|min|h|d)")
_KNOWN_MAX: Final = 100_000  # values of a cached function that are taken over from a store
_REMOVED: Final = "interrupted; the scratch store is removed"


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate of changes. `amount`: of rows, or a share of all rows, within `seconds`."""

    amount: float
    is_share: bool
    seconds: float

    def per_s(self, rows: int) -> float:
        """Changes a second, for a data set of so many rows."""
        return self.amount * (rows if self.is_share else 1) / self.seconds


def parse_rate(text: str) -> Rate:
    """Raises: UsageError."""
    found = _RATE.fullmatch(text.strip())
    amount = float(found[1]) if found else 0.0
    if found is None or not amount:
        raise UsageError(f"{text!r} is not a rate: write 5%/h, 0.5%/min or 20%/d (of all rows), or 10/s (rows)")
    return Rate(amount / 100 if found[2] else amount, bool(found[2]), _UNITS[found[3]])


def parse_span(text: str) -> float:
    """Seconds. Raises: UsageError."""
    found = _SPAN.fullmatch(text.strip())
    seconds = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not seconds:
        raise UsageError(f"{text!r} is not a time: write 90s, 10m, 1h or 1d")
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """The options of the command. Spans in seconds."""

    program: str
    store: str | None
    file: Path | None
    rate: Rate
    every_s: float | None
    delay_s: float | None
    sample: int
    rows: int | None
    batch: str
    folder: Path
    plan: Plan
    plot: Path | None


def crossover(
    program: Annotated[str, typer.Argument(metavar="MODULE:VIEWS", help="Where the views are declared.")],
    store: Annotated[
        str | None, typer.Option("--store", metavar="STORE", help="Take the source rows from this store.")
    ] = None,
    rows: Annotated[
        Path | None, typer.Option("--rows", metavar="FILE", help="Take them from this file of JSON lines.")
    ] = None,
    rate: Annotated[str, typer.Option(metavar="RATE", help="How much changes: 5%/h (of all rows), or 10/s.")] = "5%/h",
    every: Annotated[
        str | None, typer.Option(metavar="TIME", help="How often the batch would run, such as 10m or 1h.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar="TIME", help="Or: after what time each change has to show.")
    ] = None,
    sample: Annotated[int, typer.Option(min=1, help="Measure with so many source rows.")] = 10_000,
    rows_total: Annotated[
        int | None, typer.Option("--rows-total", min=1, help="The size of the data set; by default, all rows there.")
    ] = None,
    batch: Annotated[
        str, typer.Option(help='"python": the definition, in one process; "spark": a Spark job.')
    ] = "python",
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, about.")] = 60.0,
    folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Where the scratch store is made; by default, beside STORE.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the sample, the changes and their times.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the result.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure from which rate of changes on a batch would cost less CPU time than observers, on this machine.

    Both ways keep your views, on a sample of your rows: a worker, change by change, in a scratch store; and a batch,
    which computes all rows again by the views' definition, in plain Python. The changes give rows the values of other
    rows; some rows go and come back. At the end, both have to give the same views: if not, the exit code is 1.

    The store is only read. Sinks do not run, and neither do observers that do not belong to views. Cached functions are
    called for the rows of the sample, unless the store has their values (the first 100 000 are looked at).

    Each line of FILE is a row: {"table": "pages", "key": ..., "values": {...}}. Keys and values are as perco scan
    --json prints them. The table may be left out if the views read only one.

    \b
    Examples:
      perco crossover app:views --store web/
      perco crossover app:views --store web/ --rate 20%/d --every 1h
      perco crossover app:views --rows pages.jsonl --rows-total 1000000 --rate 10/s --delay 15m --json
    """
    perform_or(
        _REMOVED,
        _cross,
        program,
        store,
        rows,
        rate,
        every,
        delay,
        sample,
        rows_total,
        batch,
        seconds,
        folder,
        seed,
        plot,
        json=json,
    )


async def _cross(
    program: str,
    store: str | None,
    file: Path | None,
    rate: str,
    every: str | None,
    delay: str | None,
    sample: int,
    rows: int | None,
    batch: str,
    seconds: float,
    folder: Path | None,
    seed: int,
    plot: Path | None,
    *,
    json: bool,
) -> int:
    if (store is None) == (file is None):
        raise UsageError("the source rows come from --store STORE or from --rows FILE: give one of them")
    if every is not None and delay is not None:
        raise UsageError("--every says how often the batch runs, and --delay computes it: give one of them")
    asked = Asked(
        program=program,
        store=store,
        file=file,
        rate=parse_rate(rate),
        every_s=None if every is None else parse_span(every),
        delay_s=None if delay is None else parse_span(delay),
        sample=sample,
        rows=rows,
        batch=batch,
        folder=_folder(store) if folder is None else folder,
        plan=Plan(seconds=seconds, seed=seed),
        plot=plot,
    )
    if not asked.folder.is_dir():
        raise UsageError(f"--folder {asked.folder}: there is no such folder")
    if plot is not None:
        drawing.must_draw(plot)
    _must_have(batch)
    views = loaded_views(program)
    if not views.declared:
        raise UsageError(f"{program} declares no views: there is nothing to compare")
    return await _compare(asked, views, json=json)


async def _compare(asked: Asked, views: Views, *, json: bool) -> int:
    perco.tune_gc()
    with _progress() as tell:
        sampler, known = Sampler(asked.sample, asked.plan.seed), None
        if asked.store is not None:
            known = await _read_store(asked.store, views, sampler, tell)
        else:
            assert asked.file is not None
            _read_file(asked.file, views, sampler)
        sampled = must_be_enough(views, sampler.rows())
        total = asked.rows or sampler.taken
        per_s = asked.rate.per_s(total)
        with tempfile.TemporaryDirectory(prefix=".perco-crossover-", dir=asked.folder) as scratch:
            place = Path(scratch)
            with _quiet(), _making(asked, place) as batch:
                found = await measure(views, sampled, per_s, place, asked.plan, known=known, batch=batch, progress=tell)
    told = crossed.Told(views, asked.program, found, total, per_s, asked.every_s, asked.delay_s)
    if asked.plot is not None:
        drawing.draw(told, asked.plot)
    if json:
        show_json(told.plain())
    else:
        told.show()
    for each in found.differences:
        complain(each)
    return FINE if found.equal else FOUND


def _folder(store: str | None) -> Path:
    """Where the user's store is, or would be."""
    return Path.cwd() if store is None or is_elsewhere(store) else Path(store).expanduser().absolute().parent


async def _read_store(
    store: str, views: Views, sampler: Sampler, tell: Callable[[str], object]
) -> dict[Cached[Any, Any], dict[bytes, Any]]:
    """Sample the rows of a store. Returns the values of cached functions that it has, up to a bound."""
    known: dict[Cached[Any, Any], dict[bytes, Any]] = {}
    # Without the schema: the store need not know the views yet, and other observers may write their tables now.
    async with perco.open(store, readonly=True) as db, db.snapshot() as snap:
        for table, columns in views.sources.items():
            async for row in _scan(db, snap, table, columns):
                sampler.add(row)
                if sampler.taken % 1000 == 0:
                    tell(f"reading: {sampler.taken} rows")
        for cached in views.cached_functions.values():
            values = _scan(db, snap, cached.results.table, [cached.results], limit=_KNOWN_MAX)
            known[cached] = {row.key: row.values[cached.results] async for row in values}
    return known


async def _scan(
    db: perco.Database,
    snap: perco.Snapshot,
    table: perco.Table[Any],
    columns: Iterable[perco.Column[Any, Any]],
    limit: int | None = None,
) -> AsyncIterator[SourceRow]:
    """Rows of a table that the program declares, as far as the store has it. Raises: UsageError if it has another."""
    there = db.schema.tables.get(table.name)
    if there is None:
        return
    found = {there.columns[column.name]: column for column in columns if column.name in there.columns}
    for mine, stored in [(table.key, there.key), *((mine.codec, of.codec) for of, mine in found.items())]:
        if mine.name != stored.name:
            raise UsageError(f"table {table.name!r} has {stored.name} in the store, where the program has {mine.name}")
    if not found:
        return
    async for row in snap.scan(there, columns=list(found), limit=limit):
        data = {mine: of.codec.encode(row[of]) for of, mine in found.items() if row[of] is not None}
        values = {mine: mine.codec.decode(each) for mine, each in data.items()}
        yield SourceRow(table, table.key.decode(there.row(row.key)), values)


def _read_file(file: Path, views: Views, sampler: Sampler) -> None:
    sources = {table.name: columns for table, columns in views.sources.items()}
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = _row(views, sources, jsons.loads(line))
                    except (UsageError, ValueError, TypeError, AttributeError) as error:
                        raise UsageError(f"{file}, line {number}: {error}") from None
                    if row is not None:
                        sampler.add(row)
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None


def _row(views: Views, sources: dict[str, Any], line: dict[str, Any]) -> SourceRow | None:
    """The row of a line; None if it has no values that views read."""
    name = line.get("table", next(iter(sources)) if len(sources) == 1 else None)
    if name not in sources:
        raise UsageError(f'"table" is {name!r}; the views read {", ".join(sorted(sources))}')
    table = views.schema.tables[name]
    values = {
        column: from_plain(column.codec, line["values"][column.name])
        for column in sources[name]
        if line["values"].get(column.name) is not None
    }
    return SourceRow(table, from_plain(table.key, line["key"]), values) if values else None


def _must_have(batch: str) -> None:
    """Raises: UsageError for a batch that there is not, or not here."""
    if batch not in ("python", "spark"):
        raise UsageError(f'--batch is "python" or "spark", not {batch!r}')
    if batch == "spark" and importlib.util.find_spec("pyspark") is None:
        raise UsageError("--batch spark needs PySpark, and Java 17: pip install 'perco[spark]'")


@contextmanager
def _making(asked: Asked, folder: Path) -> Iterator[Making]:
    """The maker of the batch that the options name."""
    if asked.batch == "python":
        yield Batch
        return
    on_spark = importlib.import_module("perco.crossover.on_spark")
    with on_spark.session(folder) as spark:
        yield partial(on_spark.SparkBatch, spark, asked.program)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the log of runs that fail: the error of the first one is told at the end."""
    log = logging.getLogger("perco.observer")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


@contextmanager
def _progress() -> Iterator[Callable[[str], object]]:
    """On a terminal, says on stderr what is done."""
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("reading", total=None)
        yield lambda what: bar.update(task, description=what)


def register(app: typer.Typer) -> None:
    """Add the command to the app."""
    app.command()(crossover)
