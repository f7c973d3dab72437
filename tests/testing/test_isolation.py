"""The checker of histories: each anomaly is named, and allowed histories raise nothing."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings, strategies as st

from perco.errors import UsageError
from perco.testing import Transaction, check, draw
from perco.testing.drawing import mermaid
from perco.testing.history import FAIL, OK, UNKNOWN


def txn(id: int, *ops, begin: float = 0.0, end: float = 100.0, status: str = OK) -> Transaction:
    """By default all transactions overlap, so that real time orders none of them."""
    return Transaction(id, f"c{id}", begin, end, status, ops)


def names(*history: Transaction, **how) -> list[str]:
    return [anomaly.name for anomaly in check(history, **how).anomalies]


def r(key, *values):
    return ("r", key, list(values))


def a(key, value):
    return ("a", key, value)


def w(key, value):
    return ("w", key, value)


def rr(key, value):
    return ("r", key, value)


# ------------------------------------------------------------ anomalies, one by one

ANOMALIES = {
    "G0 (dirty write)": [
        txn(1, a("x", 1), a("y", 1)),
        txn(2, a("x", 2), a("y", 2)),
        txn(3, r("x", 1, 2), r("y", 2, 1)),
    ],
    "G1a (aborted read)": [txn(1, a("x", 1), status=FAIL), txn(2, r("x", 1))],
    "G1b (intermediate read)": [txn(1, a("x", 1), a("x", 2)), txn(2, r("x", 1))],
    "G1c (circular information flow)": [txn(1, a("x", 1), r("y", 1)), txn(2, a("y", 1), r("x", 1))],
    "G-single (read skew)": [txn(1, a("x", 1), a("y", 1)), txn(2, r("x", 1), r("y")), txn(3, r("y", 1))],
    "lost update": [
        txn(1, r("x"), a("x", 1)),
        txn(2, r("x"), a("x", 2)),
        txn(3, r("x", 1, 2)),
    ],
    "long fork": [
        txn(1, a("x", 1)),
        txn(2, a("y", 1)),
        txn(3, r("x", 1), r("y")),
        txn(4, r("y", 1), r("x")),
    ],
    "G-nonadjacent": [
        txn(1, r("x"), r("z", 1)),
        txn(2, a("x", 1), a("y", 1)),
        txn(3, r("y", 1), r("w")),
        txn(4, a("w", 1), a("v", 1)),
        txn(5, r("v", 1), a("z", 1)),
        txn(6, r("w", 1), r("x", 1)),
    ],
    "own write not seen": [txn(1, a("x", 1), r("x"))],
    "read not repeatable": [txn(1, a("x", 1)), txn(2, r("x"), r("x", 1))],
    "stale read": [txn(1, a("x", 1), end=1.0), txn(2, r("x"), begin=2.0), txn(3, r("x", 1))],
    "future read": [
        txn(1, r("x", 1), end=1.0),
        txn(2, a("x", 1), begin=2.0),
    ],
    "real-time order": [
        txn(1, a("x", 1), end=1.0),
        txn(2, a("x", 2), begin=2.0),
        txn(3, r("x", 2, 1)),
    ],
    "garbage read": [txn(1, r("x", 7))],
    "read twice the same": [txn(1, a("x", 1)), txn(2, r("x", 1, 1))],
    "incompatible orders": [
        txn(1, a("x", 1)),
        txn(2, a("x", 2)),
        txn(3, r("x", 1, 2)),
        txn(4, r("x", 2, 1)),
    ],
}


@pytest.mark.parametrize("name", ANOMALIES)
def test_an_anomaly_is_named(name: str) -> None:
    assert names(*ANOMALIES[name]) == [name]


CLEAN = {
    "write skew": [txn(1, r("x"), a("y", 1)), txn(2, r("y"), a("x", 1)), txn(3, r("x", 1), r("y", 1))],
    "an old snapshot": [txn(1, a("x", 1)), txn(2, r("x")), txn(3, r("x", 1))],
    "an aborted write that nobody saw": [txn(1, a("x", 1), status=FAIL), txn(2, r("x"))],
    "an unknown write that was seen": [txn(1, a("x", 1), status=UNKNOWN), txn(2, r("x", 1))],
    "an unknown write that was not seen": [txn(1, a("x", 1), status=UNKNOWN, end=1.0), txn(2, r("x"), begin=2.0)],
    "own writes": [txn(1, a("x", 1), r("x", 1), a("x", 2), r("x", 1, 2)), txn(2, r("x", 1, 2))],
    "an overlapping write may be missed": [txn(1, a("x", 1), begin=0.0, end=2.0), txn(2, r("x"), begin=1.0, end=3.0)],
    "nothing": [],
}


@pytest.mark.parametrize("name", CLEAN)
def test_what_snapshot_isolation_allows_raises_nothing(name: str) -> None:
    assert names(*CLEAN[name]) == []


def test_write_skew_is_not_serializable() -> None:  # T14
    assert names(*CLEAN["write skew"], serializable=True) == ["write skew"]


def test_three_that_did_not_see_each_other_are_not_serializable() -> None:  # T14
    ring = [txn(1, r("x"), a("y", 1)), txn(2, r("y"), a("z", 1)), txn(3, r("z"), a("x", 1))]
    ring.append(txn(4, r("x", 1), r("y", 1), r("z", 1)))
    assert names(*ring) == []
    assert names(*ring, serializable=True) == ["G2 (anti-dependency cycle)"]


def test_an_anomaly_is_told_once_although_it_is_not_serializable_either() -> None:
    assert names(*ANOMALIES["long fork"], serializable=True) == ["long fork"]


def test_real_time_can_be_left_out() -> None:
    assert names(*ANOMALIES["stale read"], real_time=False) == []


def test_an_append_that_was_acknowledged_and_is_missing_later_is_a_stale_read() -> None:
    history = [txn(1, a("x", 1), end=1.0), txn(2, a("x", 2), begin=2.0, end=3.0), txn(3, r("x", 1), begin=4.0)]
    report = check(history)
    assert [anomaly.name for anomaly in report.anomalies] == ["stale read"]
    assert report.unread == 1


# ------------------------------------------------------------ registers

REGISTERS = {
    "G1a (aborted read)": [txn(1, w("x", 1), status=FAIL), txn(2, rr("x", 1))],
    "G1b (intermediate read)": [txn(1, w("x", 1), w("x", 2)), txn(2, rr("x", 1))],
    "lost update": [txn(1, rr("x", None), w("x", 1)), txn(2, rr("x", None), w("x", 2))],
    "G-single (read skew)": [
        txn(1, rr("x", None), w("x", 1), rr("y", None), w("y", 1)),
        txn(2, rr("x", 1), rr("y", None)),
    ],
    "own write not seen": [txn(1, w("x", 1), rr("x", None))],
    "read not repeatable": [txn(1, w("x", 1)), txn(2, rr("x", None), rr("x", 1))],
    "stale read": [txn(1, w("x", 1), end=1.0), txn(2, rr("x", None), begin=2.0)],
    "future read": [txn(1, rr("x", 1), end=1.0), txn(2, w("x", 1), begin=2.0)],
    "G1c (circular information flow)": [txn(1, w("x", 1), rr("y", 1)), txn(2, w("y", 1), rr("x", 1))],
}


@pytest.mark.parametrize("name", REGISTERS)
def test_an_anomaly_of_registers_is_named(name: str) -> None:
    assert names(*REGISTERS[name]) == [name]


def test_blind_writes_are_ordered_by_real_time() -> None:
    first, second = txn(1, w("x", 1), end=1.0), txn(2, w("x", 2), begin=2.0, end=3.0)
    assert names(first, second, txn(3, rr("x", 2), begin=4.0)) == []
    assert names(first, second, txn(3, rr("x", 1), begin=4.0)) == ["stale read"]


def test_two_updates_that_nobody_read_are_lost_whatever_their_order() -> None:
    first = txn(1, a("x", 0), end=1.0)
    history = [first, *(txn(i, r("x", 0), a("x", i), begin=2.0) for i in (2, 3))]
    assert names(*history) == ["lost update"]
    assert names(*history, serializable=True) == ["lost update"]


def test_an_unknown_write_that_only_its_writer_saw_has_not_committed() -> None:
    unknown = txn(1, rr("x", 5), w("x", 6), rr("x", 6), status=UNKNOWN, begin=1.0)
    assert names(txn(0, w("x", 5), end=0.5), unknown, txn(2, rr("x", 5), w("x", 7), begin=1.0)) == []


def test_an_unknown_write_may_have_come_later_than_its_end() -> None:
    history = [
        txn(0, w("x", 1), end=1.0, status=UNKNOWN),
        txn(1, w("x", 2), begin=2.0, end=3.0),
        txn(2, rr("x", 1), begin=4.0),
    ]
    assert names(*history) == []


def test_without_real_time_it_does_not_order_registers_either() -> None:
    history = [
        txn(0, w("x", 1), end=1.0),
        txn(1, w("x", 2), w("y", 1), begin=2.0, end=3.0),
        txn(2, rr("y", 1), rr("x", 1), begin=4.0, end=5.0),
    ]
    assert names(*history, real_time=False) == []
    assert names(*history) != []


@pytest.mark.parametrize("make", [lambda i: (rr("x", None), w("x", i)), lambda i: (r("x"), a("x", i))])
def test_a_history_of_nothing_but_lost_updates_comes_to_its_end(make) -> None:
    history = [txn(i, *make(i), begin=float(i), end=i + 0.5) for i in range(5000)]
    report = check(history)
    assert report.anomalies[0].name == "lost update"
    assert sum(report.edges.values()) < 100 * len(history)


# ------------------------------------------------------------ histories that cannot be decided


@pytest.mark.parametrize(
    ("history", "message"),
    [
        ([txn(1, a("x", 1)), txn(2, a("x", 1))], "1 is written to 'x' by transaction 1 and by 2"),
        ([txn(1, a("x", 1)), txn(2, w("x", 2))], "transaction 2: key 'x' is a list here"),
        ([txn(1), txn(1)], "the same id"),
    ],
)
def test_a_history_that_cannot_be_decided_is_refused(history, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check(history)


# ------------------------------------------------------------ a correct store, and a wrong one


def made_up(seed: int, transactions: int, keys: int, concurrency: int = 8) -> list[Transaction]:
    """A history of a correct store: snapshots, and the first committer wins."""
    rng = random.Random(seed)
    versions: dict[int, list[tuple[int, int]]] = {key: [] for key in range(keys)}  # (commit moment, value)
    running: list[tuple[int, float, int, list]] = []
    history: list[Transaction] = []
    clock, value, number = 0, 0, 0
    while len(history) < transactions:
        clock += 1
        if len(running) < concurrency and number < transactions:
            ops: list = []
            own: dict[int, list[int]] = {}
            for _ in range(rng.randint(1, 4)):
                key = rng.randrange(keys)
                if rng.random() < 0.5:
                    seen = [v for at, v in versions[key] if at <= clock]
                    ops.append(("r", key, seen + own.get(key, [])))
                else:
                    value += 1
                    own.setdefault(key, []).append(value)
                    ops.append(("a", key, value))
            running.append((number, float(clock), clock, ops))
            number += 1
            if rng.random() < 0.5:
                continue
        at = rng.randrange(len(running))
        id, begin, start, ops = running.pop(at)
        clock += 1
        wrote = {key for kind, key, _ in ops if kind == "a"}
        conflict = any(versions[key] and versions[key][-1][0] > start for key in wrote)
        if not conflict:
            for kind, key, new in ops:
                if kind == "a":
                    versions[key].append((clock, new))
        clock += 1
        history.append(
            Transaction(id, f"c{id % concurrency}", begin, float(clock), FAIL if conflict else OK, tuple(ops))
        )
    clock += 1
    last = tuple(("r", key, [v for _, v in versions[key]]) for key in range(keys))
    return [*history, Transaction(number, "end", float(clock), float(clock + 1), OK, last)]


@given(seed=st.integers(0, 10_000), keys=st.integers(1, 6))
def test_a_right_store_raises_nothing(seed: int, keys: int) -> None:
    assert check(made_up(seed, 60, keys)).anomalies == ()


def with_read_skew(history: list[Transaction], rng: random.Random) -> tuple[list[Transaction], int]:
    """The same history with one more reader, which sees half of another transaction's writes; and its id."""
    both = [
        one
        for one in history
        if one.status == OK and len({key for kind, key, _ in one.ops if kind == "a"}) > 1 and one.id > 100
    ]
    writer = rng.choice(both)
    (_, x, _), (_, y, _) = [op for op in writer.ops if op[0] == "a"][:1] + [
        op for op in writer.ops if op[0] == "a" and op[1] != next(o[1] for o in writer.ops if o[0] == "a")
    ][:1]
    last = history[-1]
    lists = {key: values for _, key, values in last.ops}
    of_writer = {value for kind, _, value in writer.ops if kind == "a"}
    upto = max(i for i, v in enumerate(lists[x]) if v in of_writer) + 1
    before = min(i for i, v in enumerate(lists[y]) if v in of_writer)
    id = max(one.id for one in history) + 1
    skewed = Transaction(id, "skewed", 0.0, last.end, OK, (("r", x, lists[x][:upto]), ("r", y, lists[y][:before])))
    return [*history, skewed], id


@pytest.mark.parametrize("seed", range(5))
def test_one_read_skew_among_many_is_found(seed: int) -> None:
    history, id = with_read_skew(made_up(seed, 1500, 20), random.Random(seed))
    report = check(history)
    assert [anomaly.name for anomaly in report.anomalies] == ["G-single (read skew)"]
    assert id in report.anomalies[0].transactions
    assert len(report.anomalies[0].cycle) == 2  # the shortest


# ------------------------------------------------------------ against the definition itself


def orders(events: list[tuple[int, str]]):
    """All orders of starts and commits in which each start comes before its commit."""
    if not events:
        yield ()
        return
    for i, event in enumerate(events):
        if event[1] == "commit" and (event[0], "start") in events:
            continue
        for rest in orders(events[:i] + events[i + 1 :]):
            yield (event, *rest)


def explains(order, history: list[Transaction], final: dict[str, list[int]]) -> bool:
    """Whether a store that commits in this order shows each transaction what it saw."""
    lists: dict[str, list[int]] = {key: [] for key in final}
    written_at: dict[str, int] = {}
    snapshots: dict[int, dict[str, list[int]]] = {}
    began: dict[int, int] = {}
    by_id = {one.id: one for one in history}
    for moment, (id, what) in enumerate(order):
        if what == "start":
            snapshots[id] = {key: list(values) for key, values in lists.items()}
            began[id] = moment
            continue
        mine = snapshots[id]
        for kind, key, value in by_id[id].ops:
            if kind == "a":
                mine[key].append(value)
            elif mine[key] != value:
                return False
        for kind, key, value in by_id[id].ops:
            if kind == "a":
                if written_at.get(key, -1) > began[id] and written_at[key] != moment:
                    return False
                written_at[key] = moment
                lists[key].append(value)
    return lists == final


@st.composite
def small_histories(draw):
    """Three transactions on two lists, each with reads that it might have made; and the final lists."""
    shapes = draw(
        st.lists(st.lists(st.tuples(st.sampled_from("ra"), st.sampled_from("xy")), max_size=3), min_size=3, max_size=3)
    )
    mine: dict[str, list[list[int]]] = {"x": [], "y": []}
    value = 0
    for shape in shapes:
        for key in "xy":
            count = sum(op == ("a", key) for op in shape)
            mine[key].append([value := value + 1 for _ in range(count)])
    final = {}
    for key in "xy":
        final[key] = [v for i in draw(st.permutations(range(3))) for v in mine[key][i]]
    history = []
    for i, shape in enumerate(shapes):
        base: dict[str, list[int]] = {}
        left = {key: list(mine[key][i]) for key in "xy"}
        own: dict[str, list[int]] = {"x": [], "y": []}
        ops: list = []
        for kind, key in shape:
            if kind == "a":
                own[key].append(left[key].pop(0))
                ops.append(a(key, own[key][-1]))
                continue
            if key not in base:
                upto = draw(st.integers(0, len(final[key])))
                base[key] = [v for v in final[key][:upto] if v not in mine[key][i]]
            ops.append(r(key, *base[key], *own[key]))
        history.append(txn(i, *ops))
    return history, final


@settings(max_examples=1500, deadline=None)
@given(small=small_histories())
def test_the_verdict_is_that_of_trying_all_orders(small) -> None:
    history, final = small
    last = Transaction(9, "end", 200.0, 201.0, OK, tuple(("r", key, values) for key, values in final.items()))
    events = [(one.id, what) for one in history for what in ("start", "commit")]
    possible = any(explains(order, history, final) for order in orders(events))
    assert check([*history, last]).ok == possible


# ------------------------------------------------------------ drawings


@pytest.mark.parametrize("name", ANOMALIES)
def test_drawings_show_every_transaction_and_edge(name: str) -> None:
    history = ANOMALIES[name]
    [anomaly] = check(history).anomalies
    text, picture = draw(anomaly, history), mermaid(anomaly)
    assert text.startswith(name)
    for id in anomaly.transactions:
        assert f"T{id}  client c{id}" in text
    assert picture.count(" --> ") == len(anomaly.cycle)
    for edge in anomaly.cycle:
        assert f"T{edge.before} -- " in picture
