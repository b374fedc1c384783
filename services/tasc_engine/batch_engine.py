"""The interface of an engine that answers a batch of requests step by step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from tasc_engine.config import EngineConfig
from tasc_engine.errors import RequestTooLong
from tasc_engine.guided import Guidance, Guide, LabelSet
from tasc_protocol import FieldError, GenerationResult, GuideSpec, Output, Request
from tasc_protocol.request import MOST_LOGPROBS


class GuideMaker(Protocol):
    """Makes or checks the guides of requests; thread-safe."""

    def of(self, spec: GuideSpec) -> Guide | None:
        """Returns a guide for one answer; None if the engine makes it itself.

        Raises:
            GuideError: The guide cannot be followed.
        """

    def labels(self, spec: GuideSpec) -> LabelSet:
        """Returns labels to score; raises GuideError if they cannot be scored."""

    def prepare(self, spec: GuideSpec) -> None:
        """Compiles or checks a guide or labels, unless they are known; raises GuideError."""

    def known(self, spec: GuideSpec) -> bool:
        """Whether `of` returns or fails without compiling; for threads that must not wait."""


class BatchEngine(ABC):
    """Answers requests in ``config.rows`` rows. Must be used by one thread.

    `step` advances all rows by one forward. It has three parts, which may also be called one by
    one: `launch`, `collect`, `outputs`.

    Attributes:
        guides: Makes the guides of requests, on any thread.
    """

    config: EngineConfig
    guides: GuideMaker

    @property
    @abstractmethod
    def running(self) -> int:
        """Number of requests that have a row."""

    @property
    @abstractmethod
    def waiting(self) -> int:
        """Number of requests that wait for a row."""

    @property
    @abstractmethod
    def overlaps(self) -> bool:
        """Whether a forward runs from `launch` on; otherwise, `collect` runs it."""

    @property
    @abstractmethod
    def has_outputs(self) -> bool:
        """Whether `outputs` has something to return."""

    @property
    @abstractmethod
    def kv_usage(self) -> float:
        """Share of the KV cache that requests hold."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of logits for each token."""

    @property
    @abstractmethod
    def longest(self) -> int:
        """Maximum number of tokens of one request, prompt and answer together."""

    @abstractmethod
    def submit(self, request: Request, guide: Guidance | None = None) -> None:
        """Queues a request.

        Args:
            guide: The guide, or the labels to score, that `guides` made on another thread; None to
                make it here.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit ``max_model_len``.
            GuideError: The request's guide cannot be followed.
            QueueFull: The maximum number of requests is waiting.
            ValueError: The engine holds a request with this id, a token id is outside the
                vocabulary, or the adapter does not exist.
        """

    @abstractmethod
    def scoring_tokens(self, guide: GuideSpec) -> int:
        """Maximum number of tokens that a row needs behind its prompt to score a guide's choices.

        Compiles the labels, unless they are known.

        Raises:
            FieldError: The engine does not score labels.
            GuideError: The choices cannot be scored.
        """

    @abstractmethod
    def require_adapter(self, name: str | None) -> None:
        """Raises ValueError if no adapter has this name; None is no adapter."""

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """Drops a waiting or running request; its row is free for the next step.

        The request has no further output. False if the engine does not hold it, for example because
        it has ended; then its last output may not have been returned yet.
        """

    @abstractmethod
    def cancel_all(self) -> None:
        """Drops every request."""

    @abstractmethod
    def holds(self, request_id: str) -> bool:
        """Whether a request waits or has a row."""

    @abstractmethod
    def launch(self) -> None:
        """Plans the next step, makes its drafts, and starts its forward; see `collect`.

        Until `collect`, requests may be submitted, and join the step after this one. Without
        `overlaps`, `collect` runs the forward.
        """

    @abstractmethod
    def collect(self) -> None:
        """Waits for the forward that `launch` has started, if any, and commits its tokens.

        Rows of ended answers are free for the next step, and the proposer knows the new tokens.
        `outputs` then returns them.
        """

    @abstractmethod
    def outputs(self) -> list[Output]:
        """Returns the outputs of collected steps that were not returned yet."""

    @property
    @abstractmethod
    def rules_compiled(self) -> bool:
        """Whether `compile_rules` has ended; requests with any rule but the plain rule need it."""

    @abstractmethod
    def compile_rules(self) -> None:
        """Compiles all sampling rules except the plain rule. May run on any thread.

        This takes seconds once per machine. Without the call, the first request with such a rule
        waits for the compilation, and so does its whole batch.
        """

    def step(self) -> list[Output]:
        """Advances all rows by one verify forward; does nothing without requests."""
        self.launch()
        self.collect()
        return self.outputs()

    def require_fit(self, request: Request) -> None:
        """Checks a request whose values are filled in.

        Raises:
            RequestTooLong: Prompt and ``max_tokens`` do not fit a row.
            FieldError: A token id or an adapter does not exist, or a field is out of range.
            ValueError: The prompt has no tokens, nothing is left to generate, or a sampling
                parameter is out of range.
        """
        prompt, most = request.prompt_ids, request.answer_limit
        if not prompt:
            raise ValueError(f"request {request.id}: the prompt has no tokens; send at least one")
        if most < 1:
            raise FieldError("max_tokens", f"max_tokens is {most}; it is 1 or more")
        if (begun := len(request.committed_ids)) >= most:
            message = f"{begun} tokens are committed and max_tokens is {most}"
            raise ValueError(f"request {request.id}: {message}; nothing is left to generate")
        if not all(request.stop):
            raise FieldError("stop", "stop has an empty string; leave it out")
        if not 0 <= (request.logprobs or 0) <= MOST_LOGPROBS:
            message = f"logprobs is {request.logprobs}; it goes from 0 to {MOST_LOGPROBS}"
            raise FieldError("logprobs", message)
        if len(prompt) + most > self.longest:
            raise RequestTooLong(
                f"prompt ({len(prompt)} tokens) plus max_tokens ({most}) is {len(prompt) + most} "
                f"tokens; a row holds at most {self.longest} (max_model_len, kv_cache_bytes); "
                "shorten the prompt or lower max_tokens"
            )
        biased = tuple(token for token, _ in request.sampling.logit_bias)
        for field, ids in (
            (request.prompt_field, prompt),
            ("committed_ids", request.committed_ids),
            ("stop_token_ids", request.stop_token_ids),
            ("logit_bias", biased),
        ):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
                wrong = max(ids) if min(ids) >= 0 else min(ids)
                way_out = f"ids of the task's model go from 0 to {self.vocab_size - 1}"
                raise FieldError(field, f"{field} has token id {wrong}; {way_out}")
        self.require_adapter(request.adapter)

    def generate(
        self, requests: Iterable[Request], stopped: Callable[[], bool] = lambda: False
    ) -> Iterator[GenerationResult]:
        """Answers requests, refilling rows as they end, and yields results as they finish.

        On a GPU, results are yielded while the next forward runs, so ``requests`` is asked for more
        requests before the results of the last step are yielded. Up to one more request for each
        row is taken while a forward runs, and waits.

        Args:
            stopped: Called before each step; True ends the loop, and running requests remain.
        """
        source = iter(requests)
        exhausted = False

        def submit(most_waiting: int) -> None:
            nonlocal exhausted
            while not exhausted and self.waiting < most_waiting:
                request = next(source, None)
                if request is None:
                    exhausted = True
                else:
                    self.submit(request)

        while (not exhausted or self.waiting or self.running) and not stopped():
            submit(max(self.config.rows - self.running, 0))
            self.launch()
            if self.overlaps:
                yield from (output.result for output in self.outputs() if output.result)
                submit(min(self.config.rows, self.config.max_waiting))
            self.collect()
            if not self.overlaps:
                yield from (output.result for output in self.outputs() if output.result)
        yield from (output.result for output in self.outputs() if output.result)
