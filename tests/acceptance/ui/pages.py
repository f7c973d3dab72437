"""A page of `perco ui` for tests: its command as a process, and what it answers."""

from __future__ import annotations

import re
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import trio

from tests.acceptance.cli import stores

HEADERS = {"content-type": "application/json"}


class Page:
    """What a page answers."""

    def __init__(self, url: str, client: httpx.AsyncClient, process: trio.Process | None = None) -> None:
        self.url, self.client, self.process = url, client, process
        parts = urlsplit(url)
        self.base = f"{parts.scheme}://{parts.netloc}"
        self.token = parts.query.removeprefix("token=")

    async def get(self, name: str, code: int = 200, **parameters: object) -> Any:
        headers = {"authorization": f"Bearer {self.token}"}
        answer = await self.client.get(f"{self.base}/api/{name}", params=_texts(parameters), headers=headers)
        assert answer.status_code == code, answer.text
        return answer.json()

    async def act(self, name: str, code: int = 200, *, headers: Mapping[str, str] = {}, **body: object) -> Any:
        headers = {"authorization": f"Bearer {self.token}", **headers}
        answer = await self.client.post(f"{self.base}/api/do/{name}", json=body, headers=headers)
        assert answer.status_code == code, answer.text
        return answer.json()

    async def until(self, name: str, that: Callable[[Any], object], **parameters: object) -> Any:
        """What is answered, once it is as wanted: the page reads a folder up to a second behind."""
        while not that(found := await self.get(name, **parameters)):  # noqa: ASYNC110 - another process makes it so
            await trio.sleep(0.1)
        return found

    async def sample(self, that: Callable[[Any], object] = lambda sample: True) -> Any:
        """The first sample that is as wanted."""
        number = 0
        while True:
            for sample in (await self.get("samples", after=number))["samples"]:
                number = sample["number"]
                if that(sample):
                    return sample
            await trio.sleep(0.1)


def _texts(parameters: Mapping[str, object]) -> dict[str, str]:
    return {name.rstrip("_"): str(value) for name, value in parameters.items()}


@asynccontextmanager
async def shown(*arguments: object, trust: ssl.SSLContext | None = None) -> AsyncIterator[Page]:
    """`perco ui` of a store."""
    command = stores.command("ui", *arguments, "--listen", "127.0.0.1:0")
    verify = trust or ssl.create_default_context()
    async with stores.started(command) as process, httpx.AsyncClient(timeout=30, verify=verify) as client:
        line = await stores.Lines(process.stdout).next()
        found = re.search(r"https?://\S+", line)
        assert found, line
        yield Page(found[0], client, process)
        process.terminate()
        with trio.fail_after(20):
            assert await process.wait() == 0
