"""A server with OpenAI's interface: an ASGI application for one language model. Needs `pip install lapilli[serve]`.

As many answers are written at a time as the model has sequences; further requests wait in a queue of limited length. A client that
goes away ends its answer.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lapilli.errors import InvalidInputError, LapilliError
from lapilli.llm.language_model import LLM, AnswerStream, Token
from lapilli.llm.metrics import Metrics
from lapilli.llm.requests import CompletionRequest, completion_request, embedding_request

LOCAL = ("localhost", "127.0.0.1", "[::1]")
"""The hosts that requests name by default: a web page whose name leads to this machine is none of them."""
_log = logging.getLogger(__name__)
_REASONS = {"stop": "stop", "length": "length", "cancelled": "length"}


@dataclass(frozen=True)
class ServerLimits:
    """body: bytes of a request. queue: requests that are written or wait. seconds: of an answer, waiting included; then it ends as
    if it had max_tokens.
    """

    body: int = 1 << 20
    queue: int = 16
    seconds: float = 600.0


class Refusal(Exception):
    """An error that a client is told. status: of HTTP."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, headers

    def response(self) -> Response:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": self.message, "type": kind, "param": None, "code": None}
        return JSONResponse({"error": error}, self.status, headers=self.headers)


@dataclass(frozen=True)
class Piece:
    """Text of an answer, and the tokens since the piece before."""

    text: str
    tokens: tuple[Token, ...]


class Desk:
    """Writes answers, as many at a time as the model has sequences, each in a thread."""

    def __init__(self, model: LLM, limits: ServerLimits, metrics: Metrics) -> None:
        self.model, self.limits, self.metrics = model, limits, metrics
        self._writer = ThreadPoolExecutor(model.sequences, thread_name_prefix="lapilli-answers")
        self._waiting = 0

    def close(self) -> None:
        self._writer.shutdown(cancel_futures=True)

    def enter(self) -> None:
        """Takes a place in the queue, which `leave` gives back."""
        if self._waiting >= self.limits.queue:
            raise Refusal(429, f"{self._waiting} requests wait already; try again later.", {"Retry-After": "5"})
        self._count(1)

    def leave(self) -> None:
        self._count(-1)

    def _count(self, n: int) -> None:
        self._waiting += n
        self.metrics.add("requests_waiting", n)

    async def pieces(self, stream: AnswerStream) -> AsyncGenerator[Piece, None]:
        """The answer, piece by piece; leaving early ends it. Raises what writing raises."""
        loop, arrived = asyncio.get_running_loop(), time.monotonic()
        queue: asyncio.Queue[Piece | BaseException | None] = asyncio.Queue()

        def put(item: Piece | BaseException | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, item)

        def write() -> None:
            given = 0
            try:
                for text in stream.steadily():
                    tokens = tuple(stream.answer.tokens[given:])
                    if not given:
                        self.metrics.observe("first_token_seconds", time.monotonic() - arrived)
                    given += len(tokens)
                    put(Piece(text, tokens))
                if given < len(stream.answer.tokens):
                    put(Piece("", tuple(stream.answer.tokens[given:])))
                put(None)
            except BaseException as error:
                put(error)
            finally:
                self.metrics.add("prompt_tokens_total", stream.answer.prompt_tokens)
                self.metrics.add("generated_tokens_total", len(stream.answer.tokens))
                self.metrics.observe("request_seconds", time.monotonic() - arrived)

        end = loop.call_later(self.limits.seconds, stream.cancel)
        self._writer.submit(write)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            end.cancel()
            stream.cancel()

    async def embeddings(self, request: Request, texts: list[Any]) -> tuple[list[NDArray[np.float32]], int]:
        """Of each text, and how many tokens there are; between texts a client that goes away, or the time, ends it."""
        loop, arrived, found, count = asyncio.get_running_loop(), time.monotonic(), [], 0
        for text in texts:
            if await request.is_disconnected():
                raise ClientDisconnect
            if time.monotonic() - arrived > self.limits.seconds:
                raise Refusal(503, f"This takes longer than {self.limits.seconds:g} seconds: send fewer texts.")
            tokens = await run_in_threadpool(self.model.tokens, text)
            found += list(await loop.run_in_executor(self._writer, self.model.embed, [tokens]))
            count += len(tokens)
        self.metrics.add("prompt_tokens_total", count)
        return found, count


def application(
    model: LLM,
    *,
    api_key: str | None = None,
    limits: ServerLimits | None = None,
    hosts: tuple[str, ...] = LOCAL,
) -> Starlette:
    """The server of a model, for any ASGI server.

    Args:
        model: writes the answers.
        api_key: what clients must send as `Authorization: Bearer KEY`; None: nothing.
        limits: of requests.
        hosts: what requests may name as their host, `*` for any.
    """
    limits, metrics = limits or ServerLimits(), Metrics()
    desk = Desk(model, limits, metrics)

    def guarded(
        handler: Callable[[Request], Awaitable[Response]], key: bool = True, path: str | None = None
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            try:
                if key:
                    _check_key(request, api_key)
                response = await handler(request)
            except Refusal as refusal:
                response = refusal.response()
            except InvalidInputError as error:
                response = Refusal(400, str(error)).response()
            except LapilliError as error:
                response = Refusal(500, str(error)).response()
            except ClientDisconnect:
                response = Response(status_code=499)
            except Exception as error:
                response = _failed(error).response()
            named = path or request.url.path  # never what a client makes up
            metrics.add("requests_total", 1, f'{{path="{named}",status="{response.status_code}"}}')
            return response

        return handle

    async def chat(request: Request) -> Response:
        return await _answer(request, desk, True)

    async def completions(request: Request) -> Response:
        return await _answer(request, desk, False)

    async def embeddings(request: Request) -> Response:
        return await _embeddings(request, desk)

    served = {"id": model.name, "object": "model", "created": 0, "owned_by": "lapilli", "context_length": model.context}

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [served]})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != model.name:
            raise Refusal(404, f"There is no model {name[:200]!r} here; {model.name!r} is served.")
        return JSONResponse(served)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def numbers(_: Request) -> Response:
        for name, value in vars(model.cache()).items():
            metrics.put(f"cache_{name}", value)
        return PlainTextResponse(metrics.text(), media_type="text/plain; version=0.0.4")

    async def unknown(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        what = "takes another method" if status == 405 else "is not served here"
        return Refusal(status, f"{request.url.path[:200]} {what}.", getattr(error, "headers", None)).response()

    @asynccontextmanager
    async def life(_: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            desk.close()

    return Starlette(
        routes=[
            Route("/v1/chat/completions", guarded(chat), methods=["POST"]),
            Route("/v1/completions", guarded(completions), methods=["POST"]),
            Route("/v1/embeddings", guarded(embeddings), methods=["POST"]),
            Route("/v1/models", guarded(models), methods=["GET"]),
            Route("/v1/models/{name:path}", guarded(one_model, path="/v1/models/{name}"), methods=["GET"]),
            Route("/metrics", guarded(numbers), methods=["GET"]),
            Route("/health", guarded(health, key=False), methods=["GET"]),
        ],
        middleware=[Middleware(KnownHosts, hosts=hosts)],
        exception_handlers={404: unknown, 405: unknown},
        lifespan=life,
    )


class KnownHosts:
    """Starlette's TrustedHostMiddleware, whose refusal is JSON as all others are."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = False

        async def passed(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal known
            known = True
            await self._app(scope, receive, send)

        async def answer(message: Message) -> None:
            if known:
                await send(message)

        await TrustedHostMiddleware(passed, list(self._hosts), www_redirect=False)(scope, receive, answer)
        if not known:
            given = Headers(scope=scope).get("host", "")[:100]
            refusal = Refusal(400, f"The host {given!r} is not served here: name one of {', '.join(self._hosts)}.")
            await refusal.response()(scope, receive, send)


def _failed(error: Exception) -> Refusal:
    """What a client is told of an error that nobody expected; the log has the rest."""
    _log.error("a request failed", exc_info=error)
    return Refusal(500, f"The server failed ({type(error).__name__}); its log says more.")


def _check_key(request: Request, api_key: str | None) -> None:
    if api_key is None:
        return
    kind, _, given = request.headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.encode(), api_key.encode()):
        raise Refusal(
            401, "The API key is missing or wrong: send Authorization: Bearer KEY.", {"WWW-Authenticate": "Bearer"}
        )


async def _body(request: Request, most: int) -> Any:
    """The JSON of a request. Only application/json: pages of other sites cannot send it unasked."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json":
        raise Refusal(415, f"The body is of type {kind[:100]!r}; send application/json.")
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > most:
            raise Refusal(413, f"The body is larger than {most} bytes.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"The body is no JSON: {str(error)[:200]}.") from error


async def _answer(request: Request, desk: Desk, chat: bool) -> Response:
    wanted = completion_request(await _body(request, desk.limits.body), chat)
    desk.enter()
    left = False
    try:
        stream = await run_in_threadpool(lambda: desk.model.generate(wanted.prompt, stream=True, **wanted.choices))
        reply = Reply(desk.model, wanted, stream)
        if wanted.stream:
            left = True  # the response does
            return Events(desk, stream, reply)
        gone = asyncio.ensure_future(_gone(request, stream))
        try:
            async with aclosing(desk.pieces(stream)) as pieces:
                async for _ in pieces:
                    pass
        finally:
            gone.cancel()
        return JSONResponse(reply.whole())
    finally:
        if not left:
            desk.leave()


async def _embeddings(request: Request, desk: Desk) -> Response:
    wanted = embedding_request(await _body(request, desk.limits.body))
    desk.enter()
    try:
        vectors, count = await desk.embeddings(request, wanted.texts)
    finally:
        desk.leave()

    def shown(vector: NDArray[np.float32]) -> Any:
        return base64.b64encode(vector.astype("<f4").tobytes()).decode() if wanted.base64 else vector.tolist()

    data = [{"object": "embedding", "index": k, "embedding": shown(v)} for k, v in enumerate(vectors)]
    usage = {"prompt_tokens": count, "total_tokens": count}
    return JSONResponse({"object": "list", "data": data, "model": desk.model.name, "usage": usage})


class Events(StreamingResponse):
    """Server-sent events. However sending ends, the answer ends, too, and gives its place in the queue back."""

    def __init__(self, desk: Desk, stream: AnswerStream, reply: Reply) -> None:
        self._desk, self._stream, self._events = desk, stream, _events(desk, stream, reply)
        super().__init__(self._events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()
            self._desk.leave()
            await self._events.aclose()


async def _gone(request: Request, stream: AnswerStream) -> None:
    """Ends the answer when its client goes away."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.2)
    stream.cancel()


async def _events(desk: Desk, stream: AnswerStream, reply: Reply) -> AsyncGenerator[str, None]:
    try:
        if reply.request.chat:
            yield _event(reply.chunk({"role": "assistant", "content": ""}, ()))
        async with aclosing(desk.pieces(stream)) as pieces:
            async for piece in pieces:
                yield _event(reply.chunk({"content": piece.text}, piece.tokens))
        yield _event(reply.chunk({}, (), reply.reason()))
        if reply.request.usage:
            yield _event(reply.frame(True) | {"choices": [], "usage": reply.usage()})
        yield "data: [DONE]\n\n"
    except LapilliError as error:
        yield _event({"error": {"message": str(error), "type": "server_error"}})
    except Exception as error:
        yield _event({"error": {"message": _failed(error).message, "type": "server_error"}})


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, separators=(',', ':'))}\n\n"


class Reply:
    """An answer in OpenAI's form."""

    def __init__(self, model: LLM, wanted: CompletionRequest, stream: AnswerStream) -> None:
        self.model, self.request, self._stream = model, wanted, stream
        self._id, self._created = uuid.uuid4().hex, int(time.time())
        self._offset = 0

    def frame(self, part: bool) -> dict[str, Any]:
        kind = ("chat.completion" + (".chunk" if part else "")) if self.request.chat else "text_completion"
        name = f"{'chatcmpl' if self.request.chat else 'cmpl'}-{self._id}"
        return {"id": name, "object": kind, "created": self._created, "model": self.model.name}

    def reason(self) -> str:
        return _REASONS[self._stream.answer.reason]

    def usage(self) -> dict[str, int]:
        answer = self._stream.answer
        read, written = answer.prompt_tokens, len(answer.tokens)
        return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}

    def whole(self) -> dict[str, Any]:
        answer = self._stream.answer
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.reason(), "logprobs": self._logprobs(answer.tokens)}
        if self.request.chat:
            choice["message"] = {"role": "assistant", "content": answer.text}
        else:
            choice["text"] = answer.text
        return self.frame(False) | {"choices": [choice], "usage": self.usage()}

    def chunk(self, delta: dict[str, str], tokens: tuple[Token, ...], reason: str | None = None) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            "finish_reason": reason,
            "logprobs": self._logprobs(tokens) if tokens else None,
        }
        if self.request.chat:
            choice["delta"] = delta
        else:
            choice["text"] = delta.get("content", "")
        return self.frame(True) | {"choices": [choice]}

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if "logprobs" not in self.request.choices:
            return None
        if self.request.chat:
            return {"content": [
                self._entry(t.id, t.logprob) | {"top_logprobs": [self._entry(n, p) for n, p in t.likely]} for t in tokens
            ]}  # fmt: skip
        offsets = []
        for t in tokens:
            offsets.append(self._offset)
            self._offset += len(self.model.text.piece_text(t.id))
        return {
            "tokens": [self._named(t.id) for t in tokens], "token_logprobs": [t.logprob for t in tokens], "text_offset": offsets,
            "top_logprobs": [{self._named(n): p for n, p in t.likely} for t in tokens],
        }  # fmt: skip

    def _named(self, number: int) -> str:
        """A token as a key: its text, or its bytes, as OpenAI writes them, where they are a part of a character."""
        found = self.model.text.piece_bytes(number)
        try:
            return found.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in found)

    def _entry(self, number: int, logprob: float) -> dict[str, Any]:
        text = self.model.text.piece_text(number)
        return {"token": text, "logprob": logprob, "bytes": list(self.model.text.piece_bytes(number))}
