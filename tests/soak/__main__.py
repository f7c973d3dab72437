"""`python -m tests.soak bigtable --transactions 100000`: client processes, their servers and workers are killed."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.soak.running import STORES, Plan, Soak, told


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("store", choices=STORES)
    parser.add_argument("--transactions", type=int, default=100_000, help="how many have to commit")
    parser.add_argument("--clients", type=int, default=3, help="processes, each with 16 transactions at a time")
    parser.add_argument("--harm-s", type=float, default=5.0, help="seconds between two harms, on average")
    parser.add_argument("--pause-s", type=float, default=30.0, help="the longest time for which a process is stopped")
    parser.add_argument("--lose", type=int, default=2000, help="the emulator loses one call in so many; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="for the histories; by default a new temporary folder")
    given = vars(parser.parse_args())
    folder = given.pop("folder") or Path(tempfile.mkdtemp(prefix="perco-soak-"))
    folder.mkdir(exist_ok=True)
    outcome = Soak(Plan(**given), folder, lambda line: print(line, flush=True)).run()
    print(told(outcome))
    print(f"the history: {folder / 'history.jsonl'}")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
