from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest

import perco
from examples.fastapi_app import make_app

pytestmark = pytest.mark.filterwarnings("ignore::perco.PercoWarning")  # the temporary folder may lie on tmpfs


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
            raise perco.StoreFull("the store", "a test")

        monkeypatch.setattr("examples.fastapi_app.visit", full)
        answer = await client.post("/links/trio/visits")
        assert answer.status_code == 503
        assert "no space left" in answer.json()["detail"]

    served("memory:", body)
