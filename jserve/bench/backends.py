"""Servers as streams of token counts: ours over gRPC, others over the OpenAI HTTP API. Knows wire
formats: no clock, no load."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from jserve.access import Access
from jserve.client import GenerateClient
from jserve.errors import ConfigError, JserveError
from jserve.messages import GenerateRequest, Usage

_MAX_ERROR_CHARS = 200


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One message of a stream. Usage and queue time (seconds) come with the last, if at all."""

    num_tokens: int = 0
    usage: Usage | None = None
    queue_s: float | None = None
    finished: bool = False


class Backend(Protocol):
    def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        """Yields the answer's messages as they come; raises JserveError if it fails."""
        ...

    async def close(self) -> None: ...


class JserveBackend:
    """Ours, over gRPC at `target` ("host:port")."""

    def __init__(self, target: str, access: Access | None = None) -> None:
        self._client = GenerateClient(target, access)

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        async for update in self._client.stream(request):
            if update.finish_reason in ("abort", "deadline", "error"):
                raise JserveError(f"ended early: {update.finish_reason}")
            yield StreamEvent(
                len(update.token_ids),
                update.usage,
                update.timings.queue_s if update.timings else None,
                update.is_last,
            )

    async def close(self) -> None:
        await self._client.close()


class OpenAIBackend:
    """Any server with /v1/completions and /v1/chat/completions, streaming by server-sent events.

    A message counts as its `token_ids` (an extension), else by the growth of its running usage
    (another), else as one token; the usage at the end has the last word on the sum.

    Source: the OpenAI API reference; server-sent events: the WHATWG HTML standard.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        api_key: str = "",
        extra_body: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import aiohttp
        except ImportError:
            raise ConfigError(
                "--backend=openai needs aiohttp: pip install 'jserve[bench]'"
            ) from None
        self._aiohttp = aiohttp
        self._root = base_url.rstrip("/").removesuffix("/v1") + "/v1"
        self._model = model
        self._extra_body = dict(extra_body or {})
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=aiohttp.ClientTimeout(total=None),
            connector=aiohttp.TCPConnector(limit=0),  # the load decides how many, not the client
        )

    async def stream(self, request: GenerateRequest) -> AsyncGenerator[StreamEvent, None]:
        path = "/completions" if request.messages is None else "/chat/completions"
        try:
            async with self._session.post(self._root + path, json=self._body(request)) as response:
                if response.status != 200:
                    text = " ".join((await response.text())[:_MAX_ERROR_CHARS].split())
                    raise JserveError(f"HTTP {response.status}: {text}")
                num_seen = 0
                async for message in _server_sent_json(response.content):
                    event = _openai_event(message, num_seen)
                    num_seen += event.num_tokens
                    yield event
        except (self._aiohttp.ClientError, OSError) as error:
            raise JserveError(f"{type(error).__name__}: {error}") from error

    def _body(self, request: GenerateRequest) -> dict[str, Any]:
        if request.messages is not None:
            body: dict[str, Any] = {"messages": list(request.messages)}
        elif request.prompt is not None:
            body = {"prompt": request.prompt}
        else:
            body = {"prompt": list(request.prompt_token_ids or ())}
        sampling = request.sampling
        body |= {"max_tokens": sampling.max_tokens, "temperature": sampling.temperature}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        if sampling.ignore_eos:  # not OpenAI's: sent only where it is asked for
            body["ignore_eos"] = True
        if self._model:
            body["model"] = self._model
        return body | self._extra_body

    async def close(self) -> None:
        await self._session.close()


def _openai_event(message: Mapping[str, Any], num_seen: int) -> StreamEvent:
    if "error" in message:
        raise JserveError(f"error in the stream: {str(message['error'])[:_MAX_ERROR_CHARS]}")
    usage = message.get("usage")
    choice = (message.get("choices") or [{}])[0]
    text = choice.get("text") or (choice.get("delta") or {}).get("content")
    if choice.get("token_ids"):
        num_tokens = len(choice["token_ids"])
    elif usage and choice:
        num_tokens = max(usage["completion_tokens"] - num_seen, 0)
    else:
        num_tokens = 1 if text else 0
    return StreamEvent(
        num_tokens, _usage(usage) if usage else None, finished=bool(choice.get("finish_reason"))
    )


def _usage(usage: Mapping[str, Any]) -> Usage:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return Usage(usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0), cached)


async def _server_sent_json(content: Any) -> AsyncIterator[Mapping[str, Any]]:
    """Yields each event's JSON object until `data: [DONE]` or the end of the body."""
    rest = b""
    async for piece in content.iter_any():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            if data.startswith(b"{"):  # else an empty line, a comment or another field
                try:
                    yield json.loads(data)
                except ValueError as error:
                    raise JserveError(f"the stream holds broken JSON: {error}") from error
