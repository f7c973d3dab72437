"""The command itself: help, versions, exit codes, and what it says without its extra."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import trio

import perco
from tests.acceptance.cli.stores import ROOT, run

COMMANDS = ["status", "scan", "get", "set", "delete", "wait", "check", "vacuum", "pins", "split"]


async def test_version() -> None:
    done = await run("--version")
    assert (done.code, done.out) == (0, f"perco {perco.__version__}\n")


async def test_help_teaches_with_examples() -> None:
    done = await run("--help")
    assert done.code == 0
    assert "Examples:\n    perco status web/\n" in done.out
    assert all(f"\n  {command} " in done.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
async def test_every_command_has_help_with_examples(command: str) -> None:
    done = await run(command, "--help")
    assert done.code == 0
    assert f"Examples:\n    perco {command} " in done.out


@pytest.mark.parametrize(
    "args",
    [("status",), ("scan", "x"), ("nonsense",), ("status", "x", "--nonsense"), ("wait", "x", "--timeout", "-1")],
)
async def test_wrong_usage_is_exit_code_2(args: tuple[str, ...]) -> None:
    done = await run(*args)
    assert (done.code, done.out) == (2, "")
    assert "Usage: perco" in done.err


@pytest.mark.parametrize(
    "command", [("status",), ("scan", "docs"), ("get", "docs", "a"), ("wait",), ("check",), ("vacuum",), ("pins",)]
)
async def test_where_nothing_is_is_exit_code_2(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *rest = command
    done = await run(name, tmp_path / "nowhere", *rest)
    assert (done.code, done.out) == (2, "")
    assert "there is no such folder" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize("command", [("status",), ("serve",), ("check",), ("scan", "docs")])
async def test_a_folder_whose_path_is_not_utf_8_is_refused_in_a_line(command: tuple[str, ...], tmp_path: Path) -> None:
    name, *rest = command
    path = os.fsdecode(os.fsencode(tmp_path) + b"/x\xff")
    done = await run(name, path, *rest)
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"perco: {tmp_path}/x\\xff: the path of a store must be UTF-8, and this one is not; rename the folder\n"
    )
    assert not await trio.Path(path).exists()


async def test_a_server_without_its_scheme_is_taken_for_a_folder_and_told_so(tmp_path: Path) -> None:
    done = await run("scan", tmp_path / "localhost:7420", "docs")
    assert (done.code, done.out) == (2, "")
    assert "where one is served, write tcp://HOST:PORT" in done.err
    done = await run("serve", tmp_path / "store", "--listen", "localhost:7420")
    assert done.code == 2
    assert "'localhost:7420': write unix:PATH, tcp://HOST:PORT or tls://HOST:PORT" in done.err
    assert not (tmp_path / "store").exists()


async def test_what_is_no_store_is_exit_code_2(tmp_path: Path) -> None:
    for place, complaint in (
        (str(tmp_path), "not a perco store: the folder is empty"),
        ("foundationdb://a/b", "opens a folder"),
        ("bigtable://a", "which project and instance"),
    ):
        done = await run("status", place)
        assert (done.code, done.out) == (2, "")
        assert complaint in done.err


async def test_a_folder_of_other_files_is_told_as_such_and_a_store_inside_is_named(store: Path) -> None:
    for name in ("status", "check"):
        done = await run(name, store.parent)
        assert (done.code, done.out) == (2, "")
        assert f"not a perco store: it holds other files (store). Did you mean {store}?" in done.err
    (store.parent / "thesis.txt").write_text("years of work")
    (store / "perco-format").rename(store.parent / "elsewhere")
    done = await run("status", store.parent)
    assert "it holds other files (elsewhere, store, thesis.txt). Nothing" in done.err


async def test_a_moment_must_make_sense(store: Path) -> None:
    for args, complaint in (
        (("--at", "yesterday"), "write 90s"),
        (("--at", "1999-01-01"), "no snapshot at"),
        (("--at", "2999-01-01"), "in the future"),
        (("--ts", "999999999"), "no snapshot at 999999999"),
        (("--ts", "1", "--at", "1999-01-01"), "not both"),
    ):
        done = await run("get", store, "docs", "a", "title", *args)
        assert (done.code, done.out) == (2, "")
        assert complaint in done.err


async def test_a_store_of_another_format_is_named(store: Path) -> None:
    (store / "perco-format").write_text("perco 99\n")
    done = await run("status", store)
    assert done.code == 2
    assert "found format 'perco 99'" in done.err


async def test_without_its_extra_the_command_says_what_to_install() -> None:
    for missing in ("typer", "rich"):
        program = f"import sys; sys.modules[{missing!r}] = None; from perco.__main__ import main; main()"
        done = await trio.run_process(
            [sys.executable, "-c", program], capture_stderr=True, capture_stdout=True, check=False, cwd=ROOT
        )
        assert done.returncode == 2
        assert done.stderr == b"The command perco needs an extra: pip install '.[cli]' in perco's checkout\n"


async def test_another_missing_module_is_not_blamed_on_the_extra() -> None:
    program = "import sys; sys.modules['lmdb'] = None; from perco.__main__ import main; main()"
    done = await trio.run_process([sys.executable, "-c", program], capture_stderr=True, check=False, cwd=ROOT)
    assert b"No module named 'lmdb'" in done.stderr or b"lmdb" in done.stderr
    assert b"pip install" not in done.stderr


async def test_the_library_does_not_need_the_command() -> None:
    program = "import sys, perco; assert 'typer' not in sys.modules and 'rich' not in sys.modules"
    done = await trio.run_process([sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == 0
