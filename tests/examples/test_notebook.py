"""The notebook, cell after cell as tasks of an asyncio loop, as a kernel runs them: they print what is stored in it."""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.examples.running import ROOT

CELLS = json.loads((ROOT / "examples/notebook.ipynb").read_text())["cells"]


@pytest.mark.filterwarnings("ignore::perco.errors.PercoWarning")  # the temporary folder may lie on tmpfs
def test_every_cell_prints_what_the_notebook_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    async def main() -> int:
        names: dict[str, Any] = {"__name__": "__main__"}
        printed = 0
        for number, cell in enumerate(CELLS):
            if cell["cell_type"] != "code":
                continue
            code = compile("".join(cell["source"]), f"cell {number}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(code, names)
            if inspect.iscoroutine(running):
                await asyncio.create_task(running)
            shown = "".join(line for output in cell["outputs"] for line in output["text"])
            assert capsys.readouterr().out == shown, f"cell {number}"
            printed += bool(shown)
        return printed

    assert asyncio.run(main()) > 4
