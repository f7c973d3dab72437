"""`perco top`: how far observers lag behind, again and again."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from datetime import datetime
from itertools import repeat
from math import inf
from typing import Any, Final

import trio
from rich.console import Console
from rich.live import Live
from rich.table import Table

import perco
from perco.cli.screen import FINE, show_json, show_table
from perco.errors import Unavailable
from perco.serve.client import remote_owner
from perco.serve.opening import visiting

_HEAD: Final = ("observer", "waiting", "per second", "oldest", "failing", "failed", "workers")
_NUMBERS: Final = _HEAD[1:]
_MINUTE_S, _HOUR_S, _DAY_S = 60, 3600, 86400
_SAME_COUNT_S: Final = 0.05  # two looks that are of moments as close as that show the same count

Lags = Mapping[str, perco.Lag]


class _Seen:
    """The lags as they are now, and as they were before."""

    def __init__(self, lags: Lags) -> None:
        self.lags: Lags = {}
        self._counted: dict[str, tuple[float, int]] = {}  # by observer: when the last count began, and how many waited
        self._per_s: dict[str, str] = {}
        self.see(lags)

    def see(self, lags: Lags) -> None:
        """Note the lags, and how fast the numbers change: from one count to the next."""
        self.lags, now = lags, trio.current_time()
        for id, lag in lags.items():
            at, (before_at, before) = now - lag.counted_s, self._counted.get(id, (-inf, lag.waiting))
            if at - before_at < _SAME_COUNT_S:
                continue
            self._counted[id] = at, lag.waiting
            self._per_s[id] = "" if before_at == -inf else f"{(lag.waiting - before) / (at - before_at):+.0f}"

    def rows(self) -> list[tuple[str, ...]]:
        return [(id, *self._row(id, lag)) for id, lag in self.lags.items()]

    def _row(self, id: str, lag: perco.Lag) -> tuple[str, ...]:
        per_s = self._per_s.get(id, "")
        oldest = shown_age(lag.oldest_s) if lag.waiting else ""
        return str(lag.waiting), per_s, oldest, str(lag.failing), str(lag.failed), str(lag.workers)


async def top(store: str, *, every_s: float, count: int | None, json: bool) -> int:
    """Show the lag of each observer, `count` times; None: until it is interrupted."""
    async with _asking(store) as ask:
        seen = _Seen(await ask())
        with _Screen(store) if sys.stdout.isatty() and not json and count != 1 else _Lines(json=json) as screen:
            screen.show(seen)
            for _ in range(count - 1) if count is not None else repeat(None):
                await trio.sleep(every_s)
                seen.see(await ask())
                screen.show(seen)
    return FINE


class _Lines:
    """Prints a table, or a JSON document, each time."""

    def __init__(self, *, json: bool) -> None:
        self._json = json

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, seen: _Seen) -> None:
        if self._json:
            show_json({id: asdict(lag) for id, lag in seen.lags.items()})
        else:
            show_table(_HEAD, seen.rows(), numbers=_NUMBERS)


class _Screen:
    """Draws a table on a terminal, in place of the one before."""

    def __init__(self, store: str) -> None:
        self._store = store
        self._live = Live(console=Console(markup=False, highlight=False, emoji=False), auto_refresh=False)

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(self, *how: Any) -> None:
        self._live.__exit__(*how)

    def show(self, seen: _Seen) -> None:
        title = f"{self._store}  {datetime.now():%H:%M:%S}  (Ctrl-C ends)"
        table = Table(title=title, title_justify="left", title_style="dim", box=None, header_style="bold")
        for name in _HEAD:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=name in _NUMBERS)
        for (id, *cells), lag in zip(seen.rows(), seen.lags.values(), strict=True):
            table.add_row(id, *cells, style=_style(lag))
        self._live.update(table, refresh=True)


def _style(lag: perco.Lag) -> str:
    """Red: changes were given up, or no process runs the observer; yellow: runs fail."""
    if lag.failed or (lag.waiting and not lag.workers):
        return "red"
    return "yellow" if lag.failing else ""


def shown_age(seconds: float) -> str:
    """An age in the largest fitting units: 12 s, 3 min, 5 h, 2 d."""
    for unit_s, unit in (_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min"):
        if seconds >= 2 * unit_s:
            return f"{seconds // unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


@asynccontextmanager
async def _asking(store: str) -> AsyncIterator[Callable[[], Awaitable[Lags]]]:
    """How to ask for the lags: the process that has the store open or, if there is none, its files."""
    async with AsyncExitStack() as stack:
        try:
            owner = remote_owner(await stack.enter_async_context(visiting(store)))
        except Unavailable:
            db = await stack.enter_async_context(perco.open(store, readonly=True))
            yield db.lag
        else:
            yield owner.lag
