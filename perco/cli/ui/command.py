"""The command `perco ui`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Final

import typer

from perco.cli import logs
from perco.cli.logs import Level
from perco.cli.observed import LogJson, LogLevel, Store
from perco.cli.screen import complain, perform_alone

_NEEDS: Final = ("starlette", "hypercorn")
MISSING: Final = "the page needs an extra: pip install 'perco[ui]'"


def is_installed() -> bool:
    """Whether the packages that the page needs are here."""
    return all(importlib.util.find_spec(name) for name in _NEEDS)


def ui(
    store: Store,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to serve the page; port 0: any free port.")
    ] = "localhost:7430",
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="A certificate: serve the page over TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="The private key, if in a separate file.")] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="Let every user and program of this host see the page.")
    ] = False,
    log_level: LogLevel = Level.warning,
    log_json: LogJson = False,
) -> None:
    """Serve a page that shows a store at work, until SIGTERM or Ctrl-C.

    Open the printed link in a browser. The page shows the observers as a graph, with how far each one lags behind;
    waiting and failed changes, with tracebacks; rows with their versions and with what they came from; tablets by size
    and by how busy they are; and what holds history back. Observers can be paused and resumed, and failed changes
    replayed and dropped.

    The page needs the token in the link, a new one each time. To choose it, set PERCO_UI_TOKEN to at least 16 letters,
    digits, - and _. An address that other hosts can reach needs TLS; or listen on localhost, behind a proxy that has
    TLS. /healthz answers 200 while the store's owner answers, and needs no token.

    This process serves the page. It reads the files of a store's folder beside the store's owner, as the other commands
    do. A store in a database has no files: name the address of its `perco serve`, or serve it with --ui.

    \b
    Examples:
      perco ui web/
      perco ui tcp://localhost:7420 --listen localhost:8080
      perco ui web/ --listen 0.0.0.0:7430 --tls-cert cert.pem --tls-key key.pem
      curl -s -H 'Authorization: Bearer TOKEN' localhost:7430/api/samples
    """
    if not is_installed():
        complain(MISSING)
        raise typer.Exit(2)
    from perco.cli.ui.running import run

    logs.begin(log_level, as_json=log_json)
    perform_alone(run, store, listen, tls_cert, tls_key, open_to_all=no_token)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(ui)
