"""The common part of the programs: arguments, and lines of JSON that they read and print. It needs only Python."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.deriving.corpus import Chunk, derive

DERIVED: Final = "derived.db"  # the file of the derived table, in the folder of the program's state
TABLE: Final = "chunks"
POLL_S: Final = 0.001  # between two looks of a reader


@dataclass(frozen=True, slots=True)
class Job:
    """The arguments of a program.

    Attributes:
        state: the folder of all that it stores; files: the folder of the documents, of a program that reads files;
        documents: how many to load, of a program that loads them itself, or 0; version: of the function.
    """

    state: Path
    files: Path
    documents: int
    version: int

    @property
    def derived(self) -> Path:
        return self.state / DERIVED


def job() -> Job:
    parser = argparse.ArgumentParser()
    parser.add_argument("state", type=Path)
    parser.add_argument("files", type=Path)
    parser.add_argument("documents", type=int)
    parser.add_argument("version", type=int)
    return Job(**vars(parser.parse_args()))


def say(**said: Any) -> None:
    print(json.dumps(said), flush=True)


def orders() -> Iterator[dict[str, Any]]:
    """What the benchmark orders, until it says no more."""
    for line in sys.stdin:
        yield json.loads(line)


class Counted:
    """The pure function in one version. `calls`: how often it was called."""

    def __init__(self, version: int) -> None:
        self.version, self.calls = version, 0

    def __call__(self, text: str) -> list[Chunk]:
        self.calls += 1
        return derive(text, self.version)
