"""The way of a newcomer, from the wheel to a deploy: a service on two workers, killed workers, a backup and its
restore, a newer version beside the older one, a failing service behind an observer, and the page in a browser."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

# httpx leaves a request's body unfinished if its server is killed meanwhile.
pytestmark = pytest.mark.filterwarnings("ignore:Async generator 'httpx:ResourceWarning")

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
TEXTS, TAGS, AT_ONCE, KILLS = 5000, 50, 32, 3
WITHIN_S = 120.0
CHROMIUM = shutil.which("chromium")


class Place:
    """An empty environment with the wheel, and a folder in which its user works."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.python = folder, folder / "env" / "bin" / "python"
        wheels = folder / "wheels"
        self.call([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, ROOT])
        self.call([sys.executable, "-m", "venv", folder / "env"])
        [wheel] = wheels.glob("*.whl")
        needs = [f"{wheel}[cli,metrics,ui]", "fastapi>=0.115,<1", "uvicorn>=0.32,<1"]
        self.call([self.python, "-m", "pip", "install", "--quiet", *needs])
        shutil.copy(ROOT / "examples" / "fastapi_app.py", folder)
        shutil.copy(HERE / "service.py", folder)
        (folder / "first.py").write_text('import os, fastapi_app\napp = fastapi_app.make_app(os.environ["STORE"])\n')

    def call(self, command: Sequence[object]) -> str:
        done = subprocess.run([*map(str, command)], cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def perco(self, *arguments: object) -> str:
        return self.call([self.folder / "env" / "bin" / "perco", *arguments])

    @contextmanager
    def serving(self, app: str, store: str, *, workers: int = 1, **more: str) -> Iterator[tuple[str, int]]:
        """A service; its URL and process."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(self.python), "-m", "uvicorn", app, "--port", str(port), "--workers", str(workers)]
        environment = {**os.environ, "STORE": store, **more}
        quiet = [*command, "--log-level", "error"]
        with subprocess.Popen(quiet, cwd=self.folder, env=environment, start_new_session=True) as running:
            try:
                url = f"http://127.0.0.1:{port}"
                until(lambda: answers(f"{url}/docs"), f"{app} does not answer")
                yield url, running.pid
            finally:
                os.killpg(running.pid, signal.SIGTERM)
                try:
                    running.wait(30)
                finally:
                    with_group(running.pid)

    @contextmanager
    def shown(self, store: str) -> Iterator[str]:
        """The link to the page of a store."""
        command = [self.folder / "env" / "bin" / "perco", "ui", store, "--listen", "127.0.0.1:0"]
        with subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True) as running:
            try:
                assert running.stdout is not None
                yield running.stdout.readline().partition(": ")[2].strip()
            finally:
                running.terminate()


def with_group(pid: int) -> None:
    """Kill what is left of a group of processes."""
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5.0).status_code == 200
    except httpx.HTTPError:
        return False


def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def children(pid: int) -> list[int]:
    """The processes of a service that serve requests: those that have the store's modules."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, parent = status.read_text().rpartition(")")[2].split()[:2]
            command = (status.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(parent) == pid and b"spawn_main" in command:
            found.append(int(status.parent.name))
    return found


def link(number: int) -> dict[str, Any]:
    return {"url": f"https://example.org/{number}", "tags": [f"tag-{number % TAGS}"]}


async def put_all(url: str, killed: threading.Event) -> None:
    """Store all links; what fails because a worker dies is sent again, as a user's client would."""
    numbers = iter(range(TEXTS))

    async def sender(client: httpx.AsyncClient) -> None:
        for number in numbers:
            while True:
                try:
                    answer = await client.put(f"{url}/links/link-{number}", json=link(number))
                    if answer.status_code == 200:
                        break
                except httpx.HTTPError:
                    await trio.sleep(0.05)

    limits = httpx.Limits(max_connections=AT_ONCE)
    async with httpx.AsyncClient(timeout=30.0, limits=limits) as client, trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(sender, client)
    killed.set()


def kill_now_and_then(pid: int, done: threading.Event) -> int:
    """Kill a worker of the service, again and again. Returns how many."""
    rng, killed = random.Random(1), 0
    while killed < KILLS and not done.wait(rng.uniform(0.5, 1.5)):
        if found := children(pid):
            os.kill(rng.choice(found), signal.SIGKILL)
            killed += 1
    return killed


class Summaries(ThreadingHTTPServer):
    """A service that fails at first. `asked`: when it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.fails = True
        super().__init__(("127.0.0.1", 0), _Summary)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Summary(BaseHTTPRequestHandler):
    server: Summaries

    def do_GET(self) -> None:
        self.server.asked.append(time.monotonic())
        self.send_response(503 if self.server.fails else 200)
        self.end_headers()
        if not self.server.fails:
            self.wfile.write(f"summary of {self.path}".encode())

    def log_message(self, *_: object) -> None: ...


def is_tripped(place: Place) -> bool:
    found = json.loads(place.perco("status", "elsewhere", "--json"))
    return any(each["tripped"] for each in found["observers"])


def look_at(link: str) -> None:
    """See in a browser that an observer fails, and why; then a row with its versions."""
    base, _, token = link.partition("?token=")
    told = httpx.get(f"{base}api/store", headers={"authorization": f"Bearer {token}"}).json()
    assert {each["id"]: bool(each["tripped"]) for each in told["observers"]} == {"tags": False, "summary": True}
    if CHROMIUM is None:
        return
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(link)
        page.get_by_role("link", name=re.compile("^observer summary: tripped")).click()
        expect(page.get_by_role("alert")).to_contain_text("503")
        page.get_by_role("link", name="Data").click()
        page.get_by_role("navigation", name="Tables").get_by_role("link", name="bookmarks").click()
        page.get_by_label("prefix").fill("late")
        page.keyboard.press("Enter")
        page.get_by_role("link", name="late", exact=True).click()
        expect(page.get_by_role("region", name="address")).to_contain_text("https://example.org/late")
        browser.close()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("journey"))


def check(url: str) -> None:
    """All links are there, and the index has each under its tag."""
    for number in range(0, TEXTS, 97):
        assert httpx.get(f"{url}/links/link-{number}").json()["url"] == link(number)["url"]
    for tag in range(TAGS):
        found = httpx.get(f"{url}/tags/tag-{tag}", params={"fresh": True}, timeout=60.0)
        assert found.status_code == 200, found.text
        assert found.json() == {f"link-{n}": link(n)["url"] for n in range(tag, TEXTS, TAGS)}


def test_the_way_from_the_wheel_to_a_deploy(place: Place) -> None:
    assert "WRONG" not in place.perco("doctor", "store")
    # Two workers, of which one owns the store; now and then, one of them is killed.
    with place.serving("first:app", "store", workers=2) as (url, pid):
        done = threading.Event()
        deaths: list[int] = []
        killer = threading.Thread(target=lambda: deaths.append(kill_now_and_then(pid, done)))
        killer.start()
        trio.run(put_all, url, done)
        killer.join()
        assert deaths == [KILLS], "it ended before the workers were killed"
        until(lambda: len(children(pid)) == 2, "the workers were not started again")
        place.perco("ping", "store")
        until(lambda: answers(f"{url}/tags/tag-0?fresh=true"), "the index does not catch up")
        check(url)
        assert "full" in place.perco("backup", "store", "backups")
        [observer] = json.loads(place.perco("observers", "store", "--json"))
        assert (observer["id"], observer["waiting"]) == ("index tags", 0)
    place.perco("check", "store")
    # The backup, elsewhere.
    place.perco("restore", "backups", "elsewhere")
    place.perco("check", "elsewhere")
    with place.serving("first:app", "elsewhere") as (url, _):
        check(url)
    # The next version beside the first one. It renames a table, a column and an observer, and adds an observer.
    assert "is renamed to bookmarks" in place.perco("schema", "elsewhere", "service:schema")
    summaries = Summaries()
    asks = f"http://127.0.0.1:{summaries.server_port}"
    with (
        place.serving("first:app", "elsewhere") as (old, _),
        place.serving("service:app", "elsewhere", SUMMARIES=asks) as (new, _),
    ):
        httpx.put(f"{old}/links/late", json={"url": "https://example.org/late", "tags": ["tag-0"]}).raise_for_status()
        until(lambda: len(summaries.asked) > 50, "the observer was not run")
        found = httpx.get(f"{new}/bookmarks/late").json()
        assert (found["address"], found["summary"]) == ("https://example.org/late", None)
        until(lambda: is_tripped(place), "the observer was not tripped")
        with place.shown("elsewhere") as page:
            look_at(page)
        summaries.fails = False
        until(lambda: httpx.get(f"{new}/bookmarks/late").json()["summary"], "the observer did not go on")
        waits = json.loads(place.perco("top", "elsewhere", "--count", "1", "--json"))
        assert waits
    with place.serving("service:app", "elsewhere", SUMMARIES=asks) as (new, _):
        until(
            lambda: not any(each["waiting"] for each in json.loads(place.perco("observers", "elsewhere", "--json"))),
            "changes still wait",
        )
        for number in range(0, TEXTS, 97):
            found = httpx.get(f"{new}/bookmarks/link-{number}").json()
            assert found["address"] == link(number)["url"]
            assert found["summary"] == f"summary of /link-{number}".replace(" ", "%20").replace(
                "summary%20of%20", "summary of "
            )
    seconds = [int(at) for at in summaries.asked]
    assert max(map(seconds.count, set(seconds))) <= 200 + 400 + 3, "N15: the rate, and two seconds' worth"
    place.perco("check", "elsewhere")
