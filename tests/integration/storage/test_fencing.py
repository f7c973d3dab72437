"""Two processes that have a tablet open for writing, one of which has taken it over."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from perco.storage import (
    ABSENT,
    APPLIED,
    DATA,
    PROTOCOL_GROUPS,
    TS_MAX,
    WRITE,
    Applied,
    LmdbEngine,
    LmdbOptions,
    Mutation,
)
from perco.storage.fencing import Fenced

OPTIONS = LmdbOptions(sync=False)
FORMER = """
import sys
from pathlib import Path
from perco.storage.fencing import Fenced
from tests.integration.storage.test_fencing import opened, put

engine = opened(Path(sys.argv[1]))
print(engine.take_over(), *map(str, engine.commit([put(b"a", 1)], 0)), flush=True)
sys.stdin.readline()
for act in (lambda: engine.commit([put(b"b", 2)], 0), lambda: engine.repack("data", b"", 10, 0)):
    try:
        print(act(), flush=True)
    except Fenced as error:
        print("fenced", flush=True)
"""


def opened(path: Path) -> LmdbEngine:
    return LmdbEngine(path, PROTOCOL_GROUPS, OPTIONS, readonly=False, lock=True)


def put(row: bytes, ts: int) -> Mutation:
    return Mutation("docs", ((row, ((ABSENT, DATA, 0, 0, TS_MAX),), ((DATA, 0, ts, b"x"),)),))


def found(engine: LmdbEngine) -> list[bytes]:
    return [row for row in (b"a", b"b", b"c") if engine.read(row, [(DATA, 0, 0, TS_MAX, 1)])[0]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "tablet").mkdir()
    return tmp_path / "tablet"


def test_who_has_been_taken_over_writes_nothing_any_more(path: Path) -> None:  # F1
    command = [sys.executable, "-c", FORMER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as former:
        assert former.stdin is not None
        assert former.stdout is not None
        assert former.stdout.readline().split()[0] == "1"
        engine = opened(path)
        assert engine.take_over() == 2
        assert engine.commit([put(b"c", 3)], 0) == [APPLIED]
        former.stdin.write("\n")
        former.stdin.flush()
        assert former.stdout.read().split() == ["fenced", "fenced"]
    assert found(engine) == [b"a", b"c"]
    engine.close()


def test_an_epoch_is_no_group_and_outlives_its_process(path: Path) -> None:  # F1
    for epoch in (1, 2, 3):
        engine = opened(path)
        assert engine.take_over() == engine.epoch() == epoch
        assert sorted(engine.groups()) == sorted(PROTOCOL_GROUPS)
        engine.close()
    engine = opened(path)  # an owner of the whole folder looks at no epoch
    assert isinstance(engine.commit([put(b"a", 1)], 0)[0], Applied)
    assert engine.read(b"a", [(WRITE, 0, 0, TS_MAX, 1)]) == [[]]
    engine.close()


def test_what_is_refused_has_left_nothing(path: Path) -> None:  # F1 S1
    engine = opened(path)
    engine.take_over()
    engine.commit([put(b"a", 1)], 0)
    with engine._env.begin(write=True) as txn:  # as another process that takes it over
        txn.put(b"\0epoch", (2).to_bytes(8, "big"))
    with pytest.raises(Fenced, match="taken the tablet over"):
        engine.commit([put(b"b", 2), put(b"c", 2)], 0)
    assert found(engine) == [b"a"]
    engine.close()
