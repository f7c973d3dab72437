"""Serves the page of `perco ui` until it is asked to end."""

from __future__ import annotations

import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Final

import hypercorn
import hypercorn.trio
import trio

from perco.cli import systemd
from perco.cli.screen import FINE
from perco.cli.signals import asked_on_trio
from perco.cli.ui.acting import Acting
from perco.cli.ui.app import made
from perco.cli.ui.asking import Asking
from perco.cli.ui.guard import Guard
from perco.cli.ui.listening import Listening, must_be_certificate, parent
from perco.cli.ui.shelf import Shelf
from perco.cli.ui.watching import Watch
from perco.serve.children import die_with

_ENDS_S: Final = 2.0  # how long requests in progress may go on at the end


async def run(store: str, listen: str, certificate: Path | None, key: Path | None, *, open_to_all: bool) -> int:
    """Serve the page until SIGTERM or SIGINT. `open_to_all`: without a token."""
    must_be_certificate(certificate, key)
    if (keeper := parent()) is not None:
        die_with(keeper)
    shelf = Shelf(store)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(shelf.run)
        with (
            closing(Listening(listen, tls=certificate is not None, open_to_all=open_to_all)) as listening,
            asked_on_trio() as asked,
        ):
            if keeper is None:
                async with shelf.reading():
                    pass  # the store can be read; otherwise the command fails here
            guard = Guard(listening.token, listening.port, tls=certificate is not None)
            watch = Watch(shelf)
            nursery.start_soon(watch.run)
            app = made(Asking(shelf, watch), Acting(shelf), guard)
            if keeper is None:
                nursery.start_soon(systemd.told)
                print(f"the page of {store}: {listening.url}", flush=True)
            config = _config(listening, certificate, key)
            await hypercorn.trio.serve(app, config, shutdown_trigger=asked.wait, mode="asgi")  # type: ignore[arg-type]
            if keeper is None:
                systemd.tell("STOPPING=1")
        nursery.cancel_scope.cancel()
    return FINE


def _config(listening: Listening, certificate: Path | None, key: Path | None) -> hypercorn.Config:
    config = hypercorn.Config()
    config.bind = [f"fd://{os.dup(listening.listener.fileno())}"]
    config.accesslog = None
    config.errorlog = logging.getLogger("perco.store")
    config.graceful_timeout = config.shutdown_timeout = _ENDS_S
    config.include_server_header = False
    if certificate is not None:
        config.certfile = str(certificate)
        config.keyfile = str(key or certificate)
    return config
