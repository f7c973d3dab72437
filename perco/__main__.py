"""Runs the command `perco`; if its packages are missing, prints how to install them."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        _main()
    except KeyboardInterrupt:  # while modules are still being imported
        raise SystemExit(130) from None


def _main() -> None:
    try:
        from perco.cli import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in {"typer", "rich"}:
            raise
        print("The command perco needs an extra: pip install '.[cli]' in perco's checkout", file=sys.stderr)
        raise SystemExit(2) from None
    run()


if __name__ == "__main__":
    main()
