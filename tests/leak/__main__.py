"""`python -m tests.leak --transactions 10000000`: a process keeps nothing of the transactions that it has made."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.leak.running import main

LEAST = 1_000_000


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.leak", description=__doc__)
    parser.add_argument("--transactions", type=int, default=10_000_000)
    parser.add_argument("--samples", type=int, default=9, help="how often memory is looked at, after the first tenth")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    if given.transactions < LEAST:
        parser.error(f"--transactions: at least {LEAST:,}, because only then all caches are full at the first sample")
    with tempfile.TemporaryDirectory(prefix="perco-leak-") as folder:
        found = main(Path(folder) / "store", given.transactions, given.samples, given.seed)
    print(found or "nothing has grown")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(run())
