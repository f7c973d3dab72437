"""The simulation: clean on perco, the same twice, and deadly for what breaks the protocol."""

from __future__ import annotations

from collections import Counter

import pytest

from perco.testing import simulate as command
from perco.testing.simulation import CRASHES, FAULTS, STEPS, Outcome, SimulationOptions, simulate
from tests.testing.mutants import HARMLESS, MUTANTS, Mutant

SEEDS_MAX = 200  # within which a mutant has to die
OPTIONS = SimulationOptions()


@pytest.mark.parametrize("seed", range(100, 160))
def test_nothing_goes_wrong(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.problems == []
    assert outcome.enough(OPTIONS)
    assert outcome.committed >= 200
    assert outcome.runs >= 20
    assert outcome.fired.total() >= 5
    assert len({fault for _, fault in outcome.fired}) >= 3


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_is_the_same_run(seed: int) -> None:
    assert simulate(seed) == simulate(seed)


def test_another_seed_is_another_run() -> None:
    assert simulate(1).digest != simulate(2).digest


def died(seed: int) -> str:
    try:
        outcome = simulate(seed)
    except Exception as error:  # an assertion of the product, or of the simulation itself, has noticed
        return repr(error)
    return "".join(outcome.problems)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_dies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds to its death are printed by `pytest -rP`."""
    break_it: Mutant = MUTANTS[name]
    break_it(monkeypatch)
    for seed in range(SEEDS_MAX):
        how = died(seed)
        if how:
            print(f"{name}: {seed + 1} seeds; {how[:200]}")
            return
    pytest.fail(f"{name}: not found in {SEEDS_MAX} seeds")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", HARMLESS)
def test_what_breaks_no_rule_raises_nothing(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    HARMLESS[name](monkeypatch)
    assert died(seed) == ""


def test_the_table_names_what_never_happened() -> None:
    everything = Counter({(step, fault): 1 for step in STEPS for fault in [*(one.name for one in FAULTS), *CRASHES]})
    text, empty = command.table(everything)
    assert empty == []
    assert len(text.splitlines()) == 1 + len(STEPS)
    del everything["marker", "DELAY"]
    assert command.table(everything)[1] == ["marker x DELAY"]


def test_the_command_tells_a_run_that_went_wrong_and_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "simulate", lambda seed: Outcome(seed, problems=["T1: half of it"]))
    assert command.main(["--seed", "7"]) == 1
    assert "T1: half of it" in capsys.readouterr().out


def test_the_command_runs_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "8", "--processes", "2"]) == 0
    out = capsys.readouterr().out
    assert "8 runs in" in out
    assert "nothing went wrong" in out
