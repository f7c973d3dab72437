"""How the page of `perco ui` answers requests: without a store, and without a network."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

import perco
from perco.cli.ui import app
from perco.cli.ui.acting import Acting
from perco.cli.ui.asking import Asking
from perco.cli.ui.bounds import Busy
from perco.cli.ui.guard import Guard
from perco.cli.ui.shelf import Shelf
from perco.cli.ui.watching import Sample, Watch
from perco.notify.lagging import Lag

TOKEN = "x" * 32


class Hangs(Shelf):
    """A store that does not answer."""

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[perco.Database]:
        await trio.sleep_forever()
        yield  # type: ignore[misc]

    @asynccontextmanager
    async def writing(self) -> AsyncIterator[perco.Database]:
        await trio.sleep_forever()
        yield  # type: ignore[misc]


class Site:
    """The application, for requests with the token."""

    def __init__(self, shelf: Shelf, asking: Asking | None = None, *, token: str = TOKEN) -> None:
        watch = Watch(shelf)
        self.app = app.made(asking or Asking(shelf, watch), Acting(shelf), Guard(token, 7430, tls=False))

    async def request(
        self, path: str, method: str = "GET", body: bytes = b"", gone: trio.Event | None = None, **headers: str
    ) -> tuple[int, Any]:
        """(status, body). `gone`: set when the browser goes away."""
        path, _, query = path.partition("?")
        given = {"authorization": f"Bearer {TOKEN}", "host": "localhost:7430"} | headers
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in given.items()],
        }
        said: list[Any] = []
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": body, "more_body": False}
            await (trio.Event() if gone is None else gone).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            said.append(message)

        await self.app(scope, receive, send)  # type: ignore[arg-type]
        text = b"".join(message.get("body", b"") for message in said)
        return (said[0]["status"] if said else 0), json.loads(text) if text.startswith(b"{") else text


async def test_an_answer_that_no_browser_waits_for_ends() -> None:
    site, gone, codes = Site(Hangs("s")), trio.Event(), list[int]()

    async def ask() -> None:
        codes.append((await site.request("/api/store", gone=gone))[0])

    async with trio.open_nursery() as nursery:
        for _ in range(100):
            nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert codes == []
        gone.set()
    assert codes == [499] * 100  # nobody waits for it


async def test_samples_wait_for_no_other_question() -> None:
    site = Site(Hangs("s"))
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(site.request, "/api/store")
        await trio.testing.wait_all_tasks_blocked()
        code, body = await site.request("/api/samples")
        assert (code, body["samples"]) == (200, [])
        assert await site.request("/healthz") == (503, b"the store's owner does not answer\n")
        nursery.cancel_scope.cancel()


async def test_of_questions_that_read_the_whole_store_there_is_one_at_a_time() -> None:
    site = Site(Hangs("s"))
    async with trio.open_nursery() as nursery:
        gone = trio.Event()
        nursery.start_soon(lambda: site.request("/api/causes?table=t&key=k", gone=gone))
        await trio.testing.wait_all_tasks_blocked()
        for path in "/api/causes?table=t&key=k", "/api/diff?table=t&from=1":
            code, body = await site.request(path)
            assert (code, body["kind"]) == (503, Busy.__name__)
        gone.set()
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(site.request, "/api/causes?table=t&key=k")
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()


async def test_an_action_goes_on_when_its_browser_goes_away() -> None:
    site, gone = Site(Hangs("s")), trio.Event()
    ended = False

    async def act() -> None:
        nonlocal ended
        await site.request("/api/do/pause", "POST", b'{"observer": "a"}', gone=gone)
        ended = True

    async with trio.open_nursery() as nursery:
        nursery.start_soon(act)
        await trio.testing.wait_all_tasks_blocked()
        gone.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not ended
        nursery.cancel_scope.cancel()


async def test_a_bug_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Asking):
        async def store(self) -> dict[str, Any]:
            raise RuntimeError("a bug")

    shelf = Hangs("s")
    assert await Site(shelf, Broken(shelf, Watch(shelf))).request("/api/store") == (
        500,
        {"error": "a bug", "kind": "RuntimeError"},
    )
    [record] = caplog.records
    assert record.exc_info is not None


async def test_without_a_token_no_other_site_may_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(Hangs("s"), token="")
    assert (await site.request("/api/samples"))[0] == 200
    assert (await site.request("/api/samples", sec_fetch_site="cross-site"))[0] == 401
    assert (await site.request("/api/samples", origin="http://evil.example"))[0] == 401
    assert (await site.request("/", sec_fetch_site="cross-site"))[0] == 200  # a link to the page


async def test_a_websocket_is_closed() -> None:
    said: list[Any] = []

    async def send(message: Any) -> None:
        said.append(message)

    receive: Callable[[], Awaitable[Any]] = trio.sleep_forever
    await Site(Hangs("s")).app({"type": "websocket", "path": "/static/main.js", "headers": []}, receive, send)  # type: ignore[arg-type]
    assert said == [{"type": "websocket.close"}]


@pytest.mark.parametrize(("observers", "count"), [(1, 900), (60, 166), (5000, 30)])
async def test_samples_of_many_observers_are_fewer(observers: int, count: int) -> None:
    shelf = Hangs("s")
    watch = Watch(shelf)
    lag = {f"observer-{number}": Lag(0, 0, 0, 0.0, 1, 0.0) for number in range(observers)}
    samples = (Sample(number, 0.0, 1, "", lag, {}, {}, 0, 0) for number in range(1, 1001))
    watch.samples.extend(samples)
    asking = Asking(shelf, watch)
    found = (await asking.samples(0))["samples"]
    assert [each["number"] for each in found] == list(range(1001 - count, 1001))
    assert [each["number"] for each in (await asking.samples(998))["samples"]] == [999, 1000]
