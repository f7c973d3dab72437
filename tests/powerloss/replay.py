"""Power fails at a moment, and leaves some of what was on its way: which cases there are, and trying one.

A *case* is a moment, and the part of the changes unsure then that had arrived. For each moment: none of them, all, all
but one, only one, random subsets; and writes of which only some sectors arrived.
"""

from __future__ import annotations

import json
import os
import random
import resource
import selectors
import shutil
import signal
import sys
import tempfile
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.powerloss.disk import SECTOR, Disk, sectors

_RANDOM: Final = 3  # subsets of each moment, and as many with torn writes
_ONES_MAX: Final = 24  # changes of one moment that are dropped, and kept, alone: of more, as many are drawn


class Case(NamedTuple):
    """`kept`: indices into the disk's changes; `torn`: of some of them the sectors that arrived."""

    moment: int
    kind: str
    kept: frozenset[int]
    torn: Mapping[int, frozenset[int]]

    def __str__(self) -> str:
        torn = f", torn {sorted(self.torn)}" if self.torn else ""
        return f"moment {self.moment}, {self.kind}: arrived {sorted(self.kept)}{torn}"


def cases(disk: Disk, rng: random.Random, *, moments: Sequence[int] | None = None) -> Iterator[Case]:
    """All cases of some moments, or of all."""
    for moment in disk.moments() if moments is None else moments:
        unsure = disk.unsure(moment)
        everything = frozenset(unsure)
        yield Case(moment, "none", frozenset(), {})
        if not unsure:
            continue
        yield Case(moment, "all", everything, {})
        ones = unsure if len(unsure) <= _ONES_MAX else rng.sample(unsure, _ONES_MAX)
        if len(unsure) > 1:
            for one in ones:
                yield Case(moment, "all but one", everything - {one}, {})
                yield Case(moment, "one", frozenset([one]), {})
        for _ in range(_RANDOM if len(unsure) > 2 else 0):
            yield Case(moment, "some", frozenset(one for one in unsure if rng.random() < 0.5), {})
        tearable = [one for one in unsure if len(disk.changes[one].data or b"") > SECTOR]
        for _ in range(_RANDOM if tearable else 0):
            kept = frozenset(one for one in unsure if rng.random() < 0.7) | {rng.choice(tearable)}
            torn = {
                one: frozenset(sector for sector in sectors(disk.changes[one]) if rng.random() < 0.5)
                for one in tearable
                if one in kept
            }
            yield Case(moment, "torn", kept, torn)


def sample(disk: Disk, rng: random.Random, count: int) -> list[Case]:
    """About so many cases, spread over all moments, at least one of each kind that there is."""
    moments = disk.moments()
    every = [list(cases(disk, rng, moments=[moment])) for moment in moments]
    total = sum(map(len, every))
    chosen = []
    for of_moment in every:
        chosen += [case for case in of_moment if rng.random() < count / total]
    for kind in sorted({case.kind for of_moment in every for case in of_moment} - {case.kind for case in chosen}):
        chosen.append(rng.choice([case for of_moment in every for case in of_moment if case.kind == kind]))
    return chosen


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, if the machine has one: power losses are modelled, so nothing need be written to a disk."""
    shm = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="perco-", dir=shm if shm.is_dir() else None)


def lose(disk: Disk, case: Case, folder: Path, verify: Callable[[Path, Sequence[str]], None]) -> str:
    """Leave what a power loss leaves, and look at the store in it; returns what is wrong, or ""."""
    shutil.rmtree(folder, ignore_errors=True)
    disk.leave(folder, case.moment, case.kept, case.torn)
    try:
        verify(folder / "store", disk.known(case.moment))
    except Exception as error:
        return "".join(traceback.format_exception(error)).strip()
    return ""


def try_all(
    disk: Disk, chosen: Sequence[Case], verify: Callable[[Path, Sequence[str]], None], *, processes: int
) -> Generator[tuple[Case, str]]:
    """`lose` each case, in forked processes: a store that is damaged may take the one that opens it along.

    Yields (case, what is wrong), in any order. To be called where nothing is open and no thread runs.
    """
    shares = [deque(range(first, len(chosen), processes)) for first in range(processes)]
    with selectors.DefaultSelector() as selector, scratch() as folder:
        for number, share in enumerate(shares):
            if share:
                _fork(selector, disk, chosen, share, verify, Path(folder) / str(number))
        try:
            while selector.get_map():
                for key, _ in selector.select():
                    reader, _, share, own = key.data
                    line = reader.readline()
                    if line:
                        yield chosen[share.popleft()], json.loads(line)
                        continue
                    status = _ended(selector, key)
                    if share:  # it died of the one that it had begun
                        yield chosen[share.popleft()], f"opening it ends the process: {status}"
                    if share:
                        _fork(selector, disk, chosen, share, verify, own)
        finally:
            for key in list(selector.get_map().values()):
                os.kill(key.data[1], signal.SIGKILL)
                _ended(selector, key)


def _ended(selector: selectors.BaseSelector, key: selectors.SelectorKey) -> int:
    reader, pid, _, _ = key.data
    selector.unregister(reader)
    reader.close()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(
    selector: selectors.BaseSelector,
    disk: Disk,
    chosen: Sequence[Case],
    share: deque[int],
    verify: Callable[[Path, Sequence[str]], None],
    own: Path,
) -> None:
    """A process that tries the cases of a share in turn, and says what came of each: a line of JSON."""
    read, write = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            for index in share:
                os.write(write, json.dumps(lose(disk, chosen[index], own, verify)).encode() + b"\n")
        finally:
            os._exit(0)
    os.close(write)
    reader = os.fdopen(read, "rb", buffering=0)
    selector.register(reader, selectors.EVENT_READ, (reader, pid, share, own))
