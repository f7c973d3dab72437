"""`perco ping`: whether the process that owns a store answers."""

from __future__ import annotations

import time

import trio

from perco.cli.screen import FINE, FOUND, complain, show_json
from perco.serve.client import remote_owner
from perco.serve.opening import visiting


async def ping(store: str, *, timeout_s: float, json: bool) -> int:
    """Ask the owner of a store for something small, and say how long the answer took."""
    began = time.perf_counter()
    with trio.move_on_after(timeout_s):
        async with visiting(store) as db:
            connected_s = time.perf_counter() - began
            began = time.perf_counter()
            process = (await remote_owner(db).folder()).process
            answered_s = time.perf_counter() - began
        if json:
            show_json({"process": process, "connected_ms": 1000 * connected_s, "answered_ms": 1000 * answered_s})
        else:
            print(f"process {process} answered in {1000 * answered_s:.1f} ms, {1000 * connected_s:.1f} ms to connect")
        return FINE
    complain(f"the owner of {store} has not answered within {timeout_s:g} s")
    return FOUND
