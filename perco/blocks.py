"""Blocks and iterators that raise a helpful error if they are used in the wrong way."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Generic, ParamSpec, TypeVar

from perco.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class AsyncOnly:
    """Base of objects for `async with` or `async for` only: other uses raise an error that says what to write.

    The methods are hidden from type checkers: a checker reports a wrong use by itself if the methods do not exist.
    """

    _write = ""

    if not TYPE_CHECKING:

        def __enter__(self) -> None:
            raise UsageError(f"write `{self._write}`")

        def __exit__(self, *_: object) -> None:
            raise AssertionError

        def __iter__(self) -> None:
            raise UsageError(f"write `{self._write}`")

        def __await__(self) -> None:
            raise UsageError(f"write `{self._write}`")

        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"{type(self).__name__!r} has no {name!r}: write `{self._write}`", name=name, obj=self)


class BlockingOnly:
    """Base of objects for `with` or `for` only: `async with` and `async for` raise an error that says what to write.

    The methods are hidden from type checkers, as in `AsyncOnly`.
    """

    _write = ""

    if not TYPE_CHECKING:

        async def __aenter__(self) -> None:
            raise UsageError(f"perco.sync is for blocking code: write `{self._write}`")

        async def __aexit__(self, *_: object) -> None:
            raise AssertionError

        def __aiter__(self) -> None:
            raise UsageError(f"perco.sync is for blocking code: write `{self._write}`")

        def __getattr__(self, name: str) -> None:
            raise AttributeError(f"{type(self).__name__!r} has no {name!r}: write `{self._write}`", name=name, obj=self)


class AsyncBlock(AsyncOnly, Generic[T]):
    """An `async with` block that `async_block` has made from a generator."""

    def __init__(self, block: AbstractAsyncContextManager[T], write: str) -> None:
        self._block, self._write = block, write

    async def __aenter__(self) -> T:
        return await self._block.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._block.__aexit__(kind, error, trace)


def async_block(write: str) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AsyncBlock[T]]]:
    """Like `asynccontextmanager`, but a block that is used without `async with` raises an error that tells the user
    what to write (`write`)."""

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AsyncBlock[T]]:
        block = asynccontextmanager(function)

        @functools.wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> AsyncBlock[T]:
            return AsyncBlock(block(*args, **kwargs), write)

        return make

    return decorate
