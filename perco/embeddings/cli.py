"""The commands `perco embeddings ...`."""

from __future__ import annotations

import json as jsons
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Final

import trio
import typer
from rich.console import Console
from rich.markup import escape

import perco
from perco.cli import working
from perco.cli.numbers import App
from perco.cli.screen import FINE, FOUND, complain, counted, perform, perform_or, show_json, show_table
from perco.embeddings import hashed
from perco.embeddings.index import Embed, EmbeddingIndex
from perco.errors import StoreError, UsageError
from perco.sources import Folder, Skipped, Synced
from perco.views import check as check_views

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_WIDTH: Final = 300  # of a passage, in characters
_LEAST: Final = 0.005  # likeness: below it, a passage has nothing to do with the question
_STOPPED: Final = "stopped; all commits so far are kept, and the same command continues from there"

embeddings: typer.Typer = App(
    name="embeddings", no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS
)

Index = Annotated[Path, typer.Argument(metavar="INDEX", help="The index's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@embeddings.callback()
def _embeddings() -> None:
    """Index a folder of texts by their meaning, keep the index up to date, and search it.

    \b
    Examples:
      perco embeddings index notes/ notes-index/ --watch
      perco embeddings search notes-index/ when do we ship
    """


@embeddings.command(short_help="Index a folder, or bring its index up to date.")
def index(
    texts: Annotated[Path, typer.Argument(metavar="TEXTS", help="A folder of texts; its subfolders are taken, too.")],
    index: Index,
    match: Annotated[
        list[str] | None,
        typer.Option("--match", metavar="PATTERN", help="Take these files, instead of *.md and *.txt; repeatable."),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Keep running, and follow changes in the folder.")] = False,
    embed: Annotated[
        str | None,
        typer.Option(
            "--embed", metavar="MODULE:FUNCTION", help="A model: list[str] -> vectors. By default, words are hashed."
        ),
    ] = None,
    version: Annotated[
        int | None,
        typer.Option(
            "--embed-version", min=1, metavar="N", help="Raise this when you change the model: all is embedded again."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Bring an index up to date with a folder: files that are new, changed, renamed or gone.

    Only paragraphs that are new are embedded, and each only once, wherever it stands. The command can be interrupted
    or killed at any moment; started again, it continues. `perco embeddings search` works meanwhile. The index
    remembers its model, so later commands need not name it.

    \b
    Examples:
      perco embeddings index notes/ notes-index/
      perco embeddings index notes/ notes-index/ --watch
      perco embeddings index src/ code-index/ --match '*.py' --embed models:encode
    """
    perform_or(_STOPPED, _index, texts, index, match or ["*.md", "*.txt"], watch, embed, version, json=json)


@embeddings.command(short_help="Show the passages nearest to a question.")
def search(
    index: Index,
    question: Annotated[list[str], typer.Argument(metavar="QUESTION...", help="What to look for.")],
    k: Annotated[int, typer.Option("--hits", "-k", min=1, metavar="N", help="Show the N nearest passages.")] = 3,
    json: Json = False,
) -> None:
    """Show the passages that are nearest to a question. The exit code is 1 if nothing is like it.

    \b
    Examples:
      perco embeddings search notes-index/ when do we ship
      perco embeddings search notes-index/ 'retry after a timeout' -k 10 --json
    """
    perform(_search, index, " ".join(question), k, json=json)


@embeddings.command(short_help="Compare an index with what its texts say.")
def check(index: Index, json: Json = False) -> None:
    """Compute all chunks again from the texts that the store has, and compare them with the index.

    Vectors that are stored are not computed again. The exit code is 1 if a row differs.

    \b
    Examples:
      perco embeddings check notes-index/
    """
    perform(_check, index, json=json)


# ------------------------------------------------------------------ the model


@dataclass(frozen=True)
class Model:
    """The model of an index. Attributes: `embed`: MODULE:FUNCTION, or "" for hashed words; `version`."""

    embed: str = ""
    version: int = 1

    @staticmethod
    def of(index: Path) -> Model | None:
        """The model that an index remembers; None: there is no index. Raises: StoreError."""
        path = index / "model.json"
        try:
            return Model(**jsons.loads(path.read_text())) if path.exists() else None
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{path} cannot be read: {error}") from error

    def keep(self, index: Path) -> None:
        """Remember it."""
        index.mkdir(parents=True, exist_ok=True)
        (index / "model.json").write_text(jsons.dumps(asdict(self)) + "\n")

    def load(self) -> Embed:
        """The function. Raises: UsageError."""
        if not self.embed:
            return hashed.embed
        found: Any = working.declared(self.embed, "MODULE:FUNCTION, such as models:encode for `encode` in models.py")
        if not callable(found):
            raise UsageError(f"{self.embed} is {type(found).__name__}, and no function")
        return found  # type: ignore[no-any-return]


def _chosen(index: Path, embed: str | None, version: int | None) -> Model:
    """The model for an index. Raises: UsageError for another one than it was made with, in the same version."""
    known = Model.of(index)
    if known is None:
        return Model(embed or "", version or 1)
    new = replace(known, embed=known.embed if embed is None else embed, version=version or known.version)
    if new.version < known.version:
        raise UsageError(f"{index} has version {known.version} of its model: leave out --embed-version, or raise it")
    if new.embed != known.embed and new.version == known.version:
        was = f"--embed {known.embed}" if known.embed else "hashed words"
        raise UsageError(
            f"{index} was made with {was}. To embed all of it again with another model, add --embed-version "
            f"{known.version + 1}"
        )
    return new


async def _tried(embed: Embed, name: str) -> None:
    """Raises: UsageError if a model cannot embed a text."""
    try:
        found = list(await trio.to_thread.run_sync(embed, ["a text"]))
    except Exception as error:
        raise UsageError(f"the model {name} failed for a first text: {type(error).__name__}: {error}") from error
    if len(found) != 1:
        raise UsageError(f"the model {name} returned {len(found)} vectors for one text")


# ------------------------------------------------------------------ what the commands do


async def _index(
    texts: Path,
    at: Path,
    match: list[str],
    watch: bool,
    embed: str | None,
    version: int | None,
    *,
    json: bool,
) -> int:
    if not texts.is_dir():  # noqa: ASYNC240
        raise UsageError(f"{str(texts)!r} is not a folder; nothing was indexed")
    model = _chosen(at, embed, version)
    function = model.load()
    if model.embed:
        await _tried(function, model.embed)
    model.keep(at)
    index = EmbeddingIndex(at, embed=function, version=model.version)
    source, told = Folder(texts, index.text, match=match), _Told(json=json)
    async with perco.open(index.store, index.schema) as db, db.worker():
        await db.replay_failed()  # the model may work again
        with told.progress(index):
            synced = await source.sync(db)
            failed = await db.wait_idle()
        told.passed(synced, index.embedded)
        told.watching(watch, texts)
        while watch:
            await trio.sleep(source.options.interval_s)
            before = index.embedded
            told.began = time.monotonic()
            synced = await source.sync(db)
            if synced.anything or told.news(synced.skipped):
                failed = await db.wait_idle()
                told.passed(synced, index.embedded - before)
    if failed:
        complain(
            f"{counted(failed, 'text')} could not be indexed; to see why: perco failed list {index.store}. The next "
            "`perco embeddings index` tries again"
        )
    return FOUND if failed else FINE


class _Told:
    """What `index` prints."""

    def __init__(self, *, json: bool) -> None:
        self._json, self._console = json, Console(highlight=False)
        self._left_out: set[Skipped] = set()
        self.began = time.monotonic()

    @contextmanager
    def progress(self, index: EmbeddingIndex) -> Iterator[None]:
        """Show how many chunks have been embedded, on a terminal."""
        if self._json or not self._console.is_terminal:
            yield
            return

        class Line:
            def __rich__(self) -> str:
                return f"{index.embedded:,} chunks embedded"

        with self._console.status(Line()):  # it is drawn again and again
            yield

    def news(self, skipped: list[Skipped]) -> list[Skipped]:
        """Those that have not been told yet."""
        return [each for each in skipped if each not in self._left_out]

    def passed(self, synced: Synced, embedded: int) -> None:
        """A pass over the folder has ended."""
        if self._json:
            numbers = {"added": synced.added, "changed": synced.changed, "removed": synced.removed}
            left_out = [{"file": each.key, "reason": each.reason} for each in synced.skipped]
            show_json({**numbers, "same": synced.same, "embedded": embedded, "skipped": left_out})
            return
        parts = [("new", synced.added), ("changed", synced.changed), ("gone", synced.removed)]
        found = ", ".join(f"{count:,} {what}" for what, count in parts if count)
        if not found:
            found = "nothing has changed"
        files = counted(synced.added + synced.changed + synced.same, "file")
        took = time.monotonic() - self.began
        self._console.print(f"{files}: {found}; {counted(embedded, 'chunk')} embedded in {took:.1f} s")
        for each in self.news(synced.skipped):
            self._console.print(f"  left out {each.key}: {each.reason}", markup=False)
        self._left_out = set(synced.skipped)

    def watching(self, watch: bool, texts: Path) -> None:
        if watch and not self._json:
            self._console.print(f"watching {texts} (Ctrl-C to stop)", markup=False)


async def _search(at: Path, question: str, k: int, *, json: bool) -> int:
    model = Model.of(at) or Model()
    index = EmbeddingIndex(at, embed=model.load(), version=model.version)
    found = [each for each in await index.search(question, k) if each.likeness > _LEAST]
    if json:
        show_json([each._asdict() for each in found])
        return FINE if found else FOUND
    console = Console(highlight=False)
    for each in found:
        where = f"{each.name}: {each.headings}" if each.headings else each.name
        console.print(f"[bold]{each.likeness:.2f}  {escape(where)}[/bold]")
        words = " ".join(each.words.split())
        words = f"{words[:_WIDTH]}..." if len(words) > _WIDTH else words
        indent = " " * 6
        text = fill(words, max(console.width, 40), initial_indent=indent, subsequent_indent=indent)
        console.print(text, markup=False, soft_wrap=True)
    if not found:
        console.print("nothing in the index is like this")
    return FINE if found else FOUND


async def _check(at: Path, *, json: bool) -> int:
    model = Model.of(at)
    if model is None:
        raise StoreError(f"there is no index in {at}")
    index = EmbeddingIndex(at, embed=model.load(), version=model.version)
    async with perco.open(index.store, index.schema, readonly=True) as db, db.snapshot() as snap:
        checked = await check_views(index.views, snap)
    if json:
        show_json({"equal": checked.equal, "rows": checked.rows, "digests": checked.digests, "count": checked.count})
        return FINE if checked.equal else FOUND
    show_table(("view", "rows", "digest"), [(id, rows, checked.digests[id]) for id, rows in checked.rows.items()])
    print("equal" if checked.equal else f"{counted(checked.count, 'row')} differ")
    return FINE if checked.equal else FOUND
