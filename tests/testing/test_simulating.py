"""The command that runs many seeds, shrinking, and what several processes meet: slower than single seeds."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import perco
from perco.testing import simulate as command
from perco.testing.embedded import FAULTS
from perco.testing.network import FAULTS as WIRE_FAULTS
from perco.testing.plan import Plan
from perco.testing.shrink import Shrinker, ShrinkOptions, fails, kind_of_problem, shrink
from perco.testing.simulation import Outcome, SimulationOptions, run_plan, simulate
from tests.testing.mutants import MUTANTS
from tests.testing.seeds import SEEDS_MAX, died
from tests.testing.test_simulation import nothing_goes_wrong


@pytest.mark.parametrize("seed", range(250, 400))
def test_nothing_goes_wrong(seed: int) -> None:
    nothing_goes_wrong(seed)


def test_what_makes_several_processes_hard_happens() -> None:  # R4, R5, R7, R8, L3
    outcomes = [simulate(seed, SimulationOptions(processes=3)) for seed in range(4)]
    assert sum(outcome.terms for outcome in outcomes) > 4  # owners take over
    assert sum(outcome.lives for outcome in outcomes) > 12  # clients die
    fired = sum((outcome.fired for outcome in outcomes), Counter())
    assert len({fault for _, fault in fired}.intersection(WIRE_FAULTS)) > len(WIRE_FAULTS) / 2
    assert [problem for outcome in outcomes for problem in outcome.problems] == []


def test_the_command_tells_a_run_that_went_wrong_and_how_to_see_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "simulate", lambda seed, options: Outcome(seed, problems=["T1: half of it"]))
    assert command.main(["--seed", "7"]) == 1
    assert "T1: half of it" in capsys.readouterr().out


def test_the_command_wants_a_full_table_of_many_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_SEEDS_WHOLE", 4)
    assert command.main(["--seeds", "4", "--processes", "1"]) == 1
    assert "no run went wrong, but" in capsys.readouterr().out


def test_the_command_runs_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seeds", "8", "--processes", "2"]) == 0
    out = capsys.readouterr().out
    assert "8 runs in" in out
    assert "nothing went wrong" in out
    assert "pairs untested (few seeds)" in out
    assert "never occurred" not in out


def quick(seed: int, options: SimulationOptions) -> Outcome:
    """Stands in for a run."""
    return Outcome(seed, committed=seed, fired=Counter({("prewrite", FAULTS[seed % len(FAULTS)]): seed}))


class Interrupted(Exception):
    """A series of runs that was cut short."""


def interrupted_after(runs: int, monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    whole = command._outcomes

    def some(*args: Any) -> Iterator[Outcome]:
        for n, outcome in enumerate(whole(*args)):
            if n == runs:
                raise Interrupted
            yield outcome

    with monkeypatch.context() as patch:
        patch.setattr(command, "_outcomes", some)
        with pytest.raises(Interrupted):
            command.main(arguments)


def results(out: str) -> list[str]:
    """All that the command prints, except how long it took."""
    first, *rest = out.splitlines()
    return [first.partition(" an hour): ")[2], *rest]


def test_an_interrupted_series_goes_on_from_its_state(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "simulate", quick)
    monkeypatch.setattr(command, "_SAVED_EACH", 4)
    arguments = ["--seeds", "12", "--first", "30", "--processes", "1"]
    assert command.main(arguments) == 0
    whole = capsys.readouterr().out
    arguments += ["--state", str(tmp_path / "state")]
    interrupted_after(9, monkeypatch, arguments)
    ran: list[int] = []
    outcomes = command._outcomes

    def noting(*args: Any) -> Iterator[Outcome]:
        for outcome in outcomes(*args):
            ran.append(outcome.seed)
            yield outcome

    monkeypatch.setattr(command, "_outcomes", noting)
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "in 2 sittings" in out
    assert results(out) == results(whole)
    assert ran == [38, 39, 40, 41]  # the ninth run was not saved
    assert command.main(arguments) == 0  # nothing is left to do
    assert results(capsys.readouterr().out) == results(whole)
    assert len(ran) == 4


def test_a_series_that_goes_on_still_tells_what_went_wrong_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "_SAVED_EACH", 1)
    monkeypatch.setattr(command, "simulate", lambda seed, options: Outcome(seed, problems=["T1"] if seed == 1 else []))
    arguments = ["--seeds", "4", "--processes", "1", "--state", str(tmp_path / "state")]
    interrupted_after(3, monkeypatch, arguments)
    capsys.readouterr()
    assert command.main(arguments) == 1
    out = capsys.readouterr().out
    assert "--seed 1\n" in out
    assert "1 of 4 runs went wrong" in out


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace('"store": "local"', '"store": "bigtable"'), "over bigtable stores: give the same"),
        (lambda text: text.replace('"seeds": 4', '"seeds": 5'), "is of 5 seeds from 0 on, over local stores: give"),
        (lambda text: text.replace('"code": "', '"code": "0'), "another version of perco"),
        (lambda text: text[:20], "is not a state of this command"),
        (lambda text: "{}", "is not a state of this command"),
    ],
    ids=["store", "seeds", "code", "cut", "other"],
)
def test_a_state_that_is_not_of_this_series_is_refused(
    change: Callable[[str], str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(command, "simulate", lambda seed, options: Outcome(seed))
    state = tmp_path / "state"
    arguments = ["--seeds", "4", "--processes", "1", "--state", str(state)]
    assert command.main(arguments) == 0
    text = change(state.read_text())
    state.write_text(text)
    with pytest.raises(SystemExit):
        command.main(arguments)
    assert told in " ".join(capsys.readouterr().err.split())
    assert state.read_text() == text  # nothing is lost


_IMPORTED = """
import json, sys
from perco.testing import simulate

def modules():
    return {name for name in sys.modules if name.partition(".")[0] == "perco"}

before, code = modules(), simulate._code()
assert not simulate.simulate(1).problems and not simulate.simulate(2).problems
print(json.dumps([sorted(before), sorted(modules() - before), code == simulate._code()]))
"""


def test_a_state_belongs_to_all_code_that_a_run_imports() -> None:
    ran = subprocess.run([sys.executable, "-c", _IMPORTED], capture_output=True, check=True, timeout=300)
    before, later, same = json.loads(ran.stdout)
    assert {"perco.serve.server", "perco.txn.driver", "perco.testing.served"} <= set(before)
    assert (later, same) == ([], True)


# ------------------------------------------------------------ shrinking


def test_a_failing_seed_shrinks_to_a_short_script_that_still_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS["T3 a secondary commits before the primary"](monkeypatch)
    seed = next(seed for seed in range(SEEDS_MAX) if died(seed))
    found = shrink(seed, ShrinkOptions(seconds=60.0))
    assert found is not None
    assert len(found.choices) < 30
    again = fails(Plan(seed, found.choices, found.salt))
    assert kind_of_problem(again) == kind_of_problem(found.problem)
    script = found.script()
    assert script.count(" begins") == sum(name.startswith("txn ") for name in found.choices)
    assert " of p0.0 c" in script
    assert " in lists k" in script
    assert found.problem in script


def test_a_seed_that_does_not_fail_is_not_shrunk() -> None:
    assert shrink(0, ShrinkOptions(attempts=1)) is None


def test_a_run_replayed_from_its_plan_does_the_same_transactions() -> None:
    whole = Plan(3)
    run_plan(whole)
    replay = Plan(3, whole.noted)
    assert run_plan(replay).problems == []
    begun = {name for _, name, choice in replay.done if choice and name.startswith("txn ")}
    assert begun <= set(whole.noted)
    assert len(begun) > 100


def test_shrinking_leaves_out_what_does_not_matter() -> None:
    """A made-up run fails if two of its hundred choices are there, in any order."""

    def run(plan: Plan) -> str:
        for number in range(100):
            plan.choose(f"txn {number}", lambda: "begins", float(number))
        chosen = plan.noted if plan.given is None else plan.given
        return "T1: both" if {"txn 17", "txn 71"} <= set(chosen) else ""

    found = Shrinker(1, ShrinkOptions(), run).shrink()
    assert found is not None
    assert set(found.choices) == {"txn 17", "txn 71"}
    assert found.attempts < 200


def test_shrinking_is_bounded() -> None:
    def run(plan: Plan) -> str:
        for number in range(100):
            plan.choose(f"txn {number}", lambda: "begins", float(number))
        return "T1"

    seconds = iter(range(1000))
    found = Shrinker(1, ShrinkOptions(seconds=3.0), run, lambda: next(seconds)).shrink()
    assert found is not None
    assert found.attempts < 10


def test_one_seed_has_a_verdict_and_a_good_one_nothing_to_shrink(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--seed", "3"]) == 0
    assert capsys.readouterr().out.endswith("\nnothing went wrong\n")
    assert command.main(["--seed", "3", "--shrink"]) == 0
    assert capsys.readouterr().out == "seed 3 does not fail; nothing to shrink\n"


@pytest.mark.parametrize(
    "given", [["--seed", "3", "--seeds", "5"], ["--seed", "3", "--first", "0"], ["--seed", "-1"], ["--first", "-1"]]
)
def test_what_contradicts_itself_is_refused(given: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command.main(given)
    assert caught.value.code == 2


def _digest_of(seed: int, where: Path, hash_seed: int) -> str:
    """The digest of a run in a process of its own, of the perco that lies there."""
    code = "import sys, perco.testing.simulation as one; print(one.__file__, one.simulate(int(sys.argv[1])).digest)"
    environment = {"PYTHONPATH": str(where), "PYTHONHASHSEED": str(hash_seed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code, str(seed)]
    said = subprocess.check_output(command, env=os.environ | environment, cwd=where, text=True)
    place, digest = said.rsplit(maxsplit=1)
    assert place.startswith(str(where))
    return digest


@pytest.mark.parametrize("seed", [30, 294])  # observers fail in both: of a served store, of an embedded one
def test_the_same_seed_is_the_same_run_wherever_perco_lies(seed: int, tmp_path: Path) -> None:
    elsewhere = tmp_path / ("elsewhere " * 10)
    shutil.copytree(Path(perco.__file__).parent, elsewhere / "perco", ignore=shutil.ignore_patterns("__pycache__"))
    assert _digest_of(seed, elsewhere, 7) == simulate(seed).digest


def test_the_order_of_a_set_decides_nothing() -> None:
    # Of an embedded store that has to be searched for what waits, table by table: the searches had the order of a set.
    here = Path(perco.__file__).parents[1]
    assert _digest_of(13, here, 1) == _digest_of(13, here, 2)
