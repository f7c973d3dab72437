"""The address of a store on Bigtable: `bigtable://PROJECT/INSTANCE?prefix=NAME`.

    Place("bigtable://acme/main?prefix=web")    its rows are in the table `web` of the instance

`app_profile=NAME` names an app profile that routes to a single cluster and allows single-row transactions; without this
parameter, calls use the instance's default profile. If BIGTABLE_EMULATOR_HOST is set, calls go to that host, without
TLS and without credentials.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from perco.errors import UsageError

SCHEME: Final = "bigtable://"
_EXAMPLE: Final = "bigtable://PROJECT/INSTANCE?prefix=NAME"
_NAME: Final = re.compile(r"[a-zA-Z0-9_.-]{1,50}")
_WORD: Final = re.compile(r"[a-zA-Z0-9:._-]+")


def is_bigtable(url: str) -> bool:
    """Whether `url` is the address of a store on Bigtable."""
    return url.startswith(SCHEME)


@dataclass(frozen=True, slots=True)
class Place:
    """A parsed address.

    Attributes: `instance` and `table`, the full names that Bigtable uses; `prefix`, the table's short name;
    `app_profile`, "" for the default profile; `emulator`, the emulator's address, "" for the service; `shown`, the
    address as messages show it. Raises: UsageError.
    """

    url: str
    instance: str = field(init=False)
    prefix: str = field(init=False)
    table: str = field(init=False)
    app_profile: str = field(init=False)
    emulator: str = field(init=False)
    shown: str = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        project, instance = parts.netloc, parts.path.strip("/")
        if not _WORD.fullmatch(project) or not _WORD.fullmatch(instance):
            raise UsageError(f"{self.url!r}: which project and instance? Write {_EXAMPLE}")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        prefix, profile = given.pop("prefix", "perco"), given.pop("app_profile", "")
        if given or parts.fragment:
            named = ", ".join(sorted(given)) or f"#{parts.fragment}"
            raise UsageError(f"{self.url!r} has {named}: it may have prefix= and app_profile= only")
        if not _NAME.fullmatch(prefix):
            raise UsageError(
                f"prefix={prefix!r}: that is the name of the store's table. Use at most 50 letters, digits, '_', '-' "
                f"and '.': {_EXAMPLE}"
            )
        if profile and not _NAME.fullmatch(profile):
            raise UsageError(f"app_profile={profile!r}: that is not the name of an app profile")
        name = f"projects/{project}/instances/{instance}"
        own = f"&app_profile={profile}" if profile else ""
        for key, value in {
            "instance": name,
            "prefix": prefix,
            "table": f"{name}/tables/{prefix}",
            "app_profile": profile,
            "emulator": os.environ.get("BIGTABLE_EMULATOR_HOST", ""),
            "shown": f"{SCHEME}{project}/{instance}?prefix={prefix}{own}",
        }.items():
            object.__setattr__(self, key, value)
