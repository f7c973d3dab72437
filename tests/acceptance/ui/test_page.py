"""`perco ui`: what the page answers, who may ask, and what it does."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trio
import trustme

import perco
from tests.acceptance.cli import stores
from tests.acceptance.ui import app, pages
from tests.support import postgresql

# httpx leaves a request's body unfinished if its server is killed meanwhile.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")


@asynccontextmanager
async def program(store: Path) -> AsyncIterator[trio.Process]:
    """The program, after its observers have run."""
    async with stores.started([sys.executable, "-m", "tests.acceptance.ui.app", str(store)]) as process:
        assert await stores.Lines(process.stdout).next() == "idle"
        yield process


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


async def test_the_page_tells_what_is_in_the_store_and_what_observers_do(store: Path) -> None:
    async with program(store) as process, pages.shown(store) as page:
        told = await page.get("store")
        assert (told["store"], told["owner"]["pid"]) == (str(store), process.pid)
        assert {table["name"] for table in told["tables"]} == {"docs", "words", "summaries"}
        assert {each["id"]: (each["table"], each["column"], each["outputs"]) for each in told["observers"]} == {
            "index": ("docs", "text", [["words", "seen"]]),
            "detect": ("docs", "text", [["docs", "lang"]]),
            "summarize": ("docs", "lang", [["summaries", "summary"]]),
        }
        sample = await page.sample()
        assert (sample["owner"], sample["problem"]) == (process.pid, "")
        assert {id: lag["failed"] for id, lag in sample["lag"].items()} == {"index": 0, "detect": 0, "summarize": 1}
        assert {lag["workers"] for lag in sample["lag"].values()} == {1}
        again = await page.get("samples", after=sample["number"])
        assert all(each["number"] > sample["number"] for each in again["samples"])


async def test_rows_by_page_prefix_start_and_moment(store: Path) -> None:
    async with program(store), pages.shown(store) as page:
        first = await page.get("rows", table="docs", limit=4)
        assert [row["key"] for row in first["rows"]] == ["doc/0", "doc/1", "doc/2", "doc/3"]
        assert first["more"]
        assert first["rows"][0]["values"] == ["two apples", "en"]
        rest = await page.get("rows", table="docs", limit=10, after=first["rows"][-1]["ref"])
        assert [row["key"] for row in rest["rows"]] == ["doc/4", "doc/5", "doc/6", "doc/7", "doc/bad"]
        assert not rest["more"]
        here = await page.get("rows", table="words", prefix='["apple"]', start='["apple", "doc/6"]')
        assert [row["key"] for row in here["rows"]] == ['["apple", "doc/6"]', '["apple", "doc/7"]']
        row = await page.get("row", table="docs", ref=first["rows"][0]["ref"])
        [versions] = [column["versions"] for column in row["columns"] if column["name"] == "text"]
        assert [each["value"] for each in versions] == ["two apples", "an apple a day"]
        older = versions[1]["commit_ts"]
        before = await page.get("rows", table="docs", at=older, columns="text")
        assert [row["values"] for row in before["rows"]] == [["an apple a day"]]
        assert (await page.get("row", table="docs", key="doc/0", at=older))["ts"] == older
        found = await page.get("diff", table="docs", from_=older, limit=3)
        assert found["rows"][0]["cells"][0] == {"column": "text", "before": "an apple a day", "after": "two apples"}
        assert found["more"]


async def test_what_a_row_came_from(store: Path) -> None:
    async with program(store), pages.shown(store) as page:
        found = await page.get("causes", table="summaries", key="doc/3")
        [root] = found["trees"]
        assert root["observer"] is None
        [detect] = [run for run in root["runs"] if run["observer"] == "detect"]
        [summarize] = detect["runs"]
        assert (summarize["observer"], summarize["asked"]) == ("summarize", True)
        assert [(cell["table"], cell["key"]) for cell in summarize["writes"]] == [("summaries", "doc/3")]
        assert (await page.get("causes", table="summaries", key="nowhere"))["trees"] == []


async def test_the_page_pauses_replays_and_drops(store: Path) -> None:
    async with program(store), pages.shown(store) as page:
        [change] = (await page.get("failed"))["changes"]
        assert (change["observer"], change["key"], change["attempts"]) == ("summarize", "doc/bad", 2)
        assert "RuntimeError: the service answered <503>" in change["traceback"]
        assert (await page.get("failed", observer="index"))["changes"] == []
        assert await page.act("drop", observer="summarize", ref="") == {"dropped": 0}  # the row with the empty key
        assert await page.act("replay", observer="summarize", ref=change["ref"]) == {"replayed": 1}
        await page.sample(lambda sample: sample["lag"]["summarize"]["failed"] == 1)  # it has failed again
        await page.until("failed", lambda found: found["changes"])
        assert await page.act("drop", observer="summarize", ref=change["ref"]) == {"dropped": 1}
        await page.sample(lambda sample: sample["lag"]["summarize"]["failed"] == 0)
        assert await page.act("pause", observer="index") == {"paused": "index"}
        await page.until(
            "store", lambda told: [each["id"] for each in told["observers"] if each["paused"]] == ["index"]
        )
        assert await page.act("resume", observer="index") == {"resumed": "index"}


async def test_an_action_must_come_from_the_page(store: Path) -> None:
    async with program(store), pages.shown(store) as page:
        refused = await page.act("pause", 403, headers={"origin": "http://evil.example"}, observer="index")
        assert "must come from this page" in refused["error"]
        for name, body, said in (
            ("explode", {}, "there is no action"),
            ("pause", {}, "observer is missing"),
            ("pause", {"observer": 7}, "is of type str"),
            ("pause", {"observer": "index", "also": "x"}, "takes observer"),
            ("pause", {"observer": "nobody"}, "nobody"),
            ("replay", {"observer": "summarize", "ref": "zz"}, "no row"),
            ("replay", {"observer": "summarize"}, "give ref"),
            ("drop", {"observer": "summarize", "ref": "61", "all": True}, "give ref"),
        ):
            assert said in (await page.act(name, 400, **body))["error"]  # type: ignore[arg-type]
        url, headers = f"{page.base}/api/do/pause", {"authorization": f"Bearer {page.token}"}
        for content in b"[]", b"{", b"x" * 100_000:
            assert (await page.client.post(url, content=content, headers=headers)).status_code == 400
        assert (await page.client.get(url, headers=headers)).status_code == 405


async def test_questions_that_make_no_sense_get_errors(store: Path) -> None:
    async with program(store), pages.shown(store) as page:
        for name, parameters, said in (
            ("rows", {"table": "nothing"}, "there is no table"),
            ("rows", {"table": "docs", "limit": "0"}, "from 1 to 500"),
            ("rows", {"table": "docs", "limit": "x"}, "not a number"),
            ("rows", {"table": "docs", "limit": "1" * 5000}, "not a number"),
            ("rows", {"table": "docs", "at": "1" * 5000}, "no moment"),
            ("rows", {"table": "docs", "at": "yesterday"}, "yesterday"),
            ("rows", {"table": "docs", "after": "zz"}, "no row"),
            ("rows", {"table": "docs", "columns": "nothing"}, "no column"),
            ("row", {"table": "words", "key": "x"}, "JSON"),
            ("row", {"table": "words", "ref": "00"}, "no row"),
            ("diff", {"table": "docs"}, "older moment"),
            ("failed", {"observer": "nobody"}, "nobody"),
        ):
            assert said in (await page.get(name, 400, **parameters))["error"], name
        ahead = await page.get("rows", 400, table="docs", at=10**15)
        assert "10" in ahead["error"]


async def test_only_those_with_the_token_see_the_page(store: Path) -> None:
    async with program(store), pages.shown(store) as page, httpx.AsyncClient(base_url=page.base) as stranger:
        for path in "/", "/?token=wrong", "/api/store", "/static/main.js":
            answer = await stranger.get(path)
            assert answer.status_code == 401, path
            assert "perco ui" in answer.text
        assert (await stranger.get("/healthz")).text == "ok\n"
        answer = await stranger.get(f"/?token={page.token}")
        assert (answer.status_code, answer.headers["location"]) == (303, "./")
        answer = await stranger.get("/")  # with the cookie
        assert answer.status_code == 200
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        assert (await stranger.get("/api/store")).status_code == 200
        for path in "/static/main.js", "/static/vendor/uplot.js", "/static/perco.css", "/static/icon.svg":
            assert (await stranger.get(path)).status_code == 200, path
        assert (await stranger.get("/static/../app.py")).status_code == 404


async def test_without_a_token_only_this_host_is_served(store: Path) -> None:
    async with program(store), pages.shown(store, "--no-token") as page:
        assert page.token == ""
        assert (await page.client.get(f"{page.base}/api/store")).status_code == 200
        answer = await page.client.get(f"{page.base}/api/store", headers={"host": "evil.example"})
        assert answer.status_code == 401


async def test_a_store_that_no_process_has_open(store: Path) -> None:
    async with perco.open(store, app.schema) as db:
        await app.load(db)
    async with pages.shown(store) as page:
        sample = await page.sample()
        assert (sample["owner"], sample["lag"]["detect"]["waiting"], sample["lag"]["detect"]["workers"]) == (0, 10, 0)
        assert (await page.client.get(f"{page.base}/healthz")).status_code == 503
        assert (await page.get("heat"))["bands"] == []
        await page.act("pause", observer="index")
        assert {each["id"]: each["paused"] for each in (await page.get("store"))["observers"]}["index"]
        await page.act("resume", observer="index")
        async with program(store) as process:  # the page sees a process come, and go
            sample = await page.sample(lambda sample: sample["owner"] == process.pid)
            process.kill()
            await process.wait()
            await page.sample(lambda sample: sample["owner"] == 0 and sample["number"] > 0 and not sample["problem"])


async def test_a_schema_that_changes_is_seen(store: Path) -> None:
    async with perco.open(store, app.schema) as db:
        await app.load(db)
    async with pages.shown(store) as page:
        assert len((await page.get("store"))["tables"]) == 3
        more = perco.Table("more", key=perco.TEXT)
        column = more.column("column", perco.TEXT)
        async with perco.open(store, perco.Schema(more)) as db, db.transaction() as txn:
            txn.set(column, "a", "b")
        assert [row["key"] for row in (await page.get("rows", table="more"))["rows"]] == ["a"]


async def test_a_served_store_by_its_address(store: Path) -> None:
    async with program(store) as process, pages.shown(f"unix:{store / 'socket'}") as page:
        assert (await page.sample())["owner"] == process.pid
        assert len((await page.get("rows", table="docs"))["rows"]) == 9
        assert (await page.get("failed"))["count"] == 1
        heat = await page.until("heat", lambda heat: heat["tablets"])
        assert {tablet["table"] for tablet in heat["tablets"]} >= {"docs", "words", "summaries"}
        uses = await page.get("uses")
        assert [(each["role"], each["pid"]) for each in uses["processes"]] == [("owner", process.pid)]


# ------------------------------------------------------------------ the command


async def test_what_cannot_be_served_is_refused(store: Path, tmp_path: Path) -> None:
    await stores.make(store)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, said in (
            ((tmp_path / "nothing",), "no such folder"),
            ((store, "--listen", f"127.0.0.1:{port}"), "takes any free port"),
            ((store, "--listen", "0.0.0.0:0"), "needs TLS"),
            ((store, "--listen", "localhost"), "HOST:PORT"),
            ((store, "--tls-cert", tmp_path / "no.pem"), "cannot be used: No such file"),
            ((store, "--tls-key", tmp_path / "key.pem"), "--tls-key needs --tls-cert"),
            ((store, "--tls-cert", store / "perco-format"), "cannot be used"),
        ):
            done = await stores.run("ui", *arguments)
            assert (done.code, done.out) == (2, ""), done
            assert said in done.err, done


async def test_over_tls(store: Path, tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    trust = ssl.create_default_context()
    authority.configure_trust(trust)
    async with program(store), pages.shown(store, "--tls-cert", tmp_path / "server.pem", trust=trust) as page:
        assert page.base.startswith("https://")
        assert (await page.get("store"))["store"] == str(store)
        answer = await page.client.get(page.url)
        assert "Secure" in answer.headers["set-cookie"]


async def test_serve_keeps_a_page_that_outlives_its_process(store: Path) -> None:
    command = stores.command("serve", store, "--ui", "127.0.0.1:0")
    async with stores.started(command) as server, httpx.AsyncClient(timeout=30) as client:
        lines = stores.Lines(server.stdout)
        while not (line := await lines.next()).startswith("page at "):
            pass
        page = pages.Page(line.removeprefix("page at "), client)
        first = await page.get("samples")
        assert (await page.sample())["owner"] == server.pid
        [child] = await trio.to_thread.run_sync(_children, server.pid)
        os.kill(child, signal.SIGKILL)
        while True:  # the socket is the server's: requests wait for the next process
            try:
                if (await page.get("samples"))["begun"] != first["begun"]:
                    break
            except httpx.TransportError:  # of the process that was killed
                await trio.sleep(0.1)
        [other] = await trio.to_thread.run_sync(_children, server.pid)
        assert other != child
        server.terminate()
        with trio.fail_after(20):
            assert await server.wait() == 0
        with pytest.raises(ProcessLookupError):
            os.kill(other, 0)


async def test_serve_keeps_a_page_of_a_store_that_is_divided_among_processes(store: Path) -> None:
    async with program(store):
        pass
    await _serves_a_page(store, str(store), {1, 2}, "--processes", "2")


async def test_serve_keeps_a_page_of_a_store_in_a_database(tmp_path: Path) -> None:
    url = postgresql.fresh()  # skips the test if PostgreSQL is not installed
    async with perco.open(url, app.schema) as db, db.worker(concurrency=4):
        await app.load(db)
        await db.wait_idle()
    for direct in [], ["--direct"]:
        await _serves_a_page(url, url, set(), "--listen", f"unix:{tmp_path / 'socket'}", *direct)


async def _serves_a_page(store: object, shown: str, servers: set[int], *arguments: str) -> None:
    command = stores.command("serve", store, *arguments, "--ui", "127.0.0.1:0")
    async with stores.started(command) as server, httpx.AsyncClient(timeout=30) as client:
        lines = stores.Lines(server.stdout)
        while not (line := await lines.next()).startswith("page at "):
            pass
        page = pages.Page(line.removeprefix("page at "), client)
        assert (await page.sample(lambda sample: sample["owner"]))["lag"]["summarize"]["failed"] == 1
        told = await page.get("store")
        assert (told["store"], told["owner"]["alive"]) == (shown, True)
        assert len((await page.get("rows", table="docs"))["rows"]) == 9
        assert (await page.get("failed"))["count"] == 1
        assert [each["role"] for each in (await page.get("uses"))["processes"]] == ["owner"]
        heat = await page.until("heat", lambda heat: heat["tablets"] or not servers)
        assert {tablet["server"] for tablet in heat["tablets"]} == servers
        assert await page.act("pause", observer="index") == {"paused": "index"}
        server.terminate()
        with trio.fail_after(20):
            assert await server.wait() == 0


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
