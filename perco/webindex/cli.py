"""The commands `perco web ...` and `perco demo`."""

from __future__ import annotations

import json as jsons
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import trio
import typer

import perco
from perco.cli.numbers import App
from perco.cli.screen import FINE, FOUND, GOES_ON, called, complain, perform, perform_or, show_json
from perco.cli.values import parse_moment
from perco.embeddings import demo as embeddings_demo
from perco.webindex import demo as demos
from perco.webindex.crawl import problem_with
from perco.webindex.crawled import CrawlError
from perco.webindex.index import WebIndex
from perco.webindex.places import IN_FOLDER, looking, rows_of, search_path
from perco.webindex.screen import Stages, about, console
from perco.webindex.search import EmptyQueryError, Hit, SearchIndex, SearchIndexError
from perco.webindex.service import Service, serve

_LOOK_EVERY_S = 0.5

web: typer.Typer = App(
    name="web",
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A search index over web pages, kept up to date by observers.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

NewStore = Annotated[str, typer.Argument(metavar="STORE", help="The index's folder; made if there is none.")]
Store = Annotated[str, typer.Argument(metavar="STORE", help="The index's folder; perco web load makes one.")]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows", metavar="ADDRESS", help="Where the rows are: postgresql://..., bigtable://..., or a served store."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON lines.")]
Mine = Annotated[
    list[str] | None,
    typer.Option("--mine", metavar="PACKAGE", help="Load an installed package's documentation; repeatable."),
]
Html = Annotated[
    Path | None, typer.Option("--html", metavar="DIR", help="Load the saved pages in a folder and its subfolders.")
]
Warc = Annotated[list[Path] | None, typer.Option("--warc", metavar="FILE", help="Load a web archive; repeatable.")]
Synthetic = Annotated[
    int | None,
    typer.Option("--synthetic", min=1, metavar="N", help="Make N pages, with links and duplicates as on the web."),
]
Seed = Annotated[int, typer.Option("--seed", min=0, metavar="N", help="The seed of the synthetic pages.")]
Limit = Annotated[int | None, typer.Option("--limit", min=0, metavar="N", help="At most this many pages.")]


def register(app: typer.Typer) -> None:
    """Add `perco web` and `perco demo` to the command line."""
    app.add_typer(web)
    app.command("demo")(demo)


def demo(
    folder: Annotated[Path, typer.Option("--dir", metavar="DIR", help="The folder for the demo.")] = Path("perco-demo"),
    limit: Annotated[int | None, typer.Option("--limit", min=200, metavar="N", help="Stop after N pages.")] = None,
    spark: Annotated[bool, typer.Option("--spark", help="Load through Spark, and compare with one process.")] = False,
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Index and search a folder of notes by meaning, instead of web pages.")
    ] = False,
) -> None:
    """Index pages, kill the process half-way, continue, search.

    Indexes your Python's documentation, in a minute or two. It writes only to DIR. The next demo replaces the stores
    that demos make in DIR, and leaves everything else there alone.

    \b
    Examples:
      perco demo
      perco demo --dir /tmp/demo --limit 500
      perco demo --spark
      perco demo --embeddings
    """
    if embeddings:
        perform_or("interrupted; the next run starts from scratch", _embeddings_demo, folder)
    if spark:
        perform_or("interrupted; the next run starts from scratch", _spark_demo, folder, limit)
    perform_or("interrupted; the next run starts from scratch", demos.run, folder, limit)


@web.command()
def load(
    store: NewStore,
    mine: Mine = None,
    stdlib: Annotated[
        bool, typer.Option("--stdlib", help="Load the standard library as well as other sources.")
    ] = False,
    html: Html = None,
    warc: Warc = None,
    synthetic: Synthetic = None,
    seed: Seed = 0,
    limit: Limit = None,
    spark: Annotated[bool, typer.Option("--spark", help="Load with Spark tasks; needs perco[spark] and Java.")] = False,
    master: Annotated[
        str, typer.Option("--master", metavar="URL", help="Spark's master: local[n], spark://...")
    ] = "local[*]",
    rows: Rows = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Let this folder's search index replace the one in another folder.")
    ] = False,
    json: Json = False,
) -> None:
    """Crawl pages into a store until all are searchable.

    Without a source, it loads the documentation of the running Python's standard library, and removes stored pages of
    documentation that this crawl does not find. With --spark, each source is crawled by a Spark task of its own,
    and other tasks load the pages and run the observers.

    With --rows, the rows go to a database or to a served store. The folder then holds the search index, and records
    where the rows are; the other commands take only the folder. To share the work, start `perco web run` in further
    processes.

    \b
    Examples:
      perco web load docs/
      perco web load docs/ --mine trio --mine rich
      perco web load pages/ --html saved/ --warc crawl.warc.gz
      perco web load made-up/ --synthetic 10000
      perco web load pages/ --warc a.warc.gz --warc b.warc.gz --spark
      perco web load docs/ --rows 'postgresql:///postgres?prefix=docs'
    """
    if rows is not None and spark:
        raise typer.BadParameter("--spark loads into a folder; leave out --rows")
    sources = [option for name in mine or () for option in ("--mine", name)]
    sources += ["--stdlib"] if stdlib else []
    sources += ["--html", str(html.absolute())] if html else []
    sources += [option for file in warc or () for option in ("--warc", str(file.absolute()))]
    sources += ["--synthetic", str(synthetic), "--seed", str(seed)] if synthetic is not None else []
    sources += ["--limit", str(limit)] if limit is not None else []
    if spark:
        perform_or(GOES_ON, _load_on_spark, Path(store), sources, master, json=json)
    perform_or(GOES_ON, _load, Path(store), sources, rows, take_over, json=json)


@web.command()
def recrawl(store: Store, json: Json = False) -> None:
    """Crawl the sources of the last load again.

    Only pages that have changed are indexed again.

    \b
    Example:
      perco web recrawl docs/
    """
    perform_or(GOES_ON, _load, Path(store), None, None, False, json=json)


@web.command()
def rank(store: Store, json: Json = False) -> None:
    """Rank all pages by their links (PageRank).

    Of the pages with the same content, the one with the highest rank becomes the canonical page. The command reads
    all links, so run it only now and then. It keeps a stored rank if the new rank differs by a hundredth or less.

    \b
    Example:
      perco web rank docs/
    """
    perform_or(GOES_ON, _rank, Path(store), json=json)


@web.command()
def run(store: Store, json: Json = False) -> None:
    """Run the observers of a store until interrupted.

    They index the changes that wait, and further changes as they are committed.

    \b
    Example:
      perco web run docs/
    """
    perform(_run, Path(store), json=json)


@web.command()
def search(
    store: Store,
    words: Annotated[list[str], typer.Argument(metavar="WORD", help="A word to find; all of them must occur.")],
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, metavar="N", help="At most this many hits.")] = 10,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TIME", help="As of TIME: 90s, 5m, 2h (ago), or 2026-03-01T12:00.")
    ] = None,
    json: Json = False,
) -> None:
    """Search the index, even during a load.

    Of pages with the same content, it shows the canonical page. It lists the others as duplicates, and shows the texts
    of links to any of them. The best hits come first; words and rank both count. With --at, it builds the index of
    that moment from the store's history, and searches it.

    \b
    Examples:
      perco web search docs/ asyncio future
      perco web search docs/ asyncio future --at 1m
    """
    perform(_search, Path(store), " ".join(words), limit, at, json=json)


@web.command()
def stats(store: Store, json: Json = False) -> None:
    """Count pages, documents, links, and waiting changes.

    \b
    Example:
      perco web stats docs/ --json
    """
    perform(_stats, Path(store), json=json)


# ---------------------------------------------------------------- what the commands do


async def _spark_demo(folder: Path, limit: int | None) -> int:
    on_spark = _spark()
    demos.fresh(folder)
    return FINE if await on_spark.both(folder, limit, demos.say) else FOUND


async def _embeddings_demo(folder: Path) -> int:
    demos.fresh(folder)
    return await embeddings_demo.run(folder)


async def _load(store: Path, sources: list[str] | None, rows: str | None, take_over: bool, *, json: bool) -> int:
    problem = _no_index(store) if sources is None else problem_with(sources) or _foreign(store)
    if problem is not None:
        complain(problem)
        return FOUND
    try:
        async with serve(store, rows=rows or "", take_over=take_over, on_fill=_filling(json)) as service:
            if sources is None:
                sources = await service.last_sources()
            with Stages() if not json else _JsonStages() as stages:
                await _until_searchable(service, sources, stages)
            if not json:
                if service.loaded.skipped:
                    console.print(f"{service.loaded.skipped} skipped; the last: {_plain(service.loaded.last_skip)}")
                console.print(f"search it: {called()} web search {store} WORDS")
    except (CrawlError, SearchIndexError) as error:
        complain(str(error))
        return FOUND
    return FINE


async def _load_on_spark(store: Path, sources: list[str], master: str, *, json: bool) -> int:
    problem = problem_with(sources) or _foreign(store)
    if problem is None and (rows := rows_of(store)).home != IN_FOLDER:
        problem = f"{store} has its rows at {rows.shown}, and --spark loads into a folder; name another folder"
    if problem is not None:
        complain(problem)
        return FOUND
    on_spark = _spark()
    on_spark.split(sources)
    session = await trio.to_thread.run_sync(on_spark.session, master)
    try:
        with on_spark.perco.spark.serve(store, session) as served:
            async with serve(store) as service:
                with Stages() if not json else _JsonStages() as stages:

                    async def work() -> None:
                        await on_spark.load(service, session, served, sources)
                        await service.db.wait_idle()

                    await _shown(service, stages, work)
    except SearchIndexError as error:
        complain(str(error))
        return FOUND
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(session.stop)
    if not json:
        console.print(f"search it: {called()} web search {store} WORDS")
    return FINE


def _spark() -> Any:
    """Import and return the module that needs Spark. Raises: UsageError."""
    try:
        from perco.webindex import on_spark
    except ModuleNotFoundError as error:
        needs = "pip install '.[spark]' in perco's checkout (some 500 MB), and Java 17 or newer"
        raise perco.UsageError(f"{error.name} is not installed: --spark needs {needs}") from error
    return on_spark


async def _until_searchable(service: Service, sources: list[str], stages: Any) -> None:
    """Load, then wait for the observers. Raises: CrawlError, never inside an exception group."""
    failed: list[CrawlError] = []

    async def work() -> None:
        try:
            await service.load(sources)
        except* CrawlError as group:
            failed.append(_first(group))
        if service.loaded.crawled:
            await service.remember_sources(sources)
        await service.db.wait_idle()

    await _shown(service, stages, work)
    if failed:
        raise failed[0]


async def _shown(service: Service, stages: Any, work: Callable[[], Awaitable[None]]) -> None:
    """Show the stages until the work is done, and once more at the end."""

    async def until_done() -> None:
        await work()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(until_done)
        while True:
            stages.show(asdict(await service.progress()))
            await trio.sleep(_LOOK_EVERY_S)
    stages.show(asdict(await service.progress()))


def _filling(json: bool) -> Callable[[int], None]:
    """A function that prints how far a search index has been filled from the rows; with `json`, it prints nothing."""
    if json:
        return lambda documents: None
    return lambda documents: console.print(f"the search index is filled: {documents} documents", style="dim")


def _first(group: BaseExceptionGroup[CrawlError]) -> CrawlError:
    found = group.exceptions[0]
    return _first(found) if isinstance(found, BaseExceptionGroup) else found


class _JsonStages:
    """The stages as JSON lines."""

    def __enter__(self) -> _JsonStages:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def show(self, progress: dict[str, Any]) -> None:
        print(jsons.dumps(progress), flush=True)


def _foreign(store: Path) -> str | None:
    tables = {tablet.name.rpartition("-")[0] for tablet in store.glob("tablets/*-*") if not tablet.name.startswith("_")}
    if not tables or {"crawls", "dups"} <= tables:
        return None
    if "crawls" in tables:
        return f"{store} was made by an earlier version of perco, which found no duplicates; name another folder"
    return f"{store} is the store of another program; name another folder for a search index"


def _no_index(store: Path) -> str | None:
    if search_path(store).exists() or (store / "tablets").exists() or rows_of(store).home != IN_FOLDER:
        return _foreign(store)
    return f"there is no search index in {store}; make one with: {called()} web load {store}"


async def _rank(store: Path, *, json: bool) -> int:
    if (problem := _no_index(store)) is not None:
        complain(problem)
        return FOUND
    from perco.webindex.rank import Ranked, rank_all  # numpy is slow to import, and no other command needs it

    async with serve(store, on_fill=_filling(json)) as service:
        with Stages() if not json else _JsonStages() as stages:
            found: list[Ranked] = []

            async def work() -> None:
                found.append(await rank_all(service.db, service.index))
                await service.db.wait_idle()

            await _shown(service, stages, work)
    if json:
        show_json(asdict(found[0]))
    else:
        console.print(
            f"{found[0].pages} pages, {found[0].links} links between them: {found[0].changed} ranks were rewritten"
        )
    return FINE


async def _run(store: Path, *, json: bool) -> int:
    if (problem := _no_index(store)) is not None:
        complain(problem)
        return FOUND
    async with serve(store, on_fill=_filling(json)) as service:
        with (
            Stages() if not json else _JsonStages() as stages,
            trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals,
        ):
            async with trio.open_nursery() as nursery:

                async def stop() -> None:
                    async for _ in signals:
                        nursery.cancel_scope.cancel()
                        return

                nursery.start_soon(stop)
                while True:
                    stages.show(asdict(await service.progress()))
                    await trio.sleep(_LOOK_EVERY_S)
    return FINE


async def _search(store: Path, query: str, limit: int, at: str | None, *, json: bool) -> int:
    began = time.perf_counter()
    try:
        when = None if at is None else parse_moment(at)
        if (problem := _no_index(store)) is not None:
            complain(problem)
            return FOUND
        if when is None:
            if not search_path(store).exists():  # a folder made by perco copy has only rows
                complain(f"{store} has rows, but no search index yet; to make one: {called()} web run {store}")
                return FOUND
            with SearchIndex(search_path(store)) as index:
                hits = index.search(query, limit)
                if not index.is_full(rows_of(store).home):
                    complain(f"the search index is incomplete; to complete it: {called()} web run {store}")
        else:
            hits = await search_at(store, query, limit, when)
    except (EmptyQueryError, SearchIndexError) as error:
        complain(str(error))
        return 2
    if json:
        for hit in hits:
            show_json(asdict(hit))
    else:
        show_hits(hits, time.perf_counter() - began)
    return FINE if hits else FOUND


async def search_at(store: Path, query: str, limit: int, when: datetime) -> list[Hit]:
    """Search the documents as they were at a past moment: index a snapshot of the store in memory, and search that."""
    index = WebIndex()
    async with looking(store, index.schema) as db, db.snapshot(at=when) as snap:
        documents = await index.documents(snap)
    with SearchIndex.in_memory(documents) as past:
        return past.search(query, limit)


def show_hits(hits: list[Hit], seconds: float) -> None:
    for hit in hits:
        console.print(f"[bold]{_plain(hit.title)}[/bold]  {_plain(hit.url)}")
        console.print(f"    {_plain(hit.snippet)}", style="dim")
        for line in about(hit):
            console.print(f"    {_plain(line)}", style="dim")
    console.print(f"{len(hits)} hit{'' if len(hits) == 1 else 's'} in {seconds * 1000:.0f} ms")


def _plain(text: str) -> str:
    return text.replace("[", "\\[")


async def _stats(store: Path, *, json: bool) -> int:
    if (problem := _no_index(store)) is not None:
        complain(problem)
        return FOUND
    index = WebIndex()
    async with looking(store, index.schema) as db:
        counts = {}
        async with db.snapshot() as snap:
            for name, table, column in (
                ("pages", index.pages, index.contents),
                ("documents", index.dups, index.listing),
                ("links", index.links, index.anchor),
            ):
                counts[name] = await _count(snap, table, column)
        waiting = await db.waiting()
    path = search_path(store)
    searchable = 0
    if path.exists():
        with SearchIndex(path) as search:
            searchable = search.count()
    found = {**counts, "searchable": searchable, "waiting": waiting}
    if json:
        show_json(found)
    else:
        for name, value in {**counts, "searchable": searchable}.items():
            console.print(f"{name:<12}{value}")
        for id, count in waiting.items():
            console.print(f"{'waiting':<12}{count} for {id}")
    return FINE


async def _count(snap: perco.Snapshot, table: Any, column: Any) -> int:
    count = 0
    async for _ in snap.scan(table, columns=[column]):
        count += 1
    return count
