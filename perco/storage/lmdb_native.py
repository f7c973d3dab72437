"""Whether the hot path of LMDB environments runs outside the interpreter, and if not, why.

The extension `perco.storage._native` (native/native.h) writes batches and reads rows in environments that py-lmdb has
opened; without it, `lmdb_engine.py` does the same in Python. Both write the same bytes. The extension is left out if no
compiler was there when perco was installed, if it does not recognize this py-lmdb, and with PERCO_NATIVE=0.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import lmdb

from perco.storage.cells import APPLIED, Refused
from perco.storage.keys import escape, unescape

VARIABLE: Final = "PERCO_NATIVE"
_MAP_FULL: Final = -30792

_log = logging.getLogger("perco.storage")


@cache
def _module() -> ModuleType | str:
    """The extension, or why it is not used."""
    found = _load()
    if isinstance(found, str):
        level = logging.INFO if found.startswith(VARIABLE) else logging.WARNING
        _log.log(level, "perco's C extension is not used, so its LMDB stores are slower: %s", found)
    return found


def _load() -> ModuleType | str:
    if os.environ.get(VARIABLE, "1") == "0":
        return f"{VARIABLE}=0"
    try:
        native = import_module("perco.storage._native")
    except ImportError:
        return "perco was installed without its C extension, which needs a C compiler"
    try:
        from lmdb import cpython  # type: ignore[attr-defined]
    except ImportError:
        return "py-lmdb runs on cffi here"
    try:
        native.use(os.fsencode(cpython.__file__), APPLIED, Refused, escape, unescape)
    except native.Unverified as error:
        return f"py-lmdb {lmdb.__version__} cannot be used: {error}"
    return native


def native_why_not() -> str:
    """Why the extension is not used; empty: it is."""
    found = _module()
    return found if isinstance(found, str) else ""


def environment(env: lmdb.Environment, path: Path, groups: Iterable[str]) -> Any | None:
    """The extension's view of an open environment; None: it is not used.

    Verified at each opening: see `find_env` in native/environment.c.
    """
    module = _module()
    if isinstance(module, str):
        return None
    info = env.info()
    try:
        found = module.Environment(env, os.fsencode(path), env.stat()["psize"], info["map_size"])
        for group in groups:
            found.add(group)
    except module.Unverified as error:
        _log.warning("%s: reads and writes take the slower path: %s", path, error)
        return None
    return found


def leaves() -> Any | None:
    """The extension's functions on pages of leaves (native/leaves.c); None: it is not used."""
    module = _module()
    return None if isinstance(module, str) else module


def completions() -> Any:
    """A list of the batches that writers have written, for the loop (native/writing.c)."""
    module = _module()
    assert not isinstance(module, str)
    return module.Completions()


def writer(reports_to: Any) -> Any:
    """A writer's queue (native/writing.c)."""
    module = _module()
    assert not isinstance(module, str)
    return module.Writer(reports_to)


def error_of(failure: tuple[int, str, int]) -> lmdb.Error:
    """The error of py-lmdb for a commit that failed in the extension."""
    code, text, _ = failure
    return lmdb.MapFullError(text) if code == _MAP_FULL else lmdb.Error(f"mdb_txn_commit: {text}")
