"""Shows the stages of a running web index: on a terminal as a table that is redrawn, in a pipe as occasional lines."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from perco.webindex.search import Hit

_LINE_EVERY_S = 2.0


class _Console(Console):
    """A console that raises BrokenPipeError, which nurseries and the command line handle, when its reader goes away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


console: Console = _Console(highlight=False, soft_wrap=not sys.stdout.isatty())


def stages_table(progress: dict[str, Any], title: str = "") -> Table:
    """A table with the counts of every stage: of the crawl, the load, each observer, and the search index."""
    load, stages = progress["load"], progress["stages"]
    table = Table(box=None, pad_edge=False, header_style="bold", title=title or None, title_justify="left")
    table.add_column("stage")
    for name in ("in", "out", "waiting", "conflicts", "collapsed", "failed"):
        table.add_column(name, justify="right")
    loaded = load["changed"] + load["unchanged"]
    table.add_row("crawl", "", str(load["crawled"]), "", "", "", str(load["skipped"]))
    table.add_row("load", str(load["crawled"]), str(loaded), str(max(load["crawled"] - loaded, 0)), "", "", "")
    for id, stage in stages.items():
        done = stage["commits"] + stage["collapsed"]
        table.add_row(
            id,
            str(done + stage["waiting"]),
            str(stage["commits"]),
            str(stage["waiting"]),
            str(stage["conflicts"]),
            str(stage["collapsed"]),
            str(stage["failures"]),
        )
    table.add_row("searchable", "", str(progress["searchable"]), "", "", "", "")
    return table


def one_line(progress: dict[str, Any]) -> str:
    """The stages in one line."""
    load, stages = progress["load"], progress["stages"]
    waiting = sum(stage["waiting"] for stage in stages.values())
    conflicts = sum(stage["conflicts"] for stage in stages.values())
    runs = sum(stage["commits"] for stage in stages.values())
    return (
        f"{progress['seconds']:6.1f} s  crawled {load['crawled']}, loaded {load['changed'] + load['unchanged']}, "
        f"observer runs {runs}, waiting {waiting}, conflicts {conflicts}, searchable {progress['searchable']}"
    )


_NAMED_MAX = 3


def others(urls: Sequence[str]) -> str:
    """The first few URLs, and how many more there are."""
    more = len(urls) - _NAMED_MAX
    return ", ".join(urls[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


def linked_by(anchors: Sequence[tuple[str, str]]) -> str:
    """The pages that link to a document, and the texts of their links; one page for each text."""
    first: dict[str, str] = {}
    for source, text in anchors:
        first.setdefault(text, source)
    named = list(first.items())[:_NAMED_MAX]
    more = len(anchors) - len(named)
    said = ", ".join(f'{source} "{text}"' if text else source for text, source in named)
    return said + (f" and {more} more" if more > 0 else "")


def about(hit: Hit) -> list[str]:
    """Lines about a document: its rank, its duplicates, and the links to any of its pages, with their texts."""
    lines = [f"rank {hit.rank:.3g}"]
    if hit.duplicates:
        lines[0] += f", also at {others(hit.duplicates)}"
    if hit.anchors:
        lines.append(f"linked to by {linked_by(hit.anchors)}")
    return lines


class Stages:
    """Shows the stages: `with Stages() as stages: stages.show(progress)`."""

    def __init__(self) -> None:
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._told = 0.0
        self._idle = ""  # the line that was printed last, without the time; empty if changes waited then
        self._untold: dict[str, Any] | None = None

    def __enter__(self) -> Stages:
        if self._live is not None:
            self._live.start()
        return self

    def show(self, progress: dict[str, Any]) -> None:
        if self._live is not None:
            self._live.update(stages_table(progress))
        elif (said := one_line(progress | {"seconds": 0.0})) == self._idle:
            self._untold = None  # nothing has changed: in `perco web run`, this may last for hours
        elif time.monotonic() - self._told >= _LINE_EVERY_S:
            self._told, self._untold = time.monotonic(), None
            self._idle = "" if any(stage["waiting"] for stage in progress["stages"].values()) else said
            console.print(one_line(progress))
        else:
            self._untold = progress

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._untold is not None:  # the last state is always printed
            console.print(one_line(self._untold))
