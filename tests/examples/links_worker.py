"""One of several workers of `examples/fastapi_app.py`: `python -m tests.examples.links_worker FOLDER NAME`.

It says "up" when it serves. On a line from stdin it makes requests of itself, and prints the answers.
It ends when stdin does.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings

import httpx

from examples.fastapi_app import make_app

ROUNDS = 8


async def work(folder: str, name: str) -> None:
    app = make_app(folder)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://links") as client:
            print("up", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
            answers = []
            for i in range(ROUNDS):
                link = {"url": f"https://{name}.example/{i}", "tags": [f"{name}-{i}"]}
                put = await client.put(f"/links/{name}-{i}", json=link)
                fresh = await client.get(f"/tags/{name}-{i}", params={"fresh": True})
                answers.append((put.status_code, fresh.status_code, fresh.json()))
            print(json.dumps(answers), flush=True)
            await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    asyncio.run(work(*sys.argv[1:]))
