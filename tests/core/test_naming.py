"""MODULE:NAME, and the errors for names of another form."""

from __future__ import annotations

from pathlib import Path

import pytest

from perco.errors import UsageError
from perco.naming import named


def told(text: str) -> str:
    with pytest.raises(UsageError) as raised:
        named(text, "MODULE:NAME, such as app:thing", "in this folder")
    return str(raised.value)


def test_a_thing_by_its_name() -> None:
    assert named("os.path:join.__name__", "", "") == "join"


@pytest.mark.parametrize("text", ["", "app", ":x", "app:"])
def test_what_is_no_name_is_told_how_to_write_one(text: str) -> None:
    assert told(text) == f"{text!r}: write MODULE:NAME, such as app:thing"


def test_a_module_or_a_name_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_another.py").write_text("import nowhere_at_all\n")
    assert told("nowhere_at_all.app:x") == "there is no module 'nowhere_at_all' in this folder"
    assert told("os.nowhere:x") == "there is no module 'os.nowhere' in this folder"
    assert "no attribute 'nothing'" in told("os:nothing")
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):  # the program's own affair
        named("needs_another:x", "", "")
