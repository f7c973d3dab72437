"""Lists what every task of this process waits for: `perco status --tasks`.

A thread dump of an event loop shows the stack of the running task, but not the stacks of the tasks that wait. Each task
keeps its own stack, from the function with which it began to the line at which it waits; this module reads these
stacks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final, NamedTuple

import trio

from perco.rpc.framing import WireError

_GROUPS_MAX: Final = 500  # how many groups of tasks of a process are listed; further tasks are only counted
_TEXT_MAX: Final = 200
_LINES: Final = 3
_NUMBER_MAX: Final = 1 << 31
_DEPTH_MAX: Final = 50  # the depth shown for a task that is even deeper
_CHILDREN: Final = "its children"


class Waiting(NamedTuple):
    """Tasks that look alike: siblings of one name that wait at the same line, for the same thing.

    `depth`: in the tree of nurseries; `alike`: how many tasks; `at`: the innermost lines of the program's own code, and
    the line of perco's code at which the tasks wait; `wants`: what they wait for.
    """

    depth: int
    alike: int
    name: str
    at: str
    wants: str


class ProcessTasks(NamedTuple):
    """`role`: "owner" or "client"."""

    role: str
    pid: int
    tasks: list[Waiting]
    more: int  # tasks that are not listed


def here(role: str) -> ProcessTasks:
    """List the tasks of this process's loop."""
    found: list[Waiting] = []
    more = 0
    root = trio.lowlevel.current_root_task()
    for depth, task in _tree(root) if root is not None else ():
        at, wants = _where(task)
        if not wants:
            continue
        seen = Waiting(depth, 1, text(task.name), text(at), text(wants))
        if found and found[-1][2:] == seen[2:] and found[-1].depth == depth:
            found[-1] = found[-1]._replace(alike=found[-1].alike + 1)
        elif len(found) < _GROUPS_MAX:
            found.append(seen)
        else:
            more += 1
    return ProcessTasks(role, os.getpid(), found, more)


def held(pid: int, seconds: float, where: str) -> ProcessTasks:
    """The entry for a client that cannot list its tasks, because its loop is held (R10)."""
    return ProcessTasks("client", pid, [Waiting(0, 1, "(the loop)", where, f"has not turned for {seconds:.1f} s")], 0)


def read(packed: Any) -> ProcessTasks:
    """Decode tasks from the wire; the client is not trusted. Raises: WireError."""
    try:
        role, pid, listed, more = packed
        told = [Waiting(*task) for task in listed]
        found = [
            Waiting(min(depth, _DEPTH_MAX), alike, text(name), text(at), text(wants))
            for depth, alike, name, at, wants in told
        ]
        numbers = [pid, more, *(task.depth for task in told), *(task.alike for task in told)]
        if len(found) > _GROUPS_MAX or not all(type(each) is int and 0 <= each < _NUMBER_MAX for each in numbers):
            raise ValueError("not a number, or too many tasks")
        return ProcessTasks(text(role), pid, found, more)
    except (TypeError, ValueError) as error:
        raise WireError(f"tasks that cannot be decoded: {error}") from error


def text(value: Any) -> str:
    """A client's text, made safe for a message and a terminal. Raises: TypeError."""
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return "".join(c if c.isprintable() else "?" for c in value[:_TEXT_MAX])


def _tree(task: trio.lowlevel.Task) -> Iterator[tuple[int, trio.lowlevel.Task]]:
    """All tasks: parents before their children, tasks of one name beside each other."""
    waiting = [(0, task)]
    while waiting:
        depth, task = waiting.pop()
        yield depth, task
        children = [child for nursery in task.child_nurseries for child in nursery.child_tasks]
        waiting += ((depth + 1, child) for child in sorted(children, key=lambda child: child.name, reverse=True))


def _where(task: trio.lowlevel.Task) -> tuple[str, str]:
    """(at, wants) of a task; ("", ""): the task is trio's own."""
    frames = list(task.iter_await_frames())
    if not frames:
        return "", "its turn"  # it has not begun, or it is the task that runs this code
    ours = [pair for pair in frames if not _of(pair[0], "trio")]
    if not ours:
        return "", ""
    theirs = frames[frames.index(ours[-1]) + 1 :]
    shown = [pair for pair in ours if not _of(pair[0], "perco")][-_LINES:]
    if not shown or shown[-1] != ours[-1]:
        shown.append(ours[-1])
    return " > ".join(map(_line, shown)), _wanted(theirs[0][0] if theirs else None)


def _of(frame: FrameType, package: str) -> bool:
    name = frame.f_globals.get("__name__", "")
    return bool(name == package or name.startswith(f"{package}."))


def _line(pair: tuple[FrameType, int]) -> str:
    frame, line = pair
    return f"{frame.f_globals.get('__name__', '?')}:{line} {frame.f_code.co_name}"


def _wanted(frame: FrameType | None) -> str:
    """Says in words what a task waits for, if it waits in this function of trio's."""
    if frame is None:
        return "an answer"
    name = frame.f_code.co_name
    if name in ("_nested_child_finished", "__aexit__"):
        return _CHILDREN
    if name == "wait_task_rescheduled":
        return "an answer"
    owner = frame.f_locals.get("self")
    return f"{type(owner).__name__}.{name}" if owner is not None else name


def lines(tasks: Sequence[Waiting]) -> list[tuple[str, str, str]]:
    """The rows of a table: the indented name, and how many tasks; where these tasks wait; what they wait for."""
    least = min((task.depth for task in tasks), default=0)
    return [
        ("  " * (task.depth - least) + task.name + (f"  x {task.alike}" if task.alike > 1 else ""), task.at, task.wants)
        for task in tasks
    ]
