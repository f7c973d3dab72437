"""Random graphs of views in processes that are killed: `python -m tests.integration.killed.viewing --seeds 20`.

Each seed is a graph and a history. Processes write the sources, and run the observers of the views. Each process is
killed with SIGKILL at a step that the seed chooses. The next process has the same program, one with a new version of
some views, or one without a view, which it drops first. In the end, the tables of the views are what the batch build
makes of the sources (V7), and those of a dropped view are empty (V15).

    lmdb      one process after the other owns the folder, and dies right before or after the commit of its n-th batch
    served    a process owns the folder, and serves two clients at a time. One of them kills itself or the owner, right
              before or after its n-th commit. Some owners have tablet servers
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any, Final

import trio

import perco
from perco import views
from perco.serve.opening import open as opening
from perco.serve.placing import ProcessOptions
from perco.storage import LmdbEngine, LmdbTablet
from perco.txn.driver import Driver
from tests.support.graphs import Graph, State, write

LIVES: Final = 3  # with each version
VERSIONS: Final = 2
_WRITES: Final = 8
_STEPS: Final = 40  # a process dies within so many, or not at all
_HANGS_S: Final = 120
_IDLE_S: Final = 60
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([__name__])


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One process.

    Attributes:
        address: of the folder, or of its owner's socket.
        number: decides what the process writes.
        drop: the view that it drops, in place of writing.
        kill_at, made: before which of its steps it kills, or after it; -1: it does not.
        victim: the process that it kills; 0: itself.
    """

    address: str
    seed: int
    version: int
    without: tuple[str, ...] = ()
    number: int = 0
    drop: str = ""
    kill_at: int = -1
    made: bool = False
    victim: int = 0


def options(number: int) -> perco.Options:
    return perco.Options(durability="process", seed=number, wire=perco.options.WireOptions(patience_s=2.0))


# ------------------------------------------------------------ the processes


def _arm(life: Life) -> None:
    """Count the batches of an owner, or the commits of a client; kill at one of them."""
    served = life.address.startswith("unix:")
    counting, seen = threading.Lock(), 0

    def count() -> bool:
        nonlocal seen
        with counting:
            seen += 1
            return seen - 1 == life.kill_at

    def kill() -> None:
        os.kill(life.victim or os.getpid(), signal.SIGKILL)

    if served:
        commit = Driver.commit

        async def counted(self: Driver, *args: Any, **how: Any) -> Any:
            dies = count()
            if dies and not life.made:
                kill()
            ts = await commit(self, *args, **how)
            if dies and life.made:
                kill()
            return ts

        Driver.commit = counted  # type: ignore[method-assign]
        return
    batch = LmdbEngine.commit

    def counted_batch(self: LmdbEngine, mutations: Any, *args: Any) -> Any:
        dies = bool(mutations) and count()
        if dies and not life.made:
            kill()
        verdicts = batch(self, mutations, *args)
        if dies:
            kill()
        return verdicts

    LmdbEngine.commit = counted_batch  # type: ignore[method-assign]
    LmdbTablet._submit_natively = lambda *_: False  # type: ignore[method-assign]  # every batch comes by `commit`


def live(life: Life) -> None:
    """A process from its start to its end. It ends with 0 if it was not killed; if it has killed the owner, whatever
    the client makes of that is no error."""
    signal.alarm(_HANGS_S)
    warnings.simplefilter("ignore", perco.errors.PercoWarning)
    _arm(life)
    try:
        trio.run(_live, life)
    except* perco.PercoError:
        if not life.victim:
            raise


async def _live(life: Life) -> None:
    graph = Graph(life.seed, version=life.version, without=life.without)
    async with perco.open(life.address, graph.views.schema, options=options(life.number)) as db:
        if life.drop:
            remaining = Graph(life.seed, version=life.version, without=(*life.without, life.drop))
            await views.drop(remaining.views, db, life.drop)
            return
        rng = Random(f"{life.seed} writes {life.number}")
        async with db.worker(concurrency=4):
            for _ in range(_WRITES):
                await write(db, graph.changes(rng, State()))
            await db.wait_idle(timeout=_IDLE_S)


def own(folder: str, servers: int, ready: Connection) -> None:
    """Own a folder, and serve it, until killed."""
    signal.alarm(10 * _HANGS_S)
    trio.run(_own, folder, servers, ready)


async def _own(folder: str, servers: int, ready: Connection) -> None:
    block = opening(folder, perco.Schema(), options=options(0))
    if servers:
        block.processes = ProcessOptions(servers=servers)
    async with block:
        ready.send(True)
        await trio.sleep_forever()


# ------------------------------------------------------------ a history


class History:
    """The history of one seed, in one folder. `killed`: how many processes were killed."""

    killed: int

    def __init__(self, seed: int, folder: Path, *, served: bool) -> None:
        self._seed, self._folder, self._served = seed, folder, served
        self._rng = Random(f"{seed} {'served' if served else 'lmdb'}")
        self._owner: Any = None
        self._number = 0
        self.killed = 0

    def run(self) -> list[str]:
        """Returns the differences at the end."""
        without: tuple[str, ...] = ()
        try:
            for version in range(1, VERSIONS + 1):
                for _ in range(LIVES):
                    self._live(version, without)
                if version == 1:
                    gone = self._rng.choice(sorted(Graph(self._seed).derived))
                    self._drop(version, gone)
                    without = (gone,)
            found = trio.run(self._differences, VERSIONS, without)
        finally:
            self._end_owner()
        return found

    def _address(self) -> str:
        if not self._served:
            return str(self._folder)
        if self._owner is None or not self._owner.is_alive():
            here, there = _context.Pipe(duplex=False)
            self._owner = _context.Process(target=own, args=(str(self._folder), self._rng.choice((0, 2)), there))
            self._owner.start()
            there.close()
            assert here.recv()
        return f"unix:{self._folder / 'socket'}"

    def _end_owner(self) -> None:
        if self._owner is not None:
            self._owner.kill()
            self._owner.join()

    def _drawn(self, version: int, without: tuple[str, ...]) -> Life:
        self._number += 1
        address = self._address()
        victim = self._owner.pid if self._served and self._rng.random() < 0.5 else 0
        return Life(
            address=address,
            seed=self._seed,
            version=version,
            without=without,
            number=self._number,
            kill_at=self._rng.randrange(_STEPS),
            made=self._rng.random() < 0.5,
            victim=victim,
        )

    def _live(self, version: int, without: tuple[str, ...]) -> None:
        life = self._drawn(version, without)
        lives = [life]
        if self._served:  # a second client, which does not mind if the owner dies
            lives.append(replace(life, number=life.number + 1000, kill_at=-1, victim=self._owner.pid))
        self._until_ended(lives)

    def _drop(self, version: int, view: str) -> None:
        for _ in range(2):
            self._until_ended([replace(self._drawn(version, ()), drop=view, kill_at=self._rng.randrange(12))])
        self._until_ended([replace(self._drawn(version, ()), drop=view, kill_at=-1, victim=0)])

    def _until_ended(self, lives: list[Life]) -> None:
        processes = [_context.Process(target=live, args=(life,)) for life in lives]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            assert process.exitcode in (0, -signal.SIGKILL), f"seed {self._seed}: a process ended: {process.exitcode}"
            self.killed += process.exitcode != 0
        if self._owner is not None and lives[0].victim:
            self._owner.join(timeout=0)
            self.killed += not self._owner.is_alive()

    async def _differences(self, version: int, without: tuple[str, ...]) -> list[str]:
        graph = Graph(self._seed, version=version, without=without)
        async with perco.open(self._address(), graph.views.schema, options=options(0)) as db, db.worker():
            await db.wait_idle(timeout=_IDLE_S)
            assert await db.failed_count() == 0
            async with db.snapshot() as snap:
                sources = await graph.held(snap)
                assert any(sources.values()), "nothing was written"
                return await graph.differences(snap)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if nothing was wrong, else 1."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many histories of each kind")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: 0)")
    given = parser.parse_args(arguments)
    wrong = killed = 0
    for seed in range(given.first, given.first + given.seeds):
        for served in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                history = History(seed, Path(folder) / "s", served=served)
                found = history.run()
            killed += history.killed
            wrong += bool(found)
            for text in found[:3]:
                print(f"seed {seed}, {'served' if served else 'lmdb'}: {text}", flush=True)
    print(f"{2 * given.seeds} histories, {killed} processes killed, {wrong} wrong")
    return bool(wrong)


if __name__ == "__main__":
    from tests.integration.killed import viewing  # its functions are sent to other processes by their names

    sys.exit(viewing.main())
