from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

import perco
from examples import embeddings
from tests.examples.running import ROOT

MANY = embeddings.IN_FLIGHT


@asynccontextmanager
async def service(answer: Callable[[str], Awaitable[object]]) -> AsyncIterator[str]:
    """A service of the test's own; where it is."""
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_tcp, partial(embeddings.serve, answer), 0, host="127.0.0.1")
        [listener] = await nursery.start(serve)
        yield f"127.0.0.1:{listener.socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


def vector_of(text: str) -> list[int]:
    return [len(text), text.count("e")]


async def read(snap: perco.Snapshot) -> dict[str, list[int] | None]:
    """The vector of each text."""
    columns = [embeddings.text, embeddings.vector]
    return {
        row.get(embeddings.text, ""): row[embeddings.vector]
        async for row in snap.scan(embeddings.docs, columns=columns)
    }


@pytest.mark.parametrize("in_flight", [1, MANY])
async def test_so_many_wait_for_the_service_and_nobody_for_them(
    monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    """The service answers nobody before as many as can be in flight have asked."""
    monkeypatch.setattr(embeddings, "DOCUMENTS", documents := 8 if in_flight == 1 else MANY + 20)
    asked, most = 0, 0
    full, go_on = trio.Event(), trio.Event()

    async def answer(text: str) -> list[int]:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        if asked == in_flight:
            full.set()
        await go_on.wait()
        asked -= 1
        return vector_of(text)

    with trio.fail_after(300):
        async with service(answer) as at, perco.open("memory:", embeddings.schema_with(at)) as db:
            await db.run(embeddings.load, 1)
            async with db.worker(concurrency=in_flight):
                await full.wait()
                for number in range(documents):  # among these are those whose transactions are open
                    await db.run(embeddings.view, number)
                async with db.transaction() as txn:
                    for number in range(0, documents, 2):
                        txn.set(embeddings.text, number, f"written anew: {number}")
                    txn.delete(embeddings.text, 1)
                assert asked == in_flight
                go_on.set()
                await db.wait_idle()
            async with db.snapshot() as snap:
                vectors = await read(snap)
                assert vectors == {text: vector_of(text) for text in vectors}
                assert len(vectors) == documents - 1
                views = [row[embeddings.views] async for row in snap.scan(embeddings.docs)]
                assert views == [1] * documents
    assert most == in_flight


async def test_killed_while_hundreds_are_in_flight_it_embeds_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, answered, kill_at, asked = tmp_path / "store", 144, 144 + MANY, 0
    script = str(ROOT / "examples/embeddings.py")
    process: trio.Process | None = None

    async def kill(text: str) -> list[int]:
        nonlocal asked
        asked += 1
        if asked == kill_at:
            assert process is not None
            process.kill()
        if asked > answered:  # as many as can be in flight are, when it dies
            await trio.sleep_forever()
        return vector_of(text)

    with trio.fail_after(300):
        async with service(kill) as at:
            command = [sys.executable, "-m", "tests.examples.child", "", "0", script, str(store), "--service", at]
            process = await trio.lowlevel.open_process(command, cwd=ROOT, stdout=subprocess.DEVNULL)
            try:
                assert await process.wait() == -signal.SIGKILL
            finally:
                process.kill()
    async with perco.open(store, embeddings.schema_with("nowhere:0")) as db, db.snapshot() as snap:
        before = await read(snap)
    done = {text for text, vector in before.items() if vector is not None}
    assert answered - 1 <= len(done) <= answered  # one may have been given up when the first worker ended

    again = set()

    async def answer(text: str) -> list[int]:
        again.add(text)
        return vector_of(text)

    async with service(answer) as at:  # another one: nothing of the first process comes here
        await embeddings.main(store, at)
    assert f"{len(before)} documents, {len(before) - len(done)} of them wait" in capsys.readouterr().out
    assert again == before.keys() - done
    async with perco.open(store, embeddings.schema_with("nowhere:0")) as db, db.snapshot() as snap:
        assert await read(snap) == {text: vector_of(text) for text in before}
