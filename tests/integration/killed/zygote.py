"""Processes that are killed in the middle: `python -m tests.integration.killed.zygote`.

It imports all that is needed and then forks one process for each line of JSON that it is given, before any store is
opened (S5): a start costs a few milliseconds. A process runs a scenario of `tests.sweep.scenarios` in a folder and
kills itself with SIGKILL on the writer's thread, right before or after LMDB's commit of its n-th batch.

The parent's side is `Zygote`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trio

import perco
from perco.schema.catalogue import SYSTEM_TABLE
from perco.storage import LmdbEngine, LmdbTablet
from perco.testing.sweep import Scenario, observe
from perco.txn.driver import CommitOptions
from tests.sweep.scenarios import SCENARIOS

ROOT = Path(__file__).parents[3]
BY_NAME = {make().name: make for make in SCENARIOS}
NOTES = ("told", "acknowledged", "left", "was_put", "was_deleted", "asks")  # what a scenario notes of what it was told


class Zygote:
    """The parent's side."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def live(self, what: str, scenario: str, folder: Path, *, kill_at: int = -1, made: bool = False) -> bool:
        """A process from its start to its end; returns whether it was killed.

        Args:
            what: "prepare" or "first" of the scenario, or "recover".
            kill_at: which batch it dies of; -1: none. `made`: after its commit, else before.
        """
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([what, scenario, str(folder), kill_at, made]), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        assert status in (0, -signal.SIGKILL), f"{what} of {scenario} ended with {status}"
        return status != 0


@contextmanager
def zygote() -> Iterator[Zygote]:
    command = [sys.executable, "-m", __name__]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Zygote(process)
        assert process.stdin
        process.stdin.close()


def options(scenario: Scenario) -> perco.Options:
    commit, backfill = CommitOptions(one_step=scenario.one_step), perco.options.BackfillOptions(page_rows=2)
    return perco.Options(durability="process", seed=1, commit=commit, backfill=backfill)


def notes(scenario: Scenario, folder: Path) -> None:
    """Give a scenario the notes of the process that died."""
    file = folder.with_suffix(".notes")
    if file.exists():
        vars(scenario).update(json.loads(file.read_text(encoding="utf-8")))


# ------------------------------------------------------------ the process that dies


def _arm(kill_at: int, made: bool, *, system: bool) -> None:
    """`system`: the batches of the system table are counted as well."""
    commit = LmdbEngine.commit
    counting = threading.Lock()
    seen = 0

    def counted(self: LmdbEngine, mutations: Any, *args: Any) -> Any:
        nonlocal seen
        if not mutations or (mutations[0].table == SYSTEM_TABLE and not system):
            return commit(self, mutations, *args)
        with counting:
            dies = seen == kill_at
            seen += 1
        if dies and not made:
            os.kill(os.getpid(), signal.SIGKILL)
        verdicts = commit(self, mutations, *args)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return verdicts

    LmdbEngine.commit = counted  # type: ignore[method-assign]
    LmdbTablet._submit_natively = lambda *_: False  # type: ignore[method-assign]  # every batch comes by `commit`


async def _live(what: str, scenario: Scenario, folder: Path) -> None:
    notes(scenario, folder)
    schema = (scenario.before or scenario.schema) if what == "prepare" else scenario.schema
    async with perco.open(folder, schema, options=options(scenario)) as db:
        match what:
            case "prepare":
                await scenario.prepare(db)
            case "first":
                await scenario.first(db)
            case "recover":
                await observe(db)
        told = {name: vars(scenario)[name] for name in NOTES if name in vars(scenario)}
        folder.with_suffix(".notes").write_text(json.dumps(told), encoding="utf-8")  # phase two may still be under way


def main() -> None:
    warnings.simplefilter("ignore", perco.errors.PercoWarning)
    for line in sys.stdin:
        what, name, folder, kill_at, made = json.loads(line)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(60)
                scenario = BY_NAME[name]()
                _arm(kill_at, made, system=scenario.vacuums)
                trio.run(_live, what, scenario, Path(folder))
                status = 0
            finally:
                sys.stderr.flush()
                os._exit(status)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
