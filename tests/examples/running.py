"""Examples as processes that are killed, and started again."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py"))


def run(name: str, *arguments: object, killed_at: tuple[str, int] = ("", 0)) -> str:
    """What an example prints; of one that is to be killed, until then."""
    event, count = killed_at
    script = str(ROOT / "examples" / f"{name}.py")
    command = [sys.executable, "-m", "tests.examples.child", event, str(count), script, *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    wanted = -signal.SIGKILL if count else 0
    assert done.returncode == wanted, f"{killed_at}: {done.stdout}{done.stderr}"
    return done.stdout
