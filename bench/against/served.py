"""Clients of one served store, each in a process of its own: tasks on an event loop, or a thread per request.

    python -m bench.against.served SIDE STORE IN_FLIGHT SECONDS [WINDOW SKEW]
                                                        prints the figures of a closed loop of callers, as JSON
    python -m bench.against.served SIDE STORE COUNT memory
                                                        ... the bytes that a waiting request takes

WINDOW: the client's `BatchOptions.window_s`, followed by an "a" if it is adaptive; SKEW: the exponent of Zipf's law,
by which rows are chosen.

A request is one durable read-modify-write of a row. The sides:

    tasks                 perco on trio: a task per request, one connection, frames that carry all waiting calls
    tasks, no batching    the same, every call in a frame of its own
    tasks, shipped        a task per request, which has the owner add to a number in the row: `db.add`
    threads               `BlockingClient`: a thread and a connection per request
    threads, batching     perco.sync: a thread per request, one connection, frames that carry all waiting calls
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import trio

import perco
import perco.sync
from bench.against import embedded
from bench.against.blocking import BlockingClient
from bench.against.embedded import KEYS, count, one_more, schema, value
from bench.against.load import Load, Measured, Zipf, closed_loop, cpu_of
from perco.database.inside import inside

TASKS, TASKS_ALONE = "tasks", "tasks, no batching"
THREADS, THREADS_BATCHING = "threads", "threads, batching"
SHIPPED = "tasks, shipped"
SIDES = (TASKS, TASKS_ALONE, THREADS, THREADS_BATCHING)
_STACK_BYTES = 256 * 1024  # of a thread; untouched pages take no memory
_WARM = 32
_CONNECTIONS = 4096  # that a server accepts: each thread has its own
_ATTEMPTS = 1_000_000  # so no call gives up: the benchmark measures how long each takes


# ------------------------------------------------------------------ the server


class Server:
    """`perco serve`, in a process of its own, over a folder."""

    def __init__(self, folder: Path, durability: str, processes: int = 1) -> None:
        self.folder, self._durability, self._processes = folder, durability, processes
        self.calls = 0  # that were answered, by all clients
        self.start()

    def start(self) -> None:
        """Returns when it serves."""
        more: tuple[str, ...] = ("--durability", self._durability, "--connections", str(_CONNECTIONS))
        if self._processes > 1:
            more = (*more, "--processes", str(self._processes))
        command = [sys.executable, "-m", "perco", "serve", str(self.folder), *more]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        if not self._process.stdout.readline().startswith("serving"):
            raise RuntimeError("the server did not start")

    def send_signal(self, number: int) -> None:
        """Returns when it has ended."""
        self._process.send_signal(number)
        self._process.wait()

    def cpu_s(self) -> float:
        """Its processor time so far."""
        return cpu_of(self._process.pid)

    def load(
        self, side: str, in_flight: int, seconds: float, window: str = "0", skew: float = 0.0, url: str = ""
    ) -> Load:
        """Run a client and return its figures. `url`: the address of the store."""
        before = self.cpu_s()
        found = load_of(side, url or str(self.folder), in_flight, seconds, window, skew)
        found.cpu_s += self.cpu_s() - before
        self.calls += found.calls + _warm(in_flight)
        return found

    def memory(self, side: str, count: int) -> float:
        """Bytes that a request takes in its client while it waits."""
        return float(_child(side, self.folder, count, "memory"))

    def check(self) -> None:
        """Raises: AssertionError, unless the rows count every call."""
        total = trio.run(_total, self.folder)
        if total != self.calls:
            raise AssertionError(f"{self.calls} calls were answered, and the rows say {total}")


def load_of(side: str, url: str, in_flight: int, seconds: float, window: str = "0", skew: float = 0.0) -> Load:
    """Run a process that opens a store, served or its own, and return its figures."""
    return Load(**json.loads(_child(side, url, in_flight, seconds, window, skew)))


@contextmanager
def unserved(folder: Path) -> Iterator[Path]:
    """A store with all rows in it, which no process has open."""
    path = folder / f"own-{random.getrandbits(32):x}"
    trio.run(_fill, path)
    yield path


@contextmanager
def server(folder: Path, *, durable: bool, processes: int = 1) -> Iterator[Server]:
    """A served store with all rows in it. `processes`: above 1, the number of tablet servers."""
    path = folder / f"served-{random.getrandbits(32):x}"
    trio.run(_fill, path)
    served = Server(path, "power" if durable else "process", processes)
    try:
        yield served
    finally:
        served.send_signal(signal.SIGTERM)


async def _fill(path: Path) -> None:
    async with perco.open(path, schema) as db, db.transaction() as txn:
        for key in KEYS:
            txn.set(value, key, embedded.ZERO)


async def _total(path: Path) -> int:
    async with perco.open(path, schema) as db, db.snapshot() as snap:
        added = sum(found or 0 for found in (await snap.get_many(count, KEYS)).values())
        return added + await embedded.Perco(db).total()


def _child(*arguments: object) -> str:
    command = [sys.executable, "-m", __name__ if __name__ != "__main__" else "bench.against.served"]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=root,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout


# ------------------------------------------------------------------ clients, each in a process of its own


def _warm(in_flight: int) -> int:
    """Calls before the clock starts."""
    return min(in_flight, _WARM)


async def _tasks(
    url: str, in_flight: int, seconds: float, options: perco.Options | None, skew: float, *, shipped: bool
) -> Load:
    zipf = Zipf(len(KEYS), skew)
    tried = 0

    async def modify(txn: perco.Transaction, key: bytes) -> None:
        nonlocal tried
        tried += 1
        old = await txn.get(value, key)
        assert old is not None
        txn.set(value, key, one_more(old))

    async def call(rng: random.Random) -> None:
        key = KEYS[zipf.draw(rng)] if skew else rng.choice(KEYS)
        await (db.add(count, key, 1) if shipped else db.run(modify, key))

    async with perco.open(url, schema, options=options) as db:
        async with trio.open_nursery() as nursery:
            for number in range(_warm(in_flight)):
                nursery.start_soon(call, random.Random(-number))
        tried = 0
        found = await closed_loop(call, in_flight, seconds)
        found.retries = 0 if shipped else tried - found.calls
        return found


def _in_threads(in_flight: int, seconds: float, caller: Callable[[], Callable[[bytes], int]]) -> Load:
    """`caller` returns the function with which a thread makes its calls; that returns how many attempts it took."""
    load = Load()
    started, gate = threading.Barrier(in_flight + 1), threading.Event()
    lock = threading.Lock()
    failed: list[BaseException] = []
    until = 0.0

    def run(number: int) -> None:
        try:
            call = caller()
            if number < _warm(in_flight):
                call(random.Random(-number).choice(KEYS))
            rng, times, retries = random.Random(number), [], 0
            started.wait()
            gate.wait()
            now = time.perf_counter()
            while True:
                began = now
                retries += call(rng.choice(KEYS)) - 1
                now = time.perf_counter()
                times.append(now - began)
                if now >= until:
                    break
            with lock:
                load.times += times
                load.retries += retries
        except BaseException as error:
            failed.append(error)
            started.abort()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(in_flight)]
    for thread in threads:
        thread.start()
    try:
        started.wait()
    except threading.BrokenBarrierError:
        raise failed[0] from None
    with Measured(load):
        until = time.perf_counter() + seconds
        gate.set()
        for thread in threads:
            thread.join()
    if failed:
        raise failed[0]
    return load


def _blocking(path: Path, column: int) -> Callable[[], Callable[[bytes], int]]:
    def change(old: bytes | None) -> bytes:
        assert old is not None
        return one_more(old)

    def caller() -> Callable[[bytes], int]:
        client = BlockingClient(str(path / "socket"))
        return lambda key: client.modify("t", key, column, change)

    return caller


def _sync(db: perco.sync.Database) -> Callable[[], Callable[[bytes], int]]:
    def modify(txn: perco.sync.Transaction, key: bytes) -> None:
        old = txn.get(value, key)
        assert old is not None
        txn.set(value, key, one_more(old))

    def call(key: bytes) -> int:
        db.run(modify, key)
        return 1

    return lambda: call


async def _column(url: str) -> int:
    async with perco.open(url, schema) as db:
        return inside(db).known.bind(value).column


def batch_options(window: str) -> perco.options.BatchOptions:
    """A client's options: see WINDOW above."""
    return perco.options.BatchOptions(window_s=float(window.removesuffix("a")), adaptive=window.endswith("a"))


def load(side: str, url: str, in_flight: int, seconds: float, window: str, skew: float) -> Load:
    if side in (TASKS, TASKS_ALONE, SHIPPED):
        wire = perco.options.WireOptions(frame_messages=1) if side == TASKS_ALONE else perco.options.WireOptions()
        options = perco.Options(
            wire=wire, batch=batch_options(window), retry=perco.options.RetryOptions(attempts=_ATTEMPTS)
        )
        tasks = partial(_tasks, url, in_flight, seconds, options, skew, shipped=side == SHIPPED)
        return trio.run(tasks)
    if side == THREADS:
        return _in_threads(in_flight, seconds, _blocking(Path(url), trio.run(_column, url)))
    with perco.sync.open(url, schema) as db:
        return _in_threads(in_flight, seconds, _sync(db))


# ------------------------------------------------------------------ memory


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def waiting(side: str, url: str, count: int) -> float:
    """Bytes for each request that has read its row and waits in the middle of its transaction."""
    if side in (TASKS, TASKS_ALONE):
        return trio.run(_waiting_tasks, url, count)
    if side == THREADS:
        column = trio.run(_column, url)
        return _waiting_threads(count, lambda wait: _blocking_wait(Path(url), column, wait))
    with perco.sync.open(url, schema) as db:

        def one(wait: Callable[[], None]) -> None:
            def modify(txn: perco.sync.Transaction) -> None:
                txn.get(value, KEYS[0])
                wait()

            db.run(modify)

        return _waiting_threads(count, one)


def _blocking_wait(path: Path, column: int, wait: Callable[[], None]) -> None:
    client = BlockingClient(str(path / "socket"))
    rng = random.Random(threading.get_ident())

    def change(old: bytes | None) -> bytes:
        wait()
        assert old is not None
        return old

    client.modify("t", rng.choice(KEYS), column, change)
    client.close()


async def _waiting_tasks(url: str, count: int) -> float:
    async with perco.open(url, schema) as db:
        gate, arrived = trio.Event(), 0
        all_here = trio.Event()

        async def modify(txn: perco.Transaction) -> None:
            nonlocal arrived
            await txn.get(value, KEYS[0])
            arrived += 1
            if arrived == wanted:
                all_here.set()
            await gate.wait()

        wanted = 1
        async with trio.open_nursery() as nursery:
            nursery.start_soon(db.run, modify)
            await all_here.wait()
            gc.collect()
            before, wanted, all_here = resident(), 1 + count, trio.Event()
            for _ in range(count):
                nursery.start_soon(db.run, modify)
            await all_here.wait()
            gc.collect()
            used = resident() - before
            gate.set()
        return used / count


def _waiting_threads(count: int, one: Callable[[Callable[[], None]], None]) -> float:
    gate, arrived = threading.Event(), threading.Semaphore(0)

    def wait() -> None:
        if not gate.is_set():
            arrived.release()
            gate.wait()

    def start(how_many: int) -> None:
        for _ in range(how_many):
            thread = threading.Thread(target=one, args=(wait,))
            thread.start()
            threads.append(thread)
        for _ in range(how_many):
            arrived.acquire()

    threads: list[threading.Thread] = []
    start(1)
    gc.collect()
    before = resident()
    start(count)
    gc.collect()
    used = resident() - before
    gate.set()
    for thread in threads:
        thread.join()
    return used / count


def main(side: str, url: str, count: str, what: str, window: str = "0", skew: str = "0") -> None:
    threading.stack_size(_STACK_BYTES)
    gc.collect()
    perco.tune_gc()
    if what == "memory":
        print(waiting(side, url, int(count)))
    else:
        found = load(side, url, int(count), float(what), window, float(skew))
        print(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(*sys.argv[1:])
