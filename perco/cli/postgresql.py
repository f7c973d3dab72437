"""`perco postgresql init|check`: the tables of a store on PostgreSQL, and its server."""

from __future__ import annotations

from typing import Annotated

import typer

from perco.cli.numbers import App
from perco.cli.screen import FINE, FOUND, perform, show_json
from perco.postgresql import admin
from perco.postgresql.address import Place
from perco.postgresql.statements import TABLES

Url = Annotated[
    str, typer.Argument(metavar="URL", help="postgresql://USER@HOST/DATABASE?prefix=NAME, as perco.open takes it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

postgresql: typer.Typer = App(no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)


@postgresql.callback()
def _postgresql() -> None:
    """Stores whose rows are on PostgreSQL.

    The first process that opens such a store makes its tables, if its role may. If an administrator makes them with
    these commands instead, the program's role needs no right to make tables.

    \b
    Examples:
      perco postgresql init  'postgresql://admin@db/shop?prefix=web' --grant app
      perco postgresql check 'postgresql://app@db/shop?prefix=web'
    """


@postgresql.command(name="init", short_help="Make a store's tables, and grant rights on them.")
def _init(
    url: Url,
    grant: Annotated[
        list[str] | None, typer.Option("--grant", metavar="ROLE", help="A role that programs run as; repeatable.")
    ] = None,
) -> None:
    """Make the tables of a store if they do not exist, and grant roles the rights that they need on them.

    \b
    Example:
      perco postgresql init 'postgresql://admin@db/shop?prefix=web' --grant app
    """
    perform(_made, url, grant or [])


async def _made(url: str, grant: list[str]) -> int:
    made = await admin.init(url, grant)
    place = Place(url)
    tables = ", ".join(f"{place.prefix}_{name}" for name in TABLES)
    print(f"{tables}: {'made' if made else 'they exist already'}")
    for role in grant:
        print(f"{role} may read and write them")
    return FINE


@postgresql.command(name="check", short_help="Examine the server, the tables and the rights.")
def _check(url: Url, json: Json = False) -> None:
    """Examine the server's settings, the tables, and the rights of the role that connects. Exits with 1 if there are
    findings.

    \b
    Example:
      perco postgresql check 'postgresql://app@db/shop?prefix=web'
    """
    perform(_checked, url, json=json)


async def _checked(url: str, *, json: bool) -> int:
    facts = await admin.inspect(url)
    if json:
        show_json(
            {
                "version": facts.version,
                "owner": facts.owner or None,
                "address": facts.address or None,
                "cells": facts.cells,
                "dead": facts.dead,
                "used_bytes": facts.used_bytes,
                "findings": facts.findings,
            }
        )
    else:
        print(f"PostgreSQL {facts.version}, {Place(url).shown}")
        print(f"owner: {facts.owner or 'none'}{f', at {facts.address}' if facts.address else ''}")
        size = facts.used_bytes / (1 << 20)
        print(f"about {facts.cells:,} cells, {facts.dead:,} dead; {size:,.1f} MiB with indexes")
        for finding in facts.findings:
            print(f"- {finding}")
        if not facts.findings:
            print("nothing is wrong")
    return FOUND if facts.findings else FINE


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.add_typer(postgresql, name="postgresql", short_help="Stores whose rows are on PostgreSQL.")
