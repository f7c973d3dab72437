"""The addresses of the page of `perco ui`, and what answers there.

    GET  /                 the page; with ?token=..., lets the browser in
    GET  /static/...       its parts
    GET  /healthz          200 if the store's owner has answered a moment ago, else 503; needs no token
    GET  /api/...          what the page shows, as JSON
    POST /api/do/ACTION    what the page does; the arguments are a JSON object

Errors are {"error": ..., "kind": ...}.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import trio
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perco.cli.ui.acting import Acting
from perco.cli.ui.asking import Asking
from perco.cli.ui.bounds import Busy, TooLong
from perco.cli.ui.guard import HEADERS, Guard
from perco.cli.values import plain
from perco.errors import PercoError, SnapshotTooOld, StoreLocked, Unavailable, UsageError

log: logging.Logger = logging.getLogger("perco.store")

STATIC: Final = Path(__file__).parent / "static"
_BODY_MOST: Final = 64 * 1024
_FRESH_S: Final = 10.0  # the age of a sample that says that the owner answers
_GONE: Final = 499  # the browser did not wait for the answer
_DIGITS_MOST: Final = 19
_AT_ONCE: Final = 8  # questions; further ones wait
_OUT: Final = "open the link that `perco ui` printed: it has the token that this page needs\n"

Answer = Callable[[Request], Awaitable[Any]]


def made(asking: Asking, acting: Acting, guard: Guard) -> ASGIApp:
    """The application."""
    limiter = trio.CapacityLimiter(_AT_ONCE)

    def answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            response = Response(status_code=_GONE)
            async with limiter, trio.open_nursery() as nursery:
                nursery.start_soon(_until_gone, request, nursery.cancel_scope)
                response = await _answered(answer, request)
                nursery.cancel_scope.cancel()
            return response

        return endpoint

    async def page(request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None and guard.token:
            if not guard.is_token(given):
                return PlainTextResponse(_OUT, 401)
            return RedirectResponse("./", 303, {"set-cookie": guard.set_cookie()})
        if not guard.lets_in(request.headers):
            return PlainTextResponse(_OUT, 401)
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def health(request: Request) -> Response:
        if asking.owner_answers(_FRESH_S):
            return PlainTextResponse("ok\n")
        return PlainTextResponse("the store's owner does not answer\n", 503)

    async def samples(request: Request) -> Response:
        """Neither waits for other questions, nor for the store."""
        return await _answered(lambda request: asking.samples(_number(request, "after", 0)), request)

    async def do(request: Request) -> Response:
        if not guard.is_from_page(request.headers):
            said = "a request that acts must come from this page; a proxy before it has to pass on the header Host"
            return JSONResponse({"error": said, "kind": "Elsewhere"}, 403)
        return await _answered(act, request)

    async def act(request: Request) -> Any:
        return await acting.act(request.path_params["action"], await _body(request))

    routes = [
        Route("/", page),
        Route("/healthz", health),
        Route("/api/do/{action}", do, methods=["POST"]),
        Route("/api/samples", samples),
        *(Route(f"/api/{name}", answering(answer)) for name, answer in _questions(asking).items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return _Guarded(Starlette(routes=routes), guard)


def _questions(asking: Asking) -> dict[str, Answer]:
    """The page's questions, by name."""
    return {
        "store": lambda request: asking.store(),
        "uses": lambda request: asking.uses(),
        "heat": lambda request: asking.heat(),
        "failed": lambda request: asking.failed(_text(request, "observer") or None, _number(request, "limit", 100)),
        "rows": lambda request: asking.rows(
            _text(request, "table"),
            prefix=_text(request, "prefix"),
            start=_text(request, "start"),
            after=_given(request, "after"),
            limit=_number(request, "limit", 50),
            at=_text(request, "at"),
            columns=_list(request, "columns"),
        ),
        "row": lambda request: asking.row(
            _text(request, "table"),
            key=_text(request, "key"),
            ref=_given(request, "ref"),
            at=_text(request, "at"),
        ),
        "causes": lambda request: asking.causes(
            _text(request, "table"), key=_text(request, "key"), ref=_given(request, "ref")
        ),
        "diff": lambda request: asking.differences(
            *(_text(request, "table"), _text(request, "from"), _text(request, "to"), _number(request, "limit", 100))
        ),
    }


class _Guarded:
    """Lets only requests in that may see the page; adds headers to all answers."""

    _open: Final = ("/", "/healthz")

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def told(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if not scope["path"].startswith("/static/"):
                    headers["cache-control"] = "no-store"
            await send(message)

        headers = Headers(scope=scope)
        here = self._guard.token or not scope["path"].startswith("/api/") or self._guard.is_from_page(headers)
        if scope["path"] in self._open or (here and self._guard.lets_in(headers)):
            await self._app(scope, receive, told)
        else:
            await JSONResponse({"error": _OUT.strip(), "kind": "Token"}, 401)(scope, receive, told)


async def _until_gone(request: Request, scope: trio.CancelScope) -> None:
    """Cancel the answer to a browser that no longer waits for it."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


async def _answered(answer: Answer, request: Request) -> Response:
    try:
        return JSONResponse(plain(await answer(request)))
    except (UsageError, SnapshotTooOld) as error:
        return _refused(error, 400)
    except (Unavailable, StoreLocked, TooLong, Busy) as error:
        return _refused(error, 503)
    except PercoError as error:
        return _refused(error, 500)
    except Exception as error:
        log.exception("the page could not be answered: %s", request.url.path)
        return _refused(error, 500)


def _refused(error: Exception, code: int) -> Response:
    return JSONResponse({"error": str(error), "kind": type(error).__name__}, code)


async def _body(request: Request) -> dict[str, Any]:
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > _BODY_MOST:
            raise UsageError(f"the arguments are longer than {_BODY_MOST} bytes")
    try:
        body = json.loads(found or b"{}")
    except ValueError as error:
        raise UsageError(f"the arguments are not JSON: {error}") from error
    if not isinstance(body, dict):
        raise UsageError("the arguments are a JSON object")
    return body


def _text(request: Request, name: str) -> str:
    return request.query_params.get(name, "")


def _given(request: Request, name: str) -> str | None:
    """A parameter that may be empty; None: it is not given."""
    return request.query_params.get(name)


def _list(request: Request, name: str) -> list[str]:
    return [each for each in _text(request, name).split(",") if each]


def _number(request: Request, name: str, default: int) -> int:
    text = _text(request, name)
    if not text:
        return default
    if not text.isdecimal() or len(text) > _DIGITS_MOST:
        raise UsageError(f"{name}={text!r} is not a number")
    return int(text)
