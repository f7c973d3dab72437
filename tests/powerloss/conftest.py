"""Whether what perco asks of the disk can be recorded here."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


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
    pytest.skip("NO STRACE: what perco asks of the disk is not recorded here, only a trace that was kept is replayed")
