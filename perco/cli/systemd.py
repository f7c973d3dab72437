"""Tells systemd that a command is ready, still works, and ends: `Type=notify` and `WatchdogSec=` of a unit.

The messages are those of sd_notify(3): datagrams to the socket that NOTIFY_SOCKET names. The watchdog's messages are
sent by a task of the loop. So if the loop is held for longer than `WatchdogSec=`, systemd restarts the program.
"""

from __future__ import annotations

import os
import socket
from typing import Final

import trio

_PER_PERIOD: Final = 3  # messages in the time after which systemd restarts the program


def tell(message: str) -> bool:
    """Send a message to systemd. Returns False if systemd does not wait for messages of this process, or cannot be
    reached."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
            channel.connect(address)
            channel.sendall(message.encode())
    except OSError:
        return False
    return True


def watchdog_s() -> float | None:
    """How often systemd expects a message of this process, in seconds; None: never."""
    microseconds, process = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    if not microseconds.isdigit() or not int(microseconds) or process not in ("", str(os.getpid())):
        return None
    return int(microseconds) / 1e6


async def told() -> None:
    """Tell systemd that the program is ready, and that it works, until this is cancelled."""
    tell("READY=1\nSTATUS=works")
    every_s = watchdog_s()
    while every_s is not None:
        tell("WATCHDOG=1")
        await trio.sleep(every_s / _PER_PERIOD)
