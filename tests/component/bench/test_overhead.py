"""What assertions cost is measured in processes with and without them; no figure of it is judged here."""

from __future__ import annotations

import pytest

from bench import overhead


@pytest.mark.parametrize("flags", [[], ["-O"]])
def test_a_child_does_what_is_measured(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "ASSERTED_S", 0.01)
    assert overhead.in_a_child(*flags) > 0


def test_a_child_has_assertions_unless_told_otherwise() -> None:
    for flags, wanted in (([], "True"), (["-O"], "False")):
        assert overhead.child(flags, "print(__debug__)").strip() == wanted
