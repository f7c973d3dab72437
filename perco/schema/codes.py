"""Code as an input: has the code changed that a version of an observer was registered with?"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from perco.schema.catalogue import Catalogue
from perco.schema.schema import Schema

log: logging.Logger = logging.getLogger("perco.code")


def changed(catalogue: Catalogue, schema: Schema) -> dict[str, int]:
    """The views whose code has changed since their present version was registered: the versions, by `Code.of`."""
    found = {}
    for observer in schema.observers.values():
        entry = catalogue.observers.get(observer.id)
        if observer.code is not None and entry is not None and entry.version == observer.version and entry.code:
            now = observer.code.fingerprint()
            if now and now != entry.code:
                found[observer.code.of] = observer.version
    return found


def tell_changed(catalogue: Catalogue, schema: Schema) -> None:
    """Log a warning for each part of a program whose code has changed without a new version."""
    for of, version in changed(catalogue, schema).items():
        log.warning(
            "the code of %s has changed since its version %d was registered: its earlier results are not computed "
            "again. `perco views diff` shows whether the results are other ones. If so, raise its version=; if not, "
            "run `perco views accept`",
            of,
            version,
        )


def with_codes(catalogue: Catalogue, codes: Mapping[str, str]) -> Catalogue:
    """The next version, with other fingerprints of observers' code; `codes`: by the observers' ids."""
    differing = {
        id: replace(catalogue.observers[id], code=code)
        for id, code in codes.items()
        if id in catalogue.observers and catalogue.observers[id].code != code
    }
    if not differing:
        return catalogue
    return replace(catalogue, version=catalogue.version + 1, observers={**catalogue.observers, **differing})
