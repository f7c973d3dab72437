"""`perco bigtable init|check`: the table of a store on Bigtable."""

from __future__ import annotations

from typing import Annotated

import trio
import typer

from perco.bigtable import admin
from perco.bigtable.address import Place
from perco.cli.numbers import App
from perco.cli.screen import FINE, FOUND, perform, show_json

Url = Annotated[
    str, typer.Argument(metavar="URL", help="bigtable://PROJECT/INSTANCE?prefix=NAME, as perco.open takes it.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

bigtable: typer.Typer = App(no_args_is_help=True, rich_markup_mode=None, context_settings=_SETTINGS)


@bigtable.callback()
def _bigtable() -> None:
    """Stores whose rows are on Cloud Bigtable.

    `init` makes the table of a store; this needs the role roles/bigtable.admin. Programs that use the store need only
    roles/bigtable.user. If BIGTABLE_EMULATOR_HOST is set, all commands go to that emulator.

    \b
    Examples:
      perco bigtable init  'bigtable://acme/main?prefix=web'
      perco bigtable check 'bigtable://acme/main?prefix=web&app_profile=perco'
    """


@bigtable.command(name="init", short_help="Make a store's table.")
def _init(url: Url) -> None:
    """Make the table of a store, with its two column families, if it does not exist.

    \b
    Example:
      perco bigtable init 'bigtable://acme/main?prefix=web'
    """
    perform(_made, url)


async def _made(url: str) -> int:
    made = await trio.to_thread.run_sync(admin.init, url)
    print(f"{Place(url).table}: {'made' if made else 'it exists already'}")
    return FINE


@bigtable.command(name="check", short_help="Examine the table and the app profile.")
def _check(url: Url, json: Json = False) -> None:
    """Examine the table, its column families, and the app profile. Exits with 1 if there are findings.

    \b
    Example:
      perco bigtable check 'bigtable://acme/main?prefix=web'
    """
    perform(_checked, url, json=json)


async def _checked(url: str, *, json: bool) -> int:
    facts = await trio.to_thread.run_sync(admin.inspect, url)
    if json:
        show_json({"owner": facts.owner or None, "findings": facts.findings, "unknown": facts.unknown})
    else:
        print(f"{Place(url).shown}, owner: {facts.owner or 'none'}")
        for finding in facts.findings:
            print(f"- {finding}")
        for unknown in facts.unknown:
            print(f"? {unknown}")
        if not facts.findings:
            print("nothing is wrong")
    return FOUND if facts.findings else FINE


def register(app: typer.Typer) -> None:
    """Add these commands to the app."""
    app.add_typer(bigtable, name="bigtable", short_help="Stores whose rows are on Cloud Bigtable.")
