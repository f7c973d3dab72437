"""A simulated network: a proxy between clients and a served store that delays the bytes that pass through it.

    python -m bench.delay DELAY_S TARGET LISTENS [TARGET LISTENS ...]        sockets in the file system

It delays each direction of each connection by DELAY_S seconds, however many bytes are in transit, so the delay does not
limit throughput. It runs in its own process, so that neither side pays for it. It prints "delaying" when it listens,
and exits when its standard input is closed. It waits with a timer of the Linux kernel, because epoll rounds every wait
up to whole milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median

import trio

_CHUNK_BYTES = 1 << 18
_CHUNKS_MAX = 1 << 14  # in transit in one direction
_ROUND_TRIPS = 200  # of a measurement
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)
_LIBC = ctypes.CDLL(None, use_errno=True)

Sleep = Callable[[float], Awaitable[None]]  # until a time of trio's clock


class Alarm:
    """A timer of the kernel, for one task."""

    def __init__(self) -> None:
        self._fd = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")

    async def sleep_until(self, due: float) -> None:
        """Like `trio.sleep_until`, but exact to some tens of microseconds."""
        left_ns = int((due - trio.current_time()) * 1e9)
        if left_ns <= 0:
            await trio.lowlevel.checkpoint()
            return
        setting = (ctypes.c_long * 4)(0, 0, *divmod(left_ns, 1_000_000_000))  # the period, and the time until it fires
        if _LIBC.timerfd_settime(self._fd, 0, ctypes.byref(setting), None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await trio.lowlevel.wait_readable(self._fd)
        os.read(self._fd, 8)

    def close(self) -> None:
        os.close(self._fd)


async def pump(
    source: trio.abc.ReceiveStream, sink: trio.abc.Stream, delay_s: float, sleep_until: Sleep = trio.sleep_until
) -> None:
    """Pass on each chunk `delay_s` seconds after it arrived, and finally the end of the stream."""
    under_way, arriving = trio.open_memory_channel[tuple[float, bytes]](_CHUNKS_MAX)

    async def receive() -> None:
        async with under_way:
            with suppress(*_ENDED):
                while data := await source.receive_some(_CHUNK_BYTES):
                    await under_way.send((trio.current_time() + delay_s, bytes(data)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async for due, data in arriving:
            await sleep_until(due)
            try:
                await sink.send_all(data)
            except _ENDED:
                nursery.cancel_scope.cancel()
        await trio.sleep(delay_s)
    await sink.aclose()


async def between(
    one: trio.abc.Stream, other: trio.abc.Stream, delay_s: float, sleeps: tuple[Sleep, Sleep] = (trio.sleep_until,) * 2
) -> None:
    """Connect two streams, until either ends. `sleeps`: one for each direction."""
    async with one, other, trio.open_nursery() as nursery:

        async def way(source: trio.abc.Stream, sink: trio.abc.Stream, sleep_until: Sleep) -> None:
            await pump(source, sink, delay_s, sleep_until)
            nursery.cancel_scope.cancel()

        nursery.start_soon(way, one, other, sleeps[0])
        nursery.start_soon(way, other, one, sleeps[1])


async def _proxy(delay_s: float, pairs: Sequence[tuple[str, str]]) -> None:
    async def serve(target: str, stream: trio.SocketStream) -> None:
        try:
            other = await trio.open_unix_socket(target)
        except OSError:
            await stream.aclose()  # like an absent server
            return
        with closing(Alarm()) as there, closing(Alarm()) as back:
            await between(stream, other, delay_s, (there.sleep_until, back.sleep_until))

    async with trio.open_nursery() as nursery:
        for target, listens in pairs:
            listener = trio.socket.socket(trio.socket.AF_UNIX)
            await listener.bind(listens)
            listener.listen(128)
            nursery.start_soon(trio.serve_listeners, partial(serve, target), [trio.SocketListener(listener)])
        print("delaying", flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)
        nursery.cancel_scope.cancel()


@contextmanager
def delayed(folder: Path, served: Path, delay_s: float, servers: int = 0) -> Iterator[str]:
    """The address of a served store behind the delay; `servers`: how many tablet servers it has."""
    if not delay_s:
        yield str(served)
        return
    place = folder / f"far-{int(delay_s * 1e6)}"
    names = ["", *(f"-{number + 1}" for number in range(servers))]
    pairs = [text for name in names for text in (f"{served}/socket{name}", f"{place}{name}")]
    child = subprocess.Popen(
        [sys.executable, "-m", __name__ if __name__ != "__main__" else "bench.delay", str(delay_s), *pairs],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        if child.stdout.readline() != "delaying\n":
            raise RuntimeError("the delaying proxy did not start")
        yield f"unix:{place}"
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()
        for listens in pairs[1::2]:
            with suppress(FileNotFoundError):
                os.unlink(listens)


def measured_s(folder: Path, delay_s: float) -> float:
    """The measured delay each way, in seconds: the median of small messages, the proxy's own time included."""
    served = folder / "echo"
    served.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{served}/socket")
        listener.listen()

        def echo() -> None:
            with listener.accept()[0] as stream:
                while data := stream.recv(_CHUNK_BYTES):
                    stream.sendall(data)

        threading.Thread(target=echo, daemon=True).start()
        with delayed(folder, served, delay_s) as url, socket.socket(socket.AF_UNIX) as stream:
            stream.connect(url.removeprefix("unix:"))
            times = []
            for _ in range(_ROUND_TRIPS):
                began = time.perf_counter()
                stream.sendall(b"?")
                stream.recv(1)
                times.append(time.perf_counter() - began)
    os.unlink(f"{served}/socket")
    served.rmdir()
    return median(times) / 2


if __name__ == "__main__":
    trio.run(_proxy, float(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2], strict=True)))
