"""Says which tokens may come next so that an output keeps to a grammar. Knows token ids, their
bytes and llguidance: no models, no requests, no logits.

The masks are llguidance's (Earley parser over lazily built automata, guidance-ai/llguidance). Where
the grammar leaves one continuation only, a mask holds the token that the tokenizer would write
there, so that an output is the same whether such tokens are sampled or appended without a step.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from jserve.errors import InvalidRequest, Overloaded, RequestFailed
from jserve.structured import StructuredOutput
from jserve.text.grammar_source import grammar_source
from jserve.text.grammar_trial import COMPILE_STACK_BYTES, LIMITS, GrammarTrials
from jserve.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

WAIT_S = 30.0  # for others that compile
MAX_COMPILING = 2  # at once, in processes and threads; one whose time ran out counts until it ends
# A mask asks how a forced text is written, at each of its tokens: 0.25 ms for 1000 characters. So
# the text is cut; up to 4 tokens at the cut are dropped, for what follows could change them, and
# llguidance drops as many again.
MIN_FORCED_TOKENS, NUM_TOKENS_AT_CUT = 12, 4
MAX_ERROR_CHARS = 300


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps those used last. Safe to share among threads.

    Args:
      vocab_size: V of the model's logits, which may be more than the tokenizer knows.
      eos_token_ids: allowed exactly where an output may end.
      max_bytes: size of a grammar's text.
      timeout_s: how long one may take, half of it for its trial.
      cache_size: number of grammars kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        max_bytes: int = 2**17,
        timeout_s: float = 1.5,
        cache_size: int = 64,
    ) -> None:
        self.vocab_size = vocab_size
        self._tokenizer = tokenizer
        self._eos_token_ids = [id for id in eos_token_ids if 0 <= id < vocab_size]
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._cache_size = cache_size
        self._cache: OrderedDict[StructuredOutput, Grammar] = OrderedDict()
        self._lock = threading.Lock()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._trials: GrammarTrials | None = None
        self._compiling = threading.Semaphore(MAX_COMPILING)

    def warm_up(self) -> LLTokenizer:
        """Builds the trie of the vocabulary, which the first `compile` does otherwise.

        The interpreter's lock is held for most of it (0.2 s for 49,152 tokens, 0.9 s for 262,144),
        so it is better done before there are requests.
        """
        with self._vocabulary_lock:
            if self._vocabulary is None:
                words = _Vocabulary(self._tokenizer, self.vocab_size, self._eos_token_ids)
                try:
                    self._vocabulary = LLTokenizer(
                        TokenizerWrapper(words), eos_token=self._eos_token_ids
                    )
                except BaseException as error:
                    raise _refusal("this vocabulary has no structured output", error) from error
                special = {id: words.tokens[id] for id in words.special_token_ids}
                self._trials = GrammarTrials(self.vocab_size, special, self._eos_token_ids)
            return self._vocabulary

    def is_known(self, spec: StructuredOutput) -> bool:
        """Whether `compile` would have nothing to do."""
        with self._lock:
            known = self._cache.get(spec)
            return known is not None and not known.is_spent

    def compile(self, spec: StructuredOutput) -> Grammar:
        """The grammar of `spec`. Takes up to seconds: not for the engine's thread.

        Raises:
          InvalidRequest: the grammar is bad, unsupported, too large, too deep or too slow.
          Overloaded: too many other grammars are being compiled.
          RequestFailed: no process could be started to try it; the log says why.
        """
        with self._lock:
            known = self._cache.get(spec)
            if known is not None and not known.is_spent:
                self._cache.move_to_end(spec)
                return known
        grammar = self._compile(spec)
        with self._lock:
            self._cache[spec] = grammar
            self._cache.move_to_end(spec)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
        return grammar

    def _compile(self, spec: StructuredOutput) -> Grammar:
        if not self._eos_token_ids:
            raise InvalidRequest(f"{spec.kind} needs a model with an EOS token; this one has none")
        if len(spec.value.encode("utf-8", "surrogatepass")) > self._max_bytes:
            raise InvalidRequest(f"{spec.kind} has more than {self._max_bytes} bytes")
        source = grammar_source(spec, self._tokenizer)
        vocabulary = self.warm_up()
        if not self._compiling.acquire(timeout=WAIT_S):
            raise Overloaded(f"{MAX_COMPILING} other grammars are being compiled; try again later")
        try:
            self._try(spec, source)
        except BaseException:
            self._compiling.release()
            raise
        future: Future[Grammar] = Future()

        def run() -> None:
            try:
                future.set_result(self._build(spec, source, vocabulary))
            except BaseException as error:
                future.set_exception(_refusal(spec.kind, error))
            finally:
                self._compiling.release()

        try:
            _start_with_large_stack(run)
        except RuntimeError as error:
            self._compiling.release()
            raise Overloaded(f"no thread could be started: {error}; try again later") from error
        try:
            # It has passed its trial, so half is what it needs; a thread that is left to itself
            # could outlive the process.
            return future.result(self._timeout_s)
        except TimeoutError as error:
            raise self._too_slow(spec) from error

    def _try(self, spec: StructuredOutput, source: str) -> None:
        """Refuses what takes too long, or crashes, in a process that can be ended."""
        assert self._trials is not None, "they start with the vocabulary"
        try:
            if self._trials.passes(source, self._timeout_s / 2):  # it is compiled twice
                return
        except (OSError, RuntimeError) as error:  # no process, no thread to watch it
            log.error("%s cannot be tried: %s", spec.kind, error)
            raise RequestFailed(
                f"{spec.kind} cannot be tried, for no process for it starts; the log says why"
            ) from error
        raise self._too_slow(spec)

    def _too_slow(self, spec: StructuredOutput) -> InvalidRequest:
        return InvalidRequest(
            f"{spec.kind} has {self._timeout_s} s to compile twice, and takes longer; "
            "use a simpler one"
        )

    def _build(self, spec: StructuredOutput, source: str, vocabulary: LLTokenizer) -> Grammar:
        state = LLMatcher(vocabulary, source, log_level=0, limits=LIMITS)
        grammar = Grammar(state, self.vocab_size, self._eos_token_ids)
        first = grammar.matcher()  # its mask is the slowest, and shows that there is a way to begin
        if not first.fill(np.zeros((self.vocab_size + 31) // 32, np.uint32)):
            raise InvalidRequest(f"{spec.kind}: {first.error}")
        return grammar


class Grammar:
    """A compiled grammar: the beginning of any number of outputs.

    Attributes:
      is_spent: it met a limit while in use. What it has learnt is shared by its matchers, so others
        would meet the limit too: compile it anew.
    """

    def __init__(self, start: LLMatcher, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.is_spent = False
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._start = start

    def matcher(self) -> Matcher:
        """A place at the beginning of an output."""
        return Matcher(self, self._start.deep_copy())


class Matcher:
    """A place in one output. Not for several threads at once."""

    def __init__(self, grammar: Grammar, state: LLMatcher) -> None:
        self._grammar = grammar
        self._state = state

    def fill(self, words: np.ndarray) -> bool:
        """Writes which tokens may come next.

        Args:
          words: u32[W], contiguous, W = ceil(V / 32); bit v % 32 of word v // 32 is token v.

        Returns:
          Whether any may. Where none may (a dead end, a limit), `words` is 0 and `error` says why.
        """
        assert words.flags.c_contiguous, "llguidance writes to memory, not to a view with gaps"
        self._state.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._is_alive():
            return True
        words.fill(0)  # llguidance would let the output end here
        return False

    def _is_alive(self) -> bool:
        if self._state.is_error():
            self._grammar.is_spent = True
            return False
        return True

    def accept(self, token_id: int) -> bool:
        """Goes on by one token. False, and no move, where it does not fit."""
        if self._state.is_stopped():
            return not self._state.is_error() and token_id in self._grammar.eos_token_ids
        if not 0 <= token_id < self._grammar.vocab_size:
            return False
        fits = self._state.try_consume_tokens([token_id]) == 1
        return self._is_alive() and fits

    def forced_tokens(self) -> list[int]:
        """The tokens that have to come next, as the tokenizer would write them; none where several
        may, or where what follows could change how the text is cut into tokens."""
        return [] if self._state.is_stopped() else self._state.compute_ff_tokens()

    @property
    def is_finished(self) -> bool:
        """Whether nothing but EOS can follow."""
        return self._state.is_stopped() and not self._state.is_error()

    @property
    def error(self) -> str | None:
        """Why no token may come, in one line; None while some may."""
        if not self._state.is_error():
            return None
        return _one_line(self._state.get_error())

    def copy(self) -> Matcher:
        """The same place, to go on from on its own."""
        return Matcher(self._grammar, self._state.deep_copy())


def _refusal(name: str, error: BaseException) -> BaseException:
    """What a caller is told of a failure in Rust, whose panics are no Exceptions."""
    if isinstance(error, InvalidRequest | KeyboardInterrupt):
        return error
    return InvalidRequest(f"{name}: {_one_line(str(error))}")


def _one_line(text: str) -> str:
    text = " ".join(text.replace("<non-verbose/>", "").partition("<backtrace>")[0].split())
    if text == "NoExtensionBias":
        text = "no token of this model can come next"
    return text if len(text) <= MAX_ERROR_CHARS else f"{text[:MAX_ERROR_CHARS]}..."


class _Vocabulary:
    """Tokens' bytes and the way to write a text, as TokenizerWrapper asks for them."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self.eos_token_id = eos_token_ids[0]
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        # A special token is none of the text, so nothing but its id stands for it.
        special = tokenizer.special_token_ids.union(eos_token_ids)
        self.special_token_ids = [id for id in special if 0 <= id < vocab_size]
        self._encode = tokenizer.encode_plain
        self._lead = "\x02" if tokenizer.strips_first_space else ""
        self._num_lead = len(self._encode(self._lead))
        self._max_chars = MIN_FORCED_TOKENS * tokenizer.longest_token_chars

    def __call__(self, text: str) -> list[int]:
        """The first token ids of `text` as it stands inside of another, where no text begins with a
        space of the vocabulary's own."""
        ids = self._encode(self._lead + text[: self._max_chars])[self._num_lead :]
        return ids if len(text) <= self._max_chars else ids[:-NUM_TOKENS_AT_CUT]


_STACK_LOCK = threading.Lock()


def _start_with_large_stack(run: Callable[[], None]) -> None:
    thread = threading.Thread(target=run, name="jserve-grammar", daemon=True)
    # The size is the process's: a thread that another starts meanwhile has it too, and no harm.
    with _STACK_LOCK:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
