"""A simulated network: a proxy between clients and a served store that delays the bytes that pass through it.

    python -m bench.delay DELAY_S TARGET LISTENS [TARGET LISTENS ...]        sockets in the file system

It delays each direction of each connection by DELAY_S seconds, however much is on its way, so the delay does not limit
throughput. It is a process of its own, so that neither side pays for it. It prints "delaying" when it listens, and ends
when its standard input does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import trio

_CHUNK_BYTES = 1 << 18
_CHUNKS_MAX = 1 << 14  # on their way in one direction
_ENDED = (trio.BrokenResourceError, trio.ClosedResourceError)


async def pump(source: trio.abc.ReceiveStream, sink: trio.abc.Stream, delay_s: float) -> None:
    """Pass on each piece `delay_s` seconds after it came, and at last the end."""
    under_way, arriving = trio.open_memory_channel[tuple[float, bytes]](_CHUNKS_MAX)

    async def receive() -> None:
        async with under_way:
            with suppress(*_ENDED):
                while data := await source.receive_some(_CHUNK_BYTES):
                    await under_way.send((trio.current_time() + delay_s, bytes(data)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async for due, data in arriving:
            await trio.sleep_until(due)
            try:
                await sink.send_all(data)
            except _ENDED:
                nursery.cancel_scope.cancel()
        await trio.sleep(delay_s)
    await sink.aclose()


async def between(one: trio.abc.Stream, other: trio.abc.Stream, delay_s: float) -> None:
    """Connect two streams, until either ends."""
    async with one, other, trio.open_nursery() as nursery:

        async def way(source: trio.abc.Stream, sink: trio.abc.Stream) -> None:
            await pump(source, sink, delay_s)
            nursery.cancel_scope.cancel()

        nursery.start_soon(way, one, other)
        nursery.start_soon(way, other, one)


async def _proxy(delay_s: float, pairs: Sequence[tuple[str, str]]) -> None:
    async def serve(target: str, stream: trio.SocketStream) -> None:
        try:
            other = await trio.open_unix_socket(target)
        except OSError:
            await stream.aclose()  # like an absent server
            return
        await between(stream, other, delay_s)

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
    """The address of a served store behind the delay; `servers`: tablet servers beside its owner."""
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


if __name__ == "__main__":
    trio.run(_proxy, float(sys.argv[1]), list(zip(sys.argv[2::2], sys.argv[3::2], strict=True)))
