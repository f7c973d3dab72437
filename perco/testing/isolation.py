"""Decides whether a history satisfies snapshot isolation. Pure.

Every transaction has two moments, its start and its commit. Between the two, no writes of other transactions become
visible to it. A history satisfies (strong) snapshot isolation if all these moments can be put in one order, in which

    start(a)  is before commit(a)
    commit(a) is before start(b)    if b overwrote (ww) or read (wr) what a wrote, or if a had ended when b began (rt)
    start(a)  is before commit(b)   if b overwrote what a read (rw): a did not see the write of b

So a history satisfies snapshot isolation if and only if the graph of these edges has no cycle. The strongly connected
components, found in linear time, show whether there is a cycle. For each component, the shortest cycle gets the name
that Adya and Elle give to the kinds of its edges. Two rw edges in a row close no cycle here, because write skew is
allowed; with `serializable`, every cycle counts.

The longest read of a list gives the order of the list's versions. For a register, this order follows from transactions
that read the register before they wrote it, and from real time. If blind writes overlap, their order is unknown, and
anomalies that depend on it are not found. If a value was appended to a list and never read, its place in the list is
unknown. So let a history end with reads of all keys.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from perco.errors import UsageError
from perco.testing.history import FAIL, OK, UNKNOWN, Key, Transaction, verify

ANOMALIES_MAX: Final = 20
_FOLLOWED_MAX: Final = 64  # possible next versions that get edges; if there are more, the tested store has lost updates
_BUDGET: Final = 3_000_000  # edges that the search for the shortest cycle of one component may follow


@dataclass(frozen=True, slots=True)
class Edge:
    """Why one transaction comes before another: ww, wr, rw on a key, or rt (real time, no key)."""

    before: int
    kind: str
    key: Key | None
    after: int


@dataclass(frozen=True, slots=True)
class Anomaly:
    """An anomaly: its name, the ids of its transactions, a sentence that describes it, and its cycle, if it has one."""

    name: str
    transactions: tuple[int, ...]
    text: str
    cycle: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """The result of `check`. `edges`: dependencies by kind; `unread`: how many appends no transaction read."""

    transactions: int
    edges: dict[str, int]
    unread: int
    anomalies: tuple[Anomaly, ...]

    @property
    def ok(self) -> bool:
        return not self.anomalies


def check(history: Iterable[Transaction], *, serializable: bool = False, real_time: bool = True) -> Report:
    """Decide whether a history satisfies snapshot isolation; with `serializable`, also whether it is serializable.

    Args:
        history: transactions that append to lists and read them, or write registers and read them. No value may be
            written to a key twice.
        real_time: whether a transaction must see the transactions that had ended before it began.

    Raises: UsageError if the history cannot be decided: for example, a value was written to a key twice, or a key was
    used both as a list and as a register.
    """
    search = _Search(list(history))
    search.read_all()
    search.order_versions(real_time=real_time)
    search.find(real_time=real_time, serializable=serializable)
    kinds: dict[str, int] = defaultdict(int)
    for edge in search.edges:
        kinds[edge.kind] += 1
    return Report(len(search.all), dict(kinds), search.unread, tuple(search.anomalies))


class _Search:
    def __init__(self, history: list[Transaction]) -> None:
        for one in history:
            verify(one, f"transaction {one.id!r}")
        self.all = history
        if len({one.id for one in history}) != len(history):
            raise UsageError("two transactions of the history have the same id")
        self.anomalies: list[Anomaly] = []
        self.edges: list[Edge] = []
        self.unread = 0
        # key -> value -> (transaction, whether this value is the last one that the transaction wrote to the key)
        self.writers: dict[Key, dict[Any, tuple[Transaction, bool]]] = defaultdict(dict)
        # key -> (reader, what it read of other transactions' writes: a list, or a register's value)
        self.reads: dict[Key, list[tuple[Transaction, Any]]] = defaultdict(list)
        self.lists: dict[Key, bool] = {}
        self.committed: set[int] = set()
        self._index_writes()

    def _note(self, name: str, transactions: Sequence[Transaction], text: str) -> None:
        if len(self.anomalies) < ANOMALIES_MAX:
            self.anomalies.append(Anomaly(name, tuple(one.id for one in transactions), text))

    def _index_writes(self) -> None:
        seen: set[tuple[Key, Any]] = set()
        for one in self.all:
            last: dict[Key, Any] = {}
            own = {(key, value) for kind, key, value in one.ops if kind != "r"}
            for kind, key, value in one.ops:
                is_list = kind == "a" or (kind == "r" and isinstance(value, list))
                tells = kind != "r" or is_list or value is not None
                if tells and self.lists.setdefault(key, is_list) != is_list:
                    raise UsageError(f"transaction {one.id}: key {key!r} is a list here and a register elsewhere")
                if kind == "r":
                    if isinstance(value, list):
                        seen.update((key, element) for element in value if (key, element) not in own)
                    elif value is not None and (key, value) not in own:
                        seen.add((key, value))
                    continue
                if value in self.writers[key]:
                    other = self.writers[key][value][0]
                    raise UsageError(f"{value!r} is written to {key!r} by transaction {other.id} and by {one.id}")
                if key in last:
                    self.writers[key][last[key]] = (one, False)
                last[key] = value
                self.writers[key][value] = (one, True)
        # A transaction of unknown outcome has committed if another one read any of its writes. If none did, its outcome
        # does not matter.
        for one in self.all:
            if one.status == OK or (
                one.status == UNKNOWN and any((key, value) in seen for kind, key, value in one.ops if kind != "r")
            ):
                self.committed.add(one.id)

    # ------------------------------------------------------------ what each transaction saw

    def read_all(self) -> None:
        """Check reads of own writes, repeated reads, and values that should not have been visible."""
        for one in self.all:
            if one.id in self.committed:
                self._read_one(one)

    def _read_one(self, one: Transaction) -> None:
        base: dict[Key, Any] = {}
        own: dict[Key, list[Any]] = defaultdict(list)
        for kind, key, value in one.ops:
            if kind != "r":
                own[key].append(value)
                continue
            mine = own[key]
            if not self.lists.get(key, False):
                if mine:
                    if value != mine[-1]:
                        self._note(
                            "own write not seen", [one], f"{one.id} wrote {mine[-1]!r} to {key!r} and read {value!r}"
                        )
                    continue
                before = value
            else:
                if mine and value[-len(mine) :] != mine:
                    self._note("own write not seen", [one], f"{one.id} appended {mine!r} to {key!r} and read {value!r}")
                    continue
                before = value[: len(value) - len(mine)]
            if key in base:
                if before != base[key]:
                    text = f"{one.id} read {key!r} twice: {_short(base[key])}, then {_short(before)}"
                    self._note("read not repeatable", [one], text)
                continue
            base[key] = before
            if self._is_sound(one, key, before):
                self.reads[key].append((one, before))

    def _is_sound(self, one: Transaction, key: Key, before: Any) -> bool:
        """Whether committed transactions wrote all values that were read, and the last one is its writer's final
        value."""
        found = before if isinstance(before, list) else [] if before is None else [before]
        writers = self.writers.get(key, {})
        sound = True
        for value in found:
            writer, _ = writers.get(value, (None, True))
            if writer is None:
                self._note("garbage read", [one], f"{one.id} read {value!r} of {key!r}, which no transaction wrote")
                sound = False
            elif writer.status == FAIL:
                text = f"{one.id} read {value!r} of {key!r}, which {writer.id} wrote and did not commit"
                self._note("G1a (aborted read)", [one, writer], text)
                sound = False
            elif writer is one:
                self._note("future read", [one], f"{one.id} read {value!r} of {key!r} before it wrote it")
                sound = False
        if len(set(found)) != len(found):
            self._note("read twice the same", [one], f"{one.id} read a value twice in {key!r}: {_short(before)}")
            sound = False
        if sound and found and not writers[found[-1]][1]:
            writer = writers[found[-1]][0]
            text = f"{one.id} read {found[-1]!r} of {key!r}, which {writer.id} wrote on its way to another value"
            self._note("G1b (intermediate read)", [one, writer], text)
            sound = False
        return sound

    # ------------------------------------------------------------ which version follows which

    def order_versions(self, *, real_time: bool) -> None:
        for key, is_list in self.lists.items():
            if is_list:
                self._order_list(key)
            else:
                self._order_register(key, real_time=real_time)

    def _edge(self, before: Transaction, kind: str, key: Key, after: Transaction) -> None:
        if before is not after:
            self.edges.append(Edge(before.id, kind, key, after.id))

    def _order_list(self, key: Key) -> None:
        reads, writers = self.reads[key], self.writers[key]
        longest: list[Any] = max((before for _, before in reads), key=len, default=[])
        holder = next((one for one, before in reads if before is longest), None)
        order = [writers[value][0] for value in longest]
        shown = set(longest)
        later = [one for value, (one, last) in writers.items() if last and value not in shown and one.status == OK]
        self.unread += len(later)
        self._find_lost(key, later)
        later = later[:_FOLLOWED_MAX]
        for before, after in pairwise(order):
            self._edge(before, "ww", key, after)
        if order:
            for one in later:
                self._edge(order[-1], "ww", key, one)
        for one, before in reads:
            n = len(before)
            if before != longest[:n]:
                assert holder is not None
                text = f"{one.id} and {holder.id} read {key!r} in different orders: {_short(before)}, {_short(longest)}"
                self._note("incompatible orders", [one, holder], text)
                continue
            if n:
                self._edge(order[n - 1], "wr", key, one)
            if n < len(order):
                self._edge(one, "rw", key, order[n])
            else:
                for other in later:
                    self._edge(one, "rw", key, other)

    def _order_register(self, key: Key, *, real_time: bool) -> None:
        writers = self.writers[key]
        done = [one for one, last in writers.values() if last and one.id in self.committed]
        done.sort(key=lambda one: one.begin)
        begins = [one.begin for one in done]
        of = {value: one for value, (one, last) in writers.items() if last}
        wrote = {one.id for one in done}
        successors: dict[Any, list[Transaction]] = defaultdict(list)
        for one, before in self.reads[key]:
            if one.id in wrote and self._read_first(one, key):
                successors[before].append(one)
        for before, after in successors.items():
            if before is not None:
                for one in after:
                    self._edge(of[before], "ww", key, one)
            for one, other in pairwise(after):
                self._lost(key, one, other, before)
        for one, before in self.reads[key]:
            if before is not None:
                self._edge(of[before], "wr", key, one)
            ended = _end(of[before]) if before is not None else float("-inf")
            later = _next_in_time(done, bisect_right(begins, ended)) if real_time else ()
            for other in (*successors[before][:_FOLLOWED_MAX], *later):
                self._edge(one, "rw", key, other)

    def _find_lost(self, key: Key, unread: Sequence[Transaction]) -> None:
        """Find lost updates among unread appends: two transactions that read the same list and both appended to it."""
        wrote = {one.id for one in unread}
        first: dict[tuple[Any, ...], Transaction] = {}
        for one, before in self.reads[key]:
            if one.id in wrote and self._read_first(one, key):
                other = first.setdefault(tuple(before), one)
                if other is not one:
                    self._lost(key, other, one, before)

    def _lost(self, key: Key, one: Transaction, other: Transaction, before: Any) -> None:
        if len(self.anomalies) < ANOMALIES_MAX:
            both = f"{one.id} and {other.id} both read {_short(before)} of {key!r}"
            text = f"{both} and wrote to it, as if the other had not"
            cycle = (Edge(one.id, "rw", key, other.id), Edge(other.id, "rw", key, one.id))
            self.anomalies.append(Anomaly("lost update", (one.id, other.id), text, cycle))

    def _read_first(self, one: Transaction, key: Key) -> bool:
        return next(kind for kind, other, _ in one.ops if other == key) == "r"

    # ------------------------------------------------------------ cycles

    def find(self, *, real_time: bool, serializable: bool) -> None:
        told = {id for anomaly in self.anomalies if anomaly.cycle for id in anomaly.transactions}
        self._find(_Moments(self, real_time=False), told)
        if real_time:
            self._find(_Moments(self, real_time=True), told)
        if serializable:
            self._find(_Order(self), told)

    def _find(self, graph: _Graph, told: set[int]) -> None:
        """Name a shortest cycle of each component, unless one of its transactions has been reported already."""
        for component in graph.components():
            if len(self.anomalies) >= ANOMALIES_MAX:
                return
            cycle = graph.shortest_cycle(component)
            if told.isdisjoint(edge.before for edge in cycle):
                told.update(edge.before for edge in cycle)
                self._name(cycle)

    def _name(self, cycle: Sequence[Edge]) -> None:
        ids = tuple(edge.before for edge in cycle)
        self.anomalies.append(Anomaly(name_of(cycle), ids, "; ".join(map(_tell, cycle)), tuple(cycle)))


def name_of(cycle: Sequence[Edge]) -> str:
    """The name of a cycle in the terms of Adya, Cerone and Elle."""
    kinds = [edge.kind for edge in cycle]
    rw = kinds.count("rw")
    if "rt" in kinds:
        if set(kinds) == {"rw", "rt"} and rw == 1:
            return "stale read"
        if set(kinds) == {"wr", "rt"}:
            return "future read"
        return "real-time order"
    if not rw:
        return "G0 (dirty write)" if set(kinds) == {"ww"} else "G1c (circular information flow)"
    if rw == 1:
        one_key = len({edge.key for edge in cycle}) == 1
        return "lost update" if one_key and set(kinds) == {"rw", "ww"} else "G-single (read skew)"
    if any(kinds[i] == kinds[i - 1] == "rw" for i in range(len(kinds))):
        return "write skew" if kinds == ["rw", "rw"] else "G2 (anti-dependency cycle)"
    return "long fork" if sorted(kinds) == ["rw", "rw", "wr", "wr"] else "G-nonadjacent"


def _tell(edge: Edge) -> str:
    how = {
        "ww": "{0} wrote {2!r} before {1} did",
        "wr": "{1} read what {0} wrote to {2!r}",
        "rw": "{0} read {2!r} without what {1} wrote to it",
        "rt": "{0} had ended when {1} began",
    }
    return how[edge.kind].format(edge.before, edge.after, edge.key)


def _short(value: Any) -> str:
    if isinstance(value, list) and len(value) > 6:
        return f"[{', '.join(map(repr, value[:2]))}, ... {', '.join(map(repr, value[-3:]))}]"
    return repr(value)


def _next_in_time(writers: Sequence[Transaction], first: int) -> Iterable[Transaction]:
    """Of the writers from index `first` on, yields those that no other of them certainly precedes. `writers` are sorted
    by `begin`."""
    first_end = float("inf")
    for i in range(first, len(writers)):
        one = writers[i]
        if one.begin > first_end:
            return
        first_end = min(first_end, _end(one))
        yield one


def _end(one: Transaction) -> float:
    """The time by which a transaction had certainly committed; infinity if its outcome is unknown."""
    return one.end if one.status == OK else float("inf")


class _Graph:
    """A directed graph. Nodes are numbers; an edge has a weight, 0 or 1, and may stand for an `Edge`."""

    def __init__(self, nodes: int) -> None:
        self.out: list[list[tuple[int, int, Edge | None]]] = [[] for _ in range(nodes)]

    def add(self, a: int, b: int, weight: int, edge: Edge | None) -> None:
        self.out[a].append((b, weight, edge))

    def components(self) -> list[list[int]]:
        """The strongly connected components of more than one node (Tarjan, without recursion)."""
        out = self.out
        index: list[int] = [-1] * len(out)
        low: list[int] = [0] * len(out)
        on_stack = bytearray(len(out))
        stack: list[int] = []
        found: list[list[int]] = []
        count = 0
        for root in range(len(out)):
            if index[root] >= 0:
                continue
            index[root] = low[root] = count
            count += 1
            stack.append(root)
            on_stack[root] = 1
            work = [(root, 0)]
            while work:
                node, at = work.pop()
                pushed = False
                edges = out[node]
                while at < len(edges):
                    other = edges[at][0]
                    at += 1
                    if index[other] < 0:
                        index[other] = low[other] = count
                        count += 1
                        stack.append(other)
                        on_stack[other] = 1
                        work.append((node, at))
                        work.append((other, 0))
                        pushed = True
                        break
                    if on_stack[other]:
                        low[node] = min(low[node], index[other])
                if pushed:
                    continue
                if low[node] == index[node]:
                    component: list[int] = []
                    while True:
                        other = stack.pop()
                        on_stack[other] = 0
                        component.append(other)
                        if other == node:
                            break
                    if len(component) > 1:
                        found.append(component)
                if work:
                    parent = work[-1][0]
                    low[parent] = min(low[parent], low[node])
        return found

    def shortest_cycle(self, component: Sequence[int]) -> list[Edge]:
        """The shortest cycle of a component; for a very large component, the shortest one found within the budget."""
        inside = set(component)
        best: list[tuple[int, int, Edge | None]] = []
        least = len(inside) + 1
        budget = _BUDGET
        for start in component:
            distance = {start: 0}
            came: dict[int, tuple[int, tuple[int, int, Edge | None]]] = {}
            queue = deque([start])
            closing: tuple[int, tuple[int, int, Edge | None]] | None = None
            while queue:
                node = queue.popleft()
                so_far = distance[node]
                if so_far >= least:
                    break
                for step in self.out[node]:
                    other, weight, _ = step
                    budget -= 1
                    total = so_far + weight
                    if other == start:
                        if total < least:
                            least, closing = total, (node, step)
                        continue
                    if other in inside and total < distance.get(other, least):
                        distance[other] = total
                        came[other] = (node, step)
                        if weight:
                            queue.append(other)
                        else:
                            queue.appendleft(other)
            if closing is not None:
                node, step = closing
                best = [step]
                while node != start:
                    node, step = came[node]
                    best.append(step)
                best.reverse()
            if best and budget < 0:
                break
        return self.edges_of(best)

    def edges_of(self, steps: Sequence[tuple[int, int, Edge | None]]) -> list[Edge]:
        return [edge for _, _, edge in steps if edge is not None]


class _Moments(_Graph):
    """A graph with two nodes for each committed transaction: its start and its commit. For real time, it also has a
    chain of nodes, one for the end of each transaction."""

    def __init__(self, search: _Search, *, real_time: bool) -> None:
        self._ones = [one for one in search.all if one.id in search.committed]
        number = {one.id: 2 * i for i, one in enumerate(self._ones)}
        ends = sorted((one for one in self._ones if one.status == OK), key=lambda one: one.end) if real_time else []
        super().__init__(2 * len(self._ones) + len(ends))
        self._chain = 2 * len(self._ones)
        for start in number.values():
            self.add(start, start + 1, 0, None)
        for edge in search.edges:
            a, b = number[edge.before], number[edge.after]
            if edge.kind == "rw":
                self.add(a, b + 1, 1, edge)
            else:
                self.add(a + 1, b, 1, edge)
        at = -1
        for i, one in enumerate(ends):
            self.add(number[one.id] + 1, self._chain + i, 1, None)
            if i:
                self.add(self._chain + i - 1, self._chain + i, 0, None)
        for one in sorted(self._ones, key=lambda one: one.begin) if real_time else ():
            while at + 1 < len(ends) and ends[at + 1].end < one.begin:
                at += 1
            if at >= 0:
                self.add(self._chain + at, number[one.id], 0, None)

    def edges_of(self, steps: Sequence[tuple[int, int, Edge | None]]) -> list[Edge]:
        """Replace steps through the chain of ends with one edge, from the transaction that ended to the one that
        began."""
        found: list[Edge] = []
        at = steps[-1][0]  # where the first step begins
        turn = 0
        if at >= self._chain:  # begin with the first step after the chain
            turn = next(i for i, step in enumerate(steps) if step[0] < self._chain) + 1
            at = steps[turn - 1][0]
            steps = (*steps[turn:], *steps[:turn])
        ended = -1
        for node, _, edge in steps:
            if edge is not None:
                found.append(edge)
            elif node >= self._chain:
                if at < self._chain:
                    ended = at
            elif at >= self._chain:
                found.append(Edge(self._ones[ended // 2].id, "rt", None, self._ones[node // 2].id))
            at = node
        return found


class _Order(_Graph):
    """A graph with one node for each committed transaction. The history is serializable if the graph has no cycle."""

    def __init__(self, search: _Search) -> None:
        ids = sorted(search.committed)
        number = {id: i for i, id in enumerate(ids)}
        super().__init__(len(ids))
        for edge in search.edges:
            self.add(number[edge.before], number[edge.after], 1, edge)
