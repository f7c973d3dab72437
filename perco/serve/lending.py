"""Serves a folder for as long as its borrower lives: `python -m perco.serve.lending`.

The borrower is a job that starts this program as a child process. It writes one line of JSON to this process's standard
input, reads one line from its standard output, and keeps the input open. When the input ends, for whatever reason,
serving ends, and the folder can be opened again. The line of input also carries the secrets, so they appear in no
command line and in no environment.

    {"path": ..., "pid": the borrower, "durability": ..., "listen": ["tls://HOST:0"], "token": ..., "certificate": PEM,
     "key": PEM}
    {"at": ["tls://HOST:PORT"]}     or     {"error": the error, as it crosses the wire, in hex}

If another process has the folder open, that process serves it; this one does not listen, and answers {"at": []}. When
that process ends, this one serves the folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgpack
import trio

from perco.database.options import Options
from perco.errors import PercoError, StoreError
from perco.rpc import addresses
from perco.rpc.crossing import pack_error
from perco.schema.schema import Schema
from perco.serve.client import is_client
from perco.serve.opening import open
from perco.serve.server import Server
from perco.tuning import tune_gc

_ORDER_BYTES_MAX: Final = 1 << 20
_READ_BYTES: Final = 1 << 16
_AGAIN_S: Final = 0.2


async def _main() -> int:
    order = json.loads(sys.stdin.buffer.readline(_ORDER_BYTES_MAX))
    options = Options(durability=order["durability"])
    told = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_until_end, nursery.cancel_scope)
        nursery.start_soon(_until_death, order["pid"], nursery.cancel_scope)
        while True:
            opening = open(order["path"], Schema(), options=options)
            try:
                async with opening as db:
                    if not is_client(db) and opening.server is not None:
                        async with _listening(opening.server, order) as at:
                            if not told:
                                _tell({"at": at})
                            await trio.sleep_forever()
            except PercoError as error:
                if not told:
                    _tell({"error": msgpack.packb(pack_error(error)).hex()})
                    nursery.cancel_scope.cancel()
                    return 1
                if not isinstance(error, StoreError):  # the owner is ending, or starting
                    raise
            if not told:
                _tell({"at": []})
                told = True
            await trio.sleep(_AGAIN_S)
    return 0


async def _until_end(scope: trio.CancelScope) -> None:
    """Cancel at the end of standard input."""
    while True:
        await trio.lowlevel.wait_readable(0)
        if not os.read(0, _READ_BYTES):
            scope.cancel()
            return


async def _until_death(pid: int, scope: trio.CancelScope) -> None:
    """Cancel when the borrower dies. Its pipes may stay open then, because children that it has forked may have
    them."""
    handle = os.pidfd_open(os.getppid())
    try:
        if os.getppid() == pid:
            await trio.lowlevel.wait_readable(handle)
        scope.cancel()
    finally:
        os.close(handle)


@asynccontextmanager
async def _listening(server: Server, order: dict[str, Any]) -> AsyncIterator[list[str]]:
    at = []
    async with AsyncExitStack() as stack:
        with tempfile.TemporaryDirectory(prefix="perco-") as temporary:  # ssl reads keys from files only
            tls = None
            if order["certificate"]:
                tls = _written(temporary, "certificate", order), _written(temporary, "key", order)
            for text in order["listen"]:
                address, token = addresses.parse(text), order["token"].encode()
                at.append(str(await stack.enter_async_context(server.listening(address, token, tls))))
        yield at


def _written(folder: str, what: str, order: dict[str, Any]) -> str:
    path = Path(folder, what)
    path.touch(mode=0o600)
    path.write_text(order[what])
    return str(path)


def _tell(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the borrower, which ends this process
    tune_gc()
    sys.exit(trio.run(_main))
