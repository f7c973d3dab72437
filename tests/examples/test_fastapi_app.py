from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

import perco
from examples.fastapi_app import make_app
from tests.examples.links_worker import ROUNDS
from tests.examples.running import ROOT

pytestmark = pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs


def served(folder: str | Path, body: Callable[[httpx.AsyncClient], Awaitable[None]]) -> None:
    """A body with a client of the app, between its start and its end."""

    async def main() -> None:
        app = make_app(folder)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://links") as client:
                await body(client)

    asyncio.run(main())


def test_links_are_kept_counted_and_found_by_tag_and_are_there_again_after_a_restart(tmp_path: Path) -> None:
    async def first(client: httpx.AsyncClient) -> None:
        link = {"url": "https://trio.example", "tags": ["async", "python"]}
        assert (await client.put("/links/trio", json=link)).json() == {"new": True}
        assert (await client.put("/links/trio", json=link)).json() == {"new": False}
        await client.put("/links/lmdb", json={"url": "https://lmdb.example", "tags": ["store"]})
        counted = await asyncio.gather(*[client.post("/links/trio/visits") for _ in range(40)])
        assert sorted(one.json()["visits"] for one in counted) == list(range(1, 41))
        found = await client.get("/tags/python", params={"fresh": True})
        assert found.json() == {"trio": "https://trio.example"}

    async def again(client: httpx.AsyncClient) -> None:
        assert (await client.get("/links/trio")).json()["visits"] == 40
        assert (await client.delete("/links/trio")).json() == {"removed": True}
        assert (await client.delete("/links/trio")).json() == {"removed": False}
        assert (await client.get("/tags/python?fresh=true")).json() == {}
        for answer in await client.get("/links/trio"), await client.post("/links/trio/visits"):
            assert answer.status_code == 404
        assert (await client.put("/links/x", json={"tags": 5})).status_code == 422

    served(tmp_path / "store", first)
    served(tmp_path / "store", again)


def test_what_the_store_cannot_do_now_is_a_503_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(client: httpx.AsyncClient) -> None:
        async def full(*_: object, **__: object) -> None:
            raise perco.errors.StoreFull("the store", "a test")

        monkeypatch.setattr("examples.fastapi_app.visit", full)
        answer = await client.post("/links/trio/visits")
        assert answer.status_code == 503
        assert "no space left" in answer.json()["detail"]

    served("memory:", body)


def test_every_worker_of_several_answers_what_is_fresh(tmp_path: Path) -> None:  # R9
    """One of them owns the folder, the other one is its client."""
    command = [sys.executable, "-m", "tests.examples.links_worker", str(tmp_path / "store")]
    with ExitStack() as stack:
        workers: dict[str, subprocess.Popen[str]] = {}
        for name in "owner", "client":
            workers[name] = stack.enter_context(
                subprocess.Popen([*command, name], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )
            stack.callback(workers[name].kill)
            assert workers[name].stdout.readline() == "up\n"  # type: ignore[union-attr]
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for name, worker in workers.items():
            assert worker.stdout is not None
            wanted = [[200, 200, {f"{name}-{i}": f"https://{name}.example/{i}"}] for i in range(ROUNDS)]
            assert json.loads(worker.stdout.readline()) == wanted
        for worker in reversed(workers.values()):
            worker.communicate(timeout=60)
            assert worker.returncode == 0
