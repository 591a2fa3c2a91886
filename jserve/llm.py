"""The offline Python API: prompts in, outputs out, on the same engine that serves. Knows prompts'
shapes and the order of answers: no scheduling, no device."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

from jserve.config import EngineConfig
from jserve.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from jserve.messages import GenerateRequest
from jserve.offline import Mailbox, RequestDriver, RequestOutput
from jserve.sampling_params import SamplingParams

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


def engine_config(**flags: Any) -> EngineConfig:
    """Builds an EngineConfig from flat names: `engine_config(model="smollm2-135m", page_size=16)`.

    Every field of every section of jserve/config.py is a name here, except the server's and those
    of its security: there is no server. Raises ConfigError for an unknown name, listing near ones,
    and for a wrong type.
    """
    sections = typing.get_type_hints(EngineConfig)
    del sections["server"], sections["security"]
    owner = {f.name: name for name, cls in sections.items() for f in dataclasses.fields(cls)}
    chosen: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for name, value in flags.items():
        if name not in owner:
            near = difflib.get_close_matches(name, owner, n=3) or sorted(owner)
            raise ConfigError(f"unknown engine setting {name!r}; did you mean {', '.join(near)}?")
        default = getattr(sections[owner[name]](), name)
        chosen[owner[name]][name] = _of_type(name, value, type(default))
    return EngineConfig(**{name: cls(**chosen[name]) for name, cls in sections.items()})


def _of_type(name: str, value: Any, kind: type) -> Any:
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is str and hasattr(value, "__fspath__"):  # model=Path(...)
        return str(value)
    if type(value) is not kind:
        raise ConfigError(f"{name}={value!r} must be of type {kind.__name__}")
    return value


class LLM:
    """A model ready to answer in this process.

    `LLM(model=..., max_num_seqs=8)` takes any setting of the engine by name (see
    `engine_config`), loads the weights and compiles; it raises ConfigError or CheckpointError.
    Use it as a context manager, or call `close()`, to give the memory back.

    Several threads may call it at once: their requests share the batch and each call gets its own.
    """

    def __init__(self, **flags: Any) -> None:
        from jserve.build import build_engine  # jax comes in here, not with `import jserve`

        config = engine_config(**flags)
        limits = config.scheduler
        self._open(build_engine(config), limits.max_queued_requests + limits.max_num_seqs)

    @classmethod
    def from_engine(cls, engine: Any, max_in_flight: int = 1024) -> LLM:
        """Wraps an engine that exists. The LLM owns it from now on: `close()` closes it."""
        llm = cls.__new__(cls)
        llm._open(engine, max_in_flight)
        return llm

    def _open(self, engine: Any, max_in_flight: int) -> None:
        self._engine = engine
        self._driver: RequestDriver | None = RequestDriver(engine)
        self._max_in_flight = max_in_flight

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (jserve/text/tokenizer.py)."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Completes each prompt and returns the outputs in the prompts' order.

        Args:
          prompts: one text, one list of token ids, or a list of texts and lists of token ids.
          params: for all prompts, or one per prompt; None is `SamplingParams()`.
          use_tqdm: show a progress bar on stderr.

        Raises:
          InvalidRequest: for the first bad prompt, named by its index, before anything runs.
          DeadlineExceeded, EngineDead: what ended a request; the call's other ones are aborted.
        """
        return self._run(_requests(prompts), params, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list, rendered with the model's chat template.

        A conversation is a list of {"role": ..., "content": ...}. The texts are as the model wrote
        them, calls of tools included. Otherwise as `generate`.

        Args:
          tools, tool_choice: functions that the model may call, as in OpenAI's API.
          template_args: further variables of the template, such as enable_thinking.
          add_generation_prompt: the prompt ends with the head of the answer's turn.
          continue_final_message: the answer goes on with the last message instead.
        """
        if not _is_list(messages) or not messages:
            raise InvalidRequest("messages is empty; give one conversation, or a list of them")
        talks: list[Any] = [messages] if isinstance(messages[0], Mapping) else list(messages)
        for i, talk in enumerate(talks):
            if not _is_list(talk) or not talk or not all(isinstance(m, Mapping) for m in talk):
                raise InvalidRequest(f"conversation {i} is not a non-empty list of messages")
        requests = [
            GenerateRequest(
                messages=talk,
                tools=tools,
                tool_choice=tool_choice,
                template_args=template_args,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
            for talk in talks
        ]
        return self._run(requests, params, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: str = "last",
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Returns the embedding of each prompt, `.embedding` f32[D] of length 1, in their order.

        It is the hidden state of the prompt's last token, or with pooling="mean" the mean over all
        of them. Otherwise as `generate`.
        """
        requests = [dataclasses.replace(r, pooling=pooling) for r in _requests(prompts)]
        return self._run(requests, None, use_tqdm)

    def close(self) -> None:
        """Stops the engine and frees its memory. Closing twice is harmless."""
        if self._driver is not None:
            self._driver = None
            self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(
        self, requests: list[GenerateRequest], params: Any, use_tqdm: bool
    ) -> list[RequestOutput]:
        driver = self._driver
        if driver is None:
            raise EngineDead("this LLM is closed; make a new one")
        settings = _params_list(params, len(requests))
        requests = [
            dataclasses.replace(r, sampling=s) for r, s in zip(requests, settings, strict=True)
        ]
        for i, request in enumerate(requests):
            try:  # all of them first: hours of work must not end in an error of the last prompt
                self._engine.processor.prepare(request)
            except InvalidRequest as error:
                raise InvalidRequest(f"prompt {i}: {error}") from error
        outputs: list[Any] = [None] * len(requests)
        for i, output in self._finished(driver, requests, use_tqdm):
            outputs[i] = output
        return outputs

    def _finished(
        self, driver: RequestDriver, requests: list[GenerateRequest], use_tqdm: bool
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yields (index, output) in order of finishing; whatever ends it early aborts the rest."""
        mailbox: Mailbox = deque()
        waiting = deque(enumerate(requests))
        in_flight = 0
        try:
            with _progress(len(requests), use_tqdm) as tick:
                while waiting or in_flight:
                    while waiting and in_flight < self._max_in_flight:
                        if not _added(driver, *waiting[0], mailbox):
                            break
                        waiting.popleft()
                        in_flight += 1
                    driver.step()
                    while mailbox:
                        key, result = mailbox.popleft()
                        if isinstance(result, Exception):
                            raise result
                        in_flight -= 1
                        tick()
                        yield key, result
        finally:
            driver.abort(mailbox)


def _added(driver: RequestDriver, i: int, request: GenerateRequest, mailbox: Mailbox) -> bool:
    """Queues one request, or returns False where the engine has no room for it yet."""
    try:
        driver.add(request, i, mailbox)
    except Overloaded:
        if not driver.num_live:  # an empty engine has no room: waiting would be for ever
            raise
        return False
    return True


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def _is_ids(value: Any) -> bool:
    return all(isinstance(i, Integral) and not isinstance(i, bool) for i in value)


def _requests(prompts: Any) -> list[GenerateRequest]:
    return [
        GenerateRequest(prompt=p) if isinstance(p, str) else GenerateRequest(prompt_token_ids=p)
        for p in _prompt_list(prompts)
    ]


def _prompt_list(prompts: Any) -> list[str | list[int]]:
    """Tells one prompt from many: a list that holds an integer is one prompt's token ids."""
    if isinstance(prompts, str):
        prompts = [prompts]
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # a numpy array of ids
    if not _is_list(prompts) or not prompts:
        raise InvalidRequest("prompts is empty; give a text, a list of token ids, or a list")
    if isinstance(prompts[0], Integral):
        prompts = [prompts]
    return [_one_prompt(i, prompt) for i, prompt in enumerate(prompts)]


def _one_prompt(i: int, prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt  # an empty text is the engine's to judge: a BOS may make it a prompt
    prompt = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not _is_list(prompt) or not _is_ids(prompt):
        raise InvalidRequest(f"prompt {i} is neither a text nor a list of token ids")
    if not prompt:
        raise InvalidRequest(f"prompt {i} is empty; give at least one token id")
    return [int(token_id) for token_id in prompt]


def _params_list(params: Any, num_requests: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_requests
    if not _is_list(params) or not all(isinstance(p, SamplingParams) for p in params):
        raise InvalidRequest("params is neither SamplingParams nor a list of them")
    if len(params) != num_requests:
        raise InvalidRequest(f"{len(params)} params for {num_requests} prompts; give one for each")
    return list(params)


@contextmanager
def _progress(total: int, use_tqdm: bool) -> Iterator[Callable[[], object]]:
    if not use_tqdm:
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit="prompt") as bar:
        yield bar.update
