"""Every mutant can be switched on: the code that it changes is still where the mutant looks for it."""

from __future__ import annotations

import pytest

from tests.testing import seeds
from tests.testing.mutants import HARMLESS, PROTECTED, SLOW
from tests.testing.mutants_components import COMPONENTS
from tests.testing.mutants_one_step import ONE_STEP_HARMLESS
from tests.testing.mutants_serializable import LOCKS, SERIALIZABLE
from tests.testing.mutants_signals import SIGNALS_HARMLESS, SIGNALS_SLOW

EVERY = {
    **seeds.ALL,
    **SLOW,
    **PROTECTED,
    **HARMLESS,
    **ONE_STEP_HARMLESS,
    **SIGNALS_HARMLESS,
    **SIGNALS_SLOW,
    **SERIALIZABLE,
    **LOCKS,
    **{name: found.mutant for name, found in COMPONENTS.items()},
}


@pytest.mark.parametrize("name", EVERY)
def test_it_can_be_switched_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EVERY[name](monkeypatch)
    changed = monkeypatch._setattr
    assert changed
    assert all(getattr(of, what) is not before for of, what, before in changed)
