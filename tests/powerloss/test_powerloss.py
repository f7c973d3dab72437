"""Power fails while a store is made, written to, opened, enlarged, split: acknowledged writes are there (S2, O1)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

import pytest

from tests.powerloss.__main__ import FIXTURE, ROOT
from tests.powerloss.work import BREAKS

KINDS = {"none", "all", "all but one", "one", "some", "torn"}


def strace_works() -> bool:
    return (
        shutil.which("strace") is not None
        and not subprocess.run(["strace", "-f", "-o", os.devnull, "true"], capture_output=True).returncode
    )


@pytest.fixture(scope="module")
def strace() -> None:
    if strace_works():
        return
    if os.environ.get("CI") and not os.environ.get("PERCO_NO_STRACE"):
        pytest.fail("there is no strace; .ci/run installs it, or says with PERCO_NO_STRACE=1 that it cannot be had")
    pytest.skip("NO STRACE: perco's requests to the disk are not recorded here, only a kept trace is replayed")


def replay(*arguments: str) -> tuple[int, str]:
    """Returns (exit code, what it printed)."""
    command = [sys.executable, "-m", "tests.powerloss", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, done.stdout


def counts(printed: str) -> tuple[dict[str, int], int, int]:
    """(cases of each kind, cases, how many of them were wrong)."""
    kinds, last = printed.splitlines()[-2:]
    total, wrong = re.fullmatch(r"(\d+) cases in \d+ s, (\d+) wrong", last).groups()  # type: ignore[union-attr]
    return {part.split(" ", 1)[1]: int(part.split(" ")[0]) for part in kinds.split(", ")}, int(total), int(wrong)


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("durability", ["power", "process"])
def test_after_a_power_loss_nothing_acknowledged_is_missing_or_it_is_refused(durability: str) -> None:  # S2 O1
    code, printed = replay("--durability", durability, "--cases", "160" if durability == "power" else "60")
    kinds, cases, wrong = counts(printed)
    assert not wrong, printed
    assert code == 0
    assert set(kinds) == KINDS
    assert cases >= 30


def test_of_a_trace_that_was_kept() -> None:  # S2 O1
    code, printed = replay("--trace", str(FIXTURE), "--cases", "80", "--seed", "1")
    assert code == 0, printed
    assert counts(printed)[1] >= 40


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize("broken", sorted(BREAKS))
def test_a_sync_that_is_left_out_is_noticed(broken: str) -> None:  # S2 O1
    durability = "process" if broken == "no mark" else "power"
    cases = "600" if broken == "unsynced copy" else "80"  # the calls that follow the copy make it durable
    code, printed = replay("--durability", durability, "--break", broken, "--cases", cases, "--wrong-max", "3")
    assert code == 1, printed
    assert counts(printed)[2] >= 3
    assert ("O1" if broken == "unsynced bound" else "S2") in BREAKS[broken]
