"""How executors reach a store, and how a folder is served while a job runs."""

from __future__ import annotations

import datetime
import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgpack
import trustme
from pyspark.sql import SparkSession

import perco
from perco import otel
from perco.errors import StoreLocked, Unavailable, UsageError
from perco.rpc import addresses
from perco.rpc.addresses import Address
from perco.rpc.crossing import unpack_error
from perco.serve import tokens
from perco.serve.databases import is_database
from perco.serve.opening import SOCKET, joining, open
from perco.storage import owner

WHERE: Final = "where Python looks; spark.addArtifacts sends one to the executors"  # ends the error "no module ..."
_TOKEN_BYTES: Final = 24
_VALID: Final = datetime.timedelta(days=30)
_END_S: Final = 60.0
_DESCRIPTION: Final = "spark.job.description"


@dataclass(frozen=True, kw_only=True, slots=True)
class Store:
    """The address of a served store, and its credentials. A plain value that Spark sends in the closures of a job.

    Attributes:
        url: "unix:PATH", "tcp://HOST:PORT" or "tls://HOST:PORT"; or a folder that a process of this machine has open;
            or "postgresql://USER@HOST/DATABASE?prefix=NAME" or "bigtable://PROJECT/INSTANCE?prefix=NAME", a store that
            executors read and write directly, as clients of `perco serve --direct`.
        token: the token that a server on TCP requires. Not shown by `repr`.
        ca: the PEM certificates, or a file of them, against which the certificate of a tls:// server is checked; "":
            the system's.
        folder: the folder that the server has open, if it is known; executors on the server's machine read a table's
            files in it themselves.
        mounts: which files the server's process sees, if it is known: what `mounts()` returns there. An executor that
            sees the same ones connects to the socket in the folder.
        traceparent: the trace context in which this was made, by W3C: the tasks' transactions belong to that trace
            (`perco.otel`).
    """

    url: str
    token: str = field(default="", repr=False)
    ca: str = field(default="", repr=False)
    folder: str = ""
    mounts: str = ""
    traceparent: str = field(default_factory=otel.traceparent)

    def options(self) -> perco.Options:
        return perco.Options(
            wire=perco.options.WireOptions(ca_file=self.ca),
            postgresql=perco.options.PostgresqlOptions(own=False),
            bigtable=perco.options.BigtableOptions(own=False),
        )

    @property
    def is_served(self) -> bool:
        """Whether executors on other machines can reach the store at this address."""
        return addresses.is_address(self.url) or is_database(self.url)

    def at(self) -> str:
        """The address at which this process connects: the socket in the server's folder, if it can be used here."""
        if self.folder and self.mounts and self.mounts == mounts():
            path = Path(self.folder) / SOCKET
            try:
                if path.is_socket() and os.access(path, os.W_OK):
                    return f"unix:{path}"
            except PermissionError:  # another user's folder
                pass
        return self.url

    def _token(self, at: str) -> str | None:
        return self.token or None if at == self.url else None

    def joining(self) -> joining:
        """Open the store with its own schema."""
        at = self.at()
        return joining(at, options=self.options(), token=self._token(at))

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[perco.Database]:
        """Open the store for reading, with its own schema: through the process that serves it or, if no process has the
        folder open, from the folder's files."""
        async with AsyncExitStack() as stack:
            try:
                db = await stack.enter_async_context(self.joining())
            except Unavailable:
                if self.is_served:
                    raise
                db = await stack.enter_async_context(open(self.url, readonly=True))
            yield db

    def open(self, schema: perco.Schema) -> open:
        """Open the store with a program's schema."""
        at = self.at()
        return open(at, schema, options=self.options(), token=self._token(at))


def mounts() -> str:
    """Tells processes that see the same files at the same paths: those of one boot, with the same mounts; "": this
    system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/mnt')}"
    except OSError:
        return ""


@asynccontextmanager
async def in_task(store: Store, opening: AbstractAsyncContextManager[perco.Database]) -> AsyncIterator[perco.Database]:
    """Open a store in a task. Raises: Unavailable, with a remedy, if this machine cannot reach the store; the errors of
    `opening`."""
    async with AsyncExitStack() as stack:
        try:
            db = await stack.enter_async_context(opening)
        except Unavailable as error:
            raise Unavailable(
                f"the executor on {socket.gethostname()} does not reach the store at {store.at()} ({error.what})",
                remedy="If the driver serves it, give an address of the driver's machine that executors can reach, "
                "with serve(host=...) or spark.driver.host; otherwise start its server at such an address. Open its "
                "port in the firewall.",
            ) from error
        with otel.resumed(db, store.traceparent):
            yield db


@contextmanager
def described(spark: SparkSession, what: str) -> Iterator[None]:
    """Spark's UI shows `what` for the jobs of the block, unless the user has described them."""
    context = spark.sparkContext
    if context.getLocalProperty(_DESCRIPTION):
        yield
        return
    context.setLocalProperty(_DESCRIPTION, what)
    try:
        yield
    finally:
        context.setLocalProperty(_DESCRIPTION, None)  # type: ignore[arg-type]


def reached(store: str | os.PathLike[str] | Store) -> Store | None:
    """The store, if it is already served; None: it is a folder that has to be served.

    Raises: UsageError.
    """
    if isinstance(store, Store):
        return store if store.is_served else None
    if not isinstance(store, str | os.PathLike):
        raise UsageError(f"store= takes a folder, an address or a perco.spark.Store, not {store!r}")
    text = os.fspath(store)
    if text == "memory:":
        raise UsageError('executors cannot reach a store that is in memory: give a folder, as in "store/"')
    if is_database(text):
        return Store(url=text, token=os.environ.get("PERCO_TOKEN", ""))
    if not addresses.is_address(text):
        return None
    address = addresses.parse(text)
    token = os.environ.get("PERCO_TOKEN", "") or tokens.find(address).decode()
    return Store(url=text, token=token)


@contextmanager
def serve(
    folder: str | os.PathLike[str] | Store, spark: SparkSession, *, host: str | None = None, durability: str = "power"
) -> Iterator[Store]:
    """Serve a folder to the executors of a session while the block lasts.

    A child process serves the folder. It ends when the block ends, or when this process dies for any reason; then the
    folder can be opened again. The child listens on a socket in the folder, for this user alone. Unless the executors
    are on this machine (`local[n]`), it also listens with TLS on a port of this machine, with a certificate and a token
    made for this block; executors that see the same files as this process use the socket nevertheless. If `folder` is
    an address or a `Store` that is already served, it is passed on.

    Args:
        folder: is made if there is none.
        host: the address at which executors reach this machine; by default Spark's setting, `spark.driver.host`.
        durability: as in `perco.Options`.

    Raises: StoreLocked if another process has the folder open and the executors are elsewhere; UsageError, and the
    errors of `perco.open`.
    """
    store = reached(folder)
    if store is not None:
        yield replace(store, traceparent=otel.traceparent() or store.traceparent)
        return
    path = Path(folder.url if isinstance(folder, Store) else folder).expanduser().absolute()
    master = str(spark.sparkContext.master)
    here = master.startswith("local") and not master.startswith("local-cluster")
    order: dict[str, Any] = {"path": str(path), "durability": durability, "listen": [], "pid": os.getpid()}
    order |= {"token": "", "certificate": "", "key": ""}
    ca = ""
    if not here:
        host = host or str(spark.conf.get("spark.driver.host"))
        order["certificate"], order["key"], ca = _certificate(host)
        order["token"] = secrets.token_hex(_TOKEN_BYTES)
        order["listen"] = [str(Address(None, host, 0, tls=True))]
    child = subprocess.Popen(
        [sys.executable, "-m", "perco.serve.lending"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()
    )
    with child:
        try:
            at = _ordered(child, order, path)
            if here or not order["listen"]:
                yield Store(url=f"unix:{path / SOCKET}")
            else:
                yield Store(url=at[0], token=order["token"], ca=ca, folder=str(path), mounts=mounts())
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise


def _environment() -> dict[str, str]:
    """The child's environment, with which the child finds the modules that this process finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _ordered(child: subprocess.Popen[bytes], order: dict[str, Any], path: Path) -> list[str]:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(json.dumps(order).encode() + b"\n")
    child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        raise Unavailable(
            f"the process started to serve {path} ended with exit code {child.wait()}", remedy="Its stderr says why."
        )
    answer = json.loads(line)
    if "error" in answer:
        raise unpack_error(msgpack.unpackb(bytes.fromhex(answer["error"])))
    if order["listen"] and not answer["at"]:
        raise StoreLocked(str(path), *owner(path))
    at: list[str] = answer["at"]
    return at


def _certificate(host: str) -> tuple[str, str, str]:
    """(certificate, key, authority) for this host, as PEM, made for one `serve`. The authority's key is not kept."""
    authority = trustme.CA()
    issued = authority.issue_cert(host, not_after=datetime.datetime.now(datetime.UTC) + _VALID)
    chain = "".join(each.bytes().decode() for each in issued.cert_chain_pems)
    return chain, issued.private_key_pem.bytes().decode(), authority.cert_pem.bytes().decode()
