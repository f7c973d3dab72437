"""The addresses of the page of `perco ui`, and what answers there.

    GET  /                 the page; with ?token=..., lets the browser in
    GET  /static/...       its parts
    GET  /healthz          200 if the store's owner answers, else 503; needs no token, and tells nothing else
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
from perco.cli.ui.asking import Asking, TooLong
from perco.cli.ui.guard import HEADERS, Guard
from perco.cli.values import plain
from perco.errors import PercoError, StoreLocked, Unavailable, UsageError
from perco.serve.client import remote_owner
from perco.serve.opening import visiting

log: logging.Logger = logging.getLogger("perco.store")

STATIC: Final = Path(__file__).parent / "static"
_BODY_MOST: Final = 64 * 1024
_ANSWER_S: Final = 5.0
_AT_ONCE: Final = 8  # questions; further ones wait
_OUT: Final = "open the link that `perco ui` printed: it has the token that this page needs\n"

Answer = Callable[[Request], Awaitable[Any]]


def made(store: str, asking: Asking, acting: Acting, guard: Guard) -> ASGIApp:
    """The application."""
    limiter = trio.CapacityLimiter(_AT_ONCE)

    def answering(answer: Answer) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            async with limiter:
                return await _answered(answer, request)

        return endpoint

    async def page(request: Request) -> Response:
        given = request.query_params.get("token")
        if given is not None and guard.token:
            if not guard.is_token(given):
                return PlainTextResponse(_OUT, 401)
            return RedirectResponse("./", 303, {"set-cookie": guard.cookie_of(given)})
        if not guard.lets_in(request.headers):
            return PlainTextResponse(_OUT, 401)
        return Response((STATIC / "index.html").read_bytes(), media_type="text/html")

    async def health(request: Request) -> Response:
        with trio.move_on_after(_ANSWER_S):
            try:
                async with visiting(store) as db:
                    await remote_owner(db).folder()
                return PlainTextResponse("ok\n")
            except PercoError as error:
                log.debug("the store's owner does not answer: %s", error)
        return PlainTextResponse("the store's owner does not answer\n", 503)

    async def do(request: Request) -> Any:
        if not guard.is_from_page(request.headers):
            raise Unavailable("a request that acts must come from this page")
        return await acting.act(request.path_params["action"], await _body(request))

    asked: dict[str, Answer] = {
        "store": lambda request: asking.store(),
        "samples": lambda request: asking.samples(_number(request, "after", 0)),
        "uses": lambda request: asking.uses(),
        "heat": lambda request: asking.heat(),
        "failed": lambda request: asking.failed(_text(request, "observer") or None, _number(request, "limit", 100)),
        "rows": lambda request: asking.rows(
            _text(request, "table"),
            prefix=_text(request, "prefix"),
            start=_text(request, "start"),
            after=_text(request, "after"),
            limit=_number(request, "limit", 50),
            at=_text(request, "at"),
            columns=_list(request, "columns"),
        ),
        "row": lambda request: asking.row(
            _text(request, "table"), key=_text(request, "key"), ref=_text(request, "ref"), at=_text(request, "at")
        ),
        "causes": lambda request: asking.causes(
            _text(request, "table"), key=_text(request, "key"), ref=_text(request, "ref")
        ),
        "diff": lambda request: asking.differences(
            *(_text(request, "table"), _text(request, "from"), _text(request, "to"), _number(request, "limit", 100))
        ),
    }
    routes = [
        Route("/", page),
        Route("/healthz", health),
        Route("/api/do/{action}", answering(do), methods=["POST"]),
        *(Route(f"/api/{name}", answering(answer)) for name, answer in asked.items()),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    return _Guarded(Starlette(routes=routes), guard)


class _Guarded:
    """Lets only requests in that may see the page; adds headers to all answers."""

    _open: Final = ("/", "/healthz")

    def __init__(self, app: ASGIApp, guard: Guard) -> None:
        self._app, self._guard = app, guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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

        if scope["path"] in self._open or self._guard.lets_in(Headers(scope=scope)):
            await self._app(scope, receive, told)
        else:
            await JSONResponse({"error": _OUT.strip(), "kind": "Token"}, 401)(scope, receive, told)


async def _answered(answer: Answer, request: Request) -> Response:
    try:
        return JSONResponse(plain(await answer(request)))
    except UsageError as error:
        return _refused(error, 400)
    except (Unavailable, StoreLocked, TooLong) as error:
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


def _list(request: Request, name: str) -> list[str]:
    return [each for each in _text(request, name).split(",") if each]


def _number(request: Request, name: str, default: int) -> int:
    text = _text(request, name)
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name}={text!r} is not a number")
    return int(text)
