"""Collects the clients' answers when they are asked what their tasks wait for."""

from __future__ import annotations

import trio

from perco.serve.tasks import ProcessTasks


class ToldTasks:
    """The clients' answers, by session."""

    number: int
    asked: int
    all: trio.Event
    over: trio.Event

    def __init__(self, number: int, asked: int) -> None:
        self.number, self.asked = number, asked
        self.answers: dict[str, ProcessTasks] = {}
        self.all, self.over = trio.Event(), trio.Event()
        self.found: list[ProcessTasks] = []

    async def shared(self) -> list[ProcessTasks]:
        await self.over.wait()
        return self.found
