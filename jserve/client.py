"""A gRPC client: `GenerateClient` for programs, `jserve-client` for people. Knows no engine.

Exit codes: 0 done, 1 a fault of the server, 2 the request, the flags or the key are no good, 3 the
server is not reachable, not ready or full, 4 the deadline passed, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grpc
from absl import app, flags
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jserve.access import Access, access_from_flags, define_access_flags
from jserve.errors import (
    WIRE_CODES,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    Forbidden,
    InvalidRequest,
    JserveError,
    Overloaded,
    Unauthenticated,
)
from jserve.flags import list_in_help
from jserve.messages import GenerateRequest, RequestUpdate, joined
from jserve.openai_format import Endpoint, parse_body
from jserve.sampling_params import SamplingParams
from jserve.server.proto import generate_pb2 as pb
from jserve.server.rpc import stub_of
from jserve.server.wire import answer_from_proto, request_to_proto, update_from_proto

DEADLINE_MARGIN_S = 5.0  # the server ends the request first, with its reason; this is the backstop
_HEALTH_RETRY_S = 0.1
_SERVICES = pb.DESCRIPTOR.services_by_name

# Flags that are fields of an OpenAI body.
_BODY_FLAGS = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop", "ignore_eos"),
    *("model", "priority", "request_class", "tenant", "timeout_s", "queue_timeout_s"),
)

_ERRORS = {grpc.StatusCode[code.grpc]: kind for kind, code in WIRE_CODES.items()}
_EXIT_CODES: dict[type[JserveError], int] = dict.fromkeys(
    (InvalidRequest, ConfigError, Unauthenticated, Forbidden), 2
) | {EngineDead: 3, Overloaded: 3, DeadlineExceeded: 4}


class GenerateClient:
    """Sends requests over one channel; use it as `async with GenerateClient(target) as client`.

    Every method raises the JserveError that the server's status stands for, as an engine in the
    same process would: InvalidRequest, Overloaded, DeadlineExceeded, EngineDead (also for a server
    that cannot be reached), Unauthenticated, Forbidden, and plain JserveError for the rest.
    """

    def __init__(self, target: str, access: Access | None = None) -> None:
        access = access or Access()
        self._channel = access.open_channel(target)
        self._metadata = access.metadata
        self._stub = stub_of(self._channel, _SERVICES["GenerateService"])
        self._cache = stub_of(self._channel, _SERVICES["CacheService"])
        self._health = health_pb2_grpc.HealthStub(self._channel)

    async def __aenter__(self) -> GenerateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._channel.close()

    async def stream(
        self, request: GenerateRequest, *, return_prompt_token_ids: bool = False
    ) -> AsyncGenerator[RequestUpdate, None]:
        """Yields the request's updates as they come. Closing the iterator cancels the request."""
        message = request_to_proto(request, return_prompt_token_ids=return_prompt_token_ids)
        call = self._stub.GenerateStream(
            message, timeout=_call_timeout(request), metadata=self._metadata
        )
        try:
            async for response in call:
                yield update_from_proto(response)
        except grpc.aio.AioRpcError as error:
            raise _as_jserve_error(error) from None
        finally:
            call.cancel()  # does nothing to a call that has ended

    async def generate(
        self, request: GenerateRequest, *, return_prompt_token_ids: bool = False
    ) -> RequestUpdate:
        """Returns the whole output of a request of one choice as one update."""
        if request.sampling.n > 1:
            raise InvalidRequest(f"n={request.sampling.n} gives several answers; use choices()")
        choices = await self.choices(request, return_prompt_token_ids=return_prompt_token_ids)
        return choices[0]

    async def choices(
        self, request: GenerateRequest, *, return_prompt_token_ids: bool = False
    ) -> list[RequestUpdate]:
        """Returns the whole output of each of the request's n choices, in order of index."""
        message = request_to_proto(request, return_prompt_token_ids=return_prompt_token_ids)
        try:
            answer = await self._stub.Generate(
                message, timeout=_call_timeout(request), metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise _as_jserve_error(error) from None
        return answer_from_proto(answer)

    async def reset_prefix_cache(self) -> bool:
        """Makes the server forget all cached prefixes; False while requests use any of them. It
        must run with --enable_cache_service."""
        try:
            answer = await self._cache.ResetPrefixCache(
                pb.ResetPrefixCacheRequest(), metadata=self._metadata
            )
            return answer.done
        except grpc.aio.AioRpcError as error:
            raise _as_jserve_error(error) from None

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the health service says SERVING.

        Raises:
          EngineDead: it did not within `timeout_s` seconds.
        """
        give_up = time.monotonic() + timeout_s
        answer = "no answer"
        while (left := give_up - time.monotonic()) > 0:
            try:
                reply = await self._health.Check(
                    health_pb2.HealthCheckRequest(), timeout=left, wait_for_ready=True
                )
                if reply.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                answer = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            except grpc.aio.AioRpcError as error:
                answer = error.code().name
            await asyncio.sleep(min(_HEALTH_RETRY_S, left))
        raise EngineDead(f"the server is not ready after {timeout_s:g} s ({answer})")


def _call_timeout(request: GenerateRequest) -> float | None:
    return None if request.timeout_s is None else request.timeout_s + DEADLINE_MARGIN_S


def _as_jserve_error(error: grpc.aio.AioRpcError) -> JserveError:
    kind = _ERRORS.get(error.code(), JserveError)
    message = f"{error.code().name}: {error.details()}"
    wait_ms = dict(error.trailing_metadata() or ()).get("retry-after-ms")
    if kind is Overloaded and wait_ms:
        return Overloaded(message, float(wait_ms) / 1e3)
    return kind(message)


@dataclass(slots=True)
class Clock:
    """When output came, seen from here. Seconds; ITL is the mean gap between tokens."""

    started: float
    first: float = 0.0
    last: float = 0.0
    num_tokens: int = 0

    def on_update(self, update: RequestUpdate, now: float) -> None:
        if update.token_ids:
            self.first = self.first or now
            self.last = now
            self.num_tokens += len(update.token_ids)

    def summary(self, update: RequestUpdate) -> str:
        """Returns one line for people, in milliseconds, from this clock and the last update."""
        parts = []
        if self.num_tokens:
            parts.append(f"TTFT {1e3 * (self.first - self.started):.1f} ms")
        if self.num_tokens > 1:
            itl_s = (self.last - self.first) / (self.num_tokens - 1)
            parts.append(f"ITL {1e3 * itl_s:.1f} ms")
        if self.last > self.started:
            parts.append(f"{self.num_tokens / (self.last - self.started):.1f} tokens/s")
        if update.usage is not None:
            parts.append(
                f"{update.usage.prompt_tokens} prompt tokens ({update.usage.cached_tokens} cached)"
            )
        return ", ".join([*parts, f"{self.num_tokens} output tokens, {update.finish_reason}"])


def define_client_flags(flag_values: flags.FlagValues = flags.FLAGS) -> None:
    defaults = SamplingParams()
    to: dict[str, Any] = {"flag_values": flag_values}
    flags.DEFINE_string("target", "127.0.0.1:50051", "The server's host:port.", **to)
    define_access_flags(flag_values)
    flags.DEFINE_string("prompt", None, "The prompt; - reads standard input.", **to)
    flags.DEFINE_boolean("chat", False, "Send the prompt as a chat turn of the user.", **to)
    flags.DEFINE_string("system", None, "With --chat: the system turn before it.", **to)
    flags.DEFINE_boolean("stream", True, "Show the text as it comes.", **to)
    flags.DEFINE_string("model", "", "The model that the server must be serving.", **to)
    flags.DEFINE_integer("max_tokens", 256, "Most tokens to generate.", **to)
    flags.DEFINE_float("temperature", defaults.temperature, "0 is greedy.", **to)
    flags.DEFINE_integer("top_k", defaults.top_k, "0 keeps all tokens.", **to)
    flags.DEFINE_float("top_p", defaults.top_p, "1 keeps all tokens.", **to)
    flags.DEFINE_float("min_p", defaults.min_p, "0 keeps all tokens.", **to)
    flags.DEFINE_integer("seed", None, "For the same tokens again.", **to)
    flags.DEFINE_multi_string("stop", [], "Text that ends the answer; may be repeated.", **to)
    flags.DEFINE_boolean("ignore_eos", False, "Go on after the model's end token.", **to)
    more = 'More fields of an OpenAI body, as JSON: \'{"n": 2, "guided_regex": "[0-9]+"}\'.'
    flags.DEFINE_string("extra_body", "{}", more, **to)
    flags.DEFINE_string("request_id", None, "Name of the request, for the server's log.", **to)
    flags.DEFINE_integer("priority", 0, "Lower is served first.", **to)
    flags.DEFINE_string("request_class", "", "One of the server's --request_classes.", **to)
    flags.DEFINE_string("tenant", "", "Tenants share no cached prefix.", **to)
    flags.DEFINE_float("timeout_s", None, "Give up after this many seconds.", **to)
    flags.DEFINE_float("queue_timeout_s", None, "The same, if it has not started.", **to)
    flags.DEFINE_float("wait_ready_s", 0.0, "Wait this long for the server to be ready.", **to)


def request_from_flags(
    flag_values: flags.FlagValues = flags.FLAGS, read_stdin: Callable[[], str] = sys.stdin.read
) -> GenerateRequest:
    """Returns the request that the flags ask for.

    Raises:
      InvalidRequest: no prompt, a value out of its range, or an unknown field of --extra_body.
    """
    f = flag_values
    prompt = read_stdin() if f.prompt == "-" else f.prompt
    if prompt is None:
        raise InvalidRequest('there is no prompt; use --prompt="..." or --prompt=- for stdin')
    if f.system is not None and not f.chat:
        raise InvalidRequest("--system is part of a chat; add --chat")
    turns = [{"role": "system", "content": f.system}] if f.system is not None else []
    turns.append({"role": "user", "content": prompt})
    body: dict[str, Any] = {"messages": turns} if f.chat else {"prompt": prompt}
    body |= {name: getattr(f, name) for name in _BODY_FLAGS}
    endpoint = Endpoint.CHAT if f.chat else Endpoint.COMPLETIONS
    call = parse_body(endpoint, body | _extra_body(f.extra_body))
    sampling = call.request.sampling
    counts = (sampling.logprobs, sampling.prompt_logprobs)
    if call.echo or call.return_token_ids or counts != (None, None):
        raise InvalidRequest(
            "--extra_body asks for echo, token ids or log-probabilities; this command prints text"
        )
    return replace(call.request, request_id=f.request_id)


def _extra_body(text: str) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"--extra_body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest("--extra_body is not a JSON object")
    return body


async def _ask(flag_values: flags.FlagValues) -> None:
    """Prints the answer to stdout and a line of figures to stderr. Of several answers, each is
    printed when all are there, under its number."""
    request = request_from_flags(flag_values)
    at_once = flag_values.stream and request.sampling.n == 1
    access = access_from_flags(flag_values)
    async with GenerateClient(flag_values.target, access) as client:
        if flag_values.wait_ready_s > 0:
            await client.wait_ready(flag_values.wait_ready_s)
        clock = Clock(time.monotonic())
        updates: list[RequestUpdate] = []
        async for update in client.stream(request):
            clock.on_update(update, time.monotonic())
            updates.append(update)
            if at_once:
                print(update.text, end="", flush=True)
        for choice in joined(updates):
            heading = f"[{choice.index}] " if request.sampling.n > 1 else ""
            print("" if at_once else heading + choice.text)
        if updates:
            print(clock.summary(updates[-1]), file=sys.stderr)


def main(argv: Sequence[str]) -> int:
    """Asks one question; returns the exit code."""
    if len(argv) > 1:
        raise app.UsageError(f"{argv[1:]} are no flags; write --name=value")
    try:
        asyncio.run(_ask(flags.FLAGS))
    except JserveError as error:
        print(f"jserve-client: {error}", file=sys.stderr)
        return next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), 1)
    except KeyboardInterrupt:
        return 130
    return 0


def run() -> NoReturn:
    """Console command `jserve-client`."""
    define_client_flags()
    list_in_help()
    app.run(main)
