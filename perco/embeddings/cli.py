"""The commands `perco embeddings ...`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import trio
import typer
from rich.console import Console
from rich.markup import escape

import perco
from perco.cli import working
from perco.cli.screen import FINE, FOUND, GOES_ON, complain, counted, perform, perform_or, show_json
from perco.embeddings import hashed
from perco.embeddings.index import Embed, EmbeddingIndex
from perco.errors import UsageError
from perco.sources import Folder, Synced

_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_WIDTH = 300  # of a passage, in characters

embeddings: typer.Typer = typer.Typer(
    name="embeddings", no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS
)

Index = Annotated[Path, typer.Argument(metavar="INDEX", help="The index's folder.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--embed", metavar="MODULE:FUNCTION", help="A model: list[str] -> vectors. By default, words are hashed."
    ),
]
Version = Annotated[
    int, typer.Option("--embed-version", min=1, metavar="N", help="Raise it if the model gives other vectors.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@embeddings.callback()
def _embeddings() -> None:
    """Index a folder of texts by their meaning, keep the index up to date, and search it.

    \b
    Examples:
      perco embeddings index notes/ notes-index/ --watch
      perco embeddings search notes-index/ when do we ship
    """


@embeddings.command()
def index(
    notes: Annotated[Path, typer.Argument(metavar="NOTES", help="A folder of texts.")],
    index: Index,
    match: Annotated[
        list[str] | None, typer.Option("--match", metavar="PATTERN", help="Files to take; by default *.md and *.txt.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Go on, and follow the folder.")] = False,
    embed: Model = None,
    version: Version = 1,
    json: Json = False,
) -> None:
    """Bring an index up to date with a folder: files that are new, changed, renamed or gone.

    Only paragraphs that are new are embedded, and each only once, wherever it stands. The command can be interrupted
    or killed at any moment; started again, it continues. `perco embeddings search` works meanwhile.

    \b
    Examples:
      perco embeddings index notes/ notes-index/
      perco embeddings index notes/ notes-index/ --watch
      perco embeddings index src/ code-index/ --match '*.py' --embed models:encode
    """
    found = EmbeddingIndex(index, embed=_model(embed), version=version)
    source = Folder(notes, found.text, match=match or ["*.md", "*.txt"])
    perform_or(GOES_ON, _index, found, source, watch, json=json)


@embeddings.command()
def search(
    index: Index,
    question: Annotated[list[str], typer.Argument(metavar="QUESTION...", help="What to look for.")],
    k: Annotated[int, typer.Option("--hits", "-k", min=1, metavar="N", help="Show the N nearest passages.")] = 3,
    embed: Model = None,
    json: Json = False,
) -> None:
    """Show the passages that are nearest to a question. The exit code is 1 if there are none.

    \b
    Examples:
      perco embeddings search notes-index/ when do we ship
      perco embeddings search notes-index/ 'retry after a timeout' -k 10 --json
    """
    perform(_search, EmbeddingIndex(index, embed=_model(embed)), " ".join(question), k, json=json)


def _model(what: str | None) -> Embed:
    if what is None:
        return hashed.embed
    found: Any = working.declared(what, "MODULE:FUNCTION, such as models:encode for `encode` in models.py")
    if not callable(found):
        raise UsageError(f"{what} is {type(found).__name__}, and no function")
    return found  # type: ignore[no-any-return]


async def _index(index: EmbeddingIndex, source: Folder[str], watch: bool, *, json: bool) -> int:
    console = Console(highlight=False)
    async with perco.open(index.store, index.schema) as db, db.worker():
        began = time.monotonic()

        def tell(synced: Synced, embedded: int) -> None:
            if json:
                numbers = {"added": synced.added, "changed": synced.changed, "removed": synced.removed}
                left_out = [{"file": each.key, "reason": each.reason} for each in synced.skipped]
                show_json({**numbers, "same": synced.same, "embedded": embedded, "skipped": left_out})
                return
            console.print(
                f"{counted(synced.added, 'file')} new, {synced.changed} changed, {synced.removed} gone, {synced.same} "
                f"as before; {counted(embedded, 'chunk')} embedded in {time.monotonic() - began:.1f} s"
            )
            for each in synced.skipped:
                console.print(f"  left out {each.key}: {each.reason}", markup=False)

        synced = await source.sync(db)
        failed = await db.wait_idle()
        tell(synced, index.embedded)
        while watch:
            await trio.sleep(source.options.interval_s)
            began, before = time.monotonic(), index.embedded
            synced = await source.sync(db)
            if synced.anything:
                failed = await db.wait_idle()
                tell(synced, index.embedded - before)
    if failed:
        complain(f"{counted(failed, 'change')} on the failed list; to see them: perco failed list {index.store}")
    return FOUND if failed else FINE


async def _search(index: EmbeddingIndex, question: str, k: int, *, json: bool) -> int:
    found = await index.search(question, k)
    if json:
        show_json([each._asdict() for each in found])
        return FINE if found else FOUND
    console = Console(highlight=False)
    for each in found:
        where = f"{each.text}: {each.headings}" if each.headings else each.text
        console.print(f"[bold]{each.likeness:.2f}  {escape(where)}[/bold]")
        words = " ".join(each.words.split())
        console.print(f"      {words[:_WIDTH]}{'...' if len(words) > _WIDTH else ''}", markup=False)
    if not found:
        console.print("nothing is indexed")
    return FINE if found else FOUND
