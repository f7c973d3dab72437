"""Copies of a store's folder that stand for the folder itself, as a disk holds it at one moment."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perco.storage.identity import identity_of, put_identity


def copy_as_itself(folder: Path, to: Path, *, ignore: Callable[..., Any] | None = None) -> Path:
    """Copy a store. The copy takes its place in a test, so it has the same identity (I1)."""
    shutil.copytree(folder, to, ignore=ignore)
    return as_itself(to)


def as_itself(folder: Path) -> Path:
    """Let perco take a copy for the store itself."""
    if id := identity_of(folder).id:
        put_identity(folder, id)
    return folder
