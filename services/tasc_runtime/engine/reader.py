"""Fills in the values that a request leaves to its task, and checks the replica's limits.

Limits that do not depend on a task are checked where requests enter (`tasc_serve.http.parsing`).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from msgspec import structs

from tasc_engine.errors import GuideError
from tasc_protocol import FieldError, GuideSpec, Request, SamplingDefaults, Scoring
from tasc_protocol.request import MOST_LOGPROBS, MOST_PROBABILITIES
from tasc_runtime.engine.versions import Records
from tasc_runtime.sampling_options import SHOWN, guide_of
from tasc_store import TaskRecord
from tasc_text import MessageError, TaskTokenizer, Template

if TYPE_CHECKING:  # a job is checked without importing torch
    from tasc_engine.batch_engine import BatchEngine
    from tasc_engine.guided import Guidance

log = logging.getLogger(__name__)


class PromptTooLong(FieldError):
    """A prompt leaves no room for an answer in a row.

    Attributes:
        tokens: Number of tokens of the prompt.
        longest: Maximum number of tokens of a row, prompt and answer together.
    """

    def __init__(self, field: str, tokens: int, longest: int) -> None:
        super().__init__(
            field,
            f"{field} has {tokens} tokens; a row holds {longest}, the answer included "
            "(max_model_len, kv_cache_bytes): shorten it, or have it cut by "
            "truncate_prompt_tokens",
        )
        self.tokens, self.longest = tokens, longest


def adapter_of(adapter: str | None, record: TaskRecord) -> str | None:
    """Returns the name of the adapter that answers; None if the task names no adapters.

    Args:
        adapter: The adapter of the request; None: the task's first.

    Raises:
        FieldError: The task has no adapter of that name.
    """
    known = record.adapter_names
    if adapter is None:
        return known[0] if known else None
    if adapter not in known:
        if known:
            way_out = f"has {', '.join(known)}: name one of them"
        else:
            way_out = "has no adapters to choose from: leave it out"
        message = f"adapter is {adapter!r}; task {record.name} {way_out}"
        raise FieldError("adapter", message)
    return adapter


def parameters_of(
    sent: Mapping[str, int | float], task: SamplingDefaults
) -> dict[str, int | float]:
    """Returns the sampling parameters: a request's values, and the task's for all others.

    Raises:
        FieldError: ``top_p`` is 0, and tokens are sampled.
    """
    found = {**task.given, **sent}
    if found.get("top_p") == 0:
        if temperature := found.get("temperature"):
            raise FieldError(
                "top_p",
                f"top_p is 0 and temperature is {temperature:g}; raise top_p above 0, or set "
                "temperature to 0, which takes the likeliest token",
            )
        del found["top_p"]  # greedy decoding does not use it
    return found


def _filled(asked: Request, scoring: Scoring, labels: GuideSpec, record: TaskRecord) -> Scoring:
    """Fills in the task's values.

    A calibration is for the task's own labels and their end, and for its first adapter. It was not
    fitted for a request's own biases.
    """
    own = labels.is_tasks and labels.end == record.label_end
    own = own and asked.adapter in (None, *record.adapter_names[:1]) and not scoring.biases
    below, instead = scoring.abstain_below, scoring.abstain_label
    temperature = record.label_temperature if own else None
    return replace(
        scoring,
        end=labels.end,
        abstain_below=record.abstain_below if below is None else below,
        abstain_label=record.abstain_label if instead is None else instead,
        temperature=temperature or 1.0,
        biases=record.label_biases if temperature else scoring.biases,
    )


@lru_cache(16)  # with many labels it takes milliseconds
def _label_guide(guide: GuideSpec, end: str | None, field: str) -> GuideSpec:
    return GuideSpec("labels", guide.choices, field=field, end=end)


def require_stops(tokenizer: TaskTokenizer, stops: Sequence[str]) -> None:
    """Checks that answers can contain stop strings.

    Raises:
        FieldError: A string has a special token and other text, so no answer can contain it.
    """
    for stop in stops:
        if (held := tokenizer.special_in(stop)) not in (None, stop):
            raise FieldError(
                "stop",
                f"stop has {stop[:SHOWN]!r}, which no answer has: {held!r} is a special token, "
                f"which has no text in answers; give {held!r} alone, or stop_token_ids: "
                f"[{tokenizer.special_tokens[held]}]",
            )


def require_total(request: Request, max_tokens: int) -> None:
    """Raises FieldError if all answers to one HTTP request are too large together.

    Args:
        request: One of the requests, with the task's values; the others have the same limits.
        max_tokens: Maximum number of tokens of all answers together (``limits.max_total_tokens``).
    """
    n, each = request.n, request.answer_limit
    if n > 1 and n * each > max_tokens:
        found = f"n is {n} answers of {each} tokens, {n * each} together"
        raise FieldError("n", f"{found}; at most {max_tokens} are taken")
    if (count := n * request.prompts) == 1 or request.logprobs is None:
        return
    reported = each + len(request.prompt_ids) * request.wants_prompt_logprobs
    total = count * reported * (1 + request.logprobs)
    max_values = max_tokens * (1 + MOST_LOGPROBS)
    if total > max_values:
        found = f"logprobs is {request.logprobs} for {count} times {reported} tokens"
        way_out = f"at most {max_values} are taken: lower it, or send fewer prompts"
        raise FieldError("logprobs", f"{found}, {total} values together; {way_out}")


class RequestReader:
    """Makes the requests that an engine takes. Any thread may use it.

    Args:
        records: The versions of the task's record that answer.
    """

    def __init__(
        self, engine: "BatchEngine", tokenizer: TaskTokenizer, template: Template, records: Records
    ) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self._template, self._records = template, records

    def request(self, asked: Request) -> Request:
        """Fills in a request, and compiles its guide, which may take seconds.

        Raises:
            FieldError, ValueError: See `read` and `guide`.
        """
        request = self.read(asked, asked.id, asked.record_version or self._records.newest[1])
        self.guide(request.guide)
        return request

    def read(self, asked: Request, id: str, version: int) -> Request:
        """Fills in the prompt's token ids, limits, stops, sampling parameters, guide and adapter.

        Args:
            id: The request's id in the engine; it must be unique there.
            version: Version of the task's record that answers.

        Raises:
            FieldError: A field is wrong.
            PromptTooLong: The prompt leaves no room for an answer in a row.
            ValueError: The prompt has no tokens, or a limit is out of range.
        """
        record, longest = self._records.of(version), self._engine.longest
        guide = None if asked.max_tokens == 0 else asked.guided_by(guide_of(record))
        scoring = asked.scoring
        if scoring is not None:
            guide = self.labels(asked, version)
            scoring = _filled(asked, scoring, guide, record)
        if guide:
            apart = self._tokenizer.special_ids.union(self._tokenizer.eos_ids)
            guide.require_whole(asked.stop, {*asked.stop_token_ids} - apart)
        tokenizer, prompt = self._tokenizer, asked.prompt
        if isinstance(prompt, str) and not asked.templated:
            prompt = tuple(tokenizer.encode_prompt(prompt, asked.add_special_tokens is not False))
        elif not isinstance(prompt, tuple):
            try:
                add = asked.add_special_tokens
                prompt = tuple(self._template.encode(tokenizer, prompt, add))
            except MessageError as error:
                raise FieldError(error.field, str(error)) from error
        slots = self._scoring_tokens(guide, asked) if scoring is not None and guide else None
        if asked.truncate_prompt_tokens:
            prompt = prompt[-self._kept_tokens(asked, record, slots) :]
        if len(prompt) >= longest:
            raise PromptTooLong(asked.prompt_field, len(prompt), longest)
        most = asked.max_tokens
        most = min(record.max_tokens, longest - len(prompt)) if most is None else max(most, 1)
        if asked.min_tokens > most:
            message = f"min_tokens is {asked.min_tokens}; the answer has at most {most}"
            raise FieldError("min_tokens", f"{message}: lower it, or raise max_tokens")
        stops, stop_ids = (*record.stop, *asked.stop), asked.stop_token_ids
        if slots is not None:
            most, stops = slots, ()
            if len(prompt) + slots > longest:
                raise FieldError(
                    asked.prompt_field,
                    f"{asked.prompt_field} has {len(prompt)} tokens, and scoring its labels takes "
                    f"up to {slots} more; a row holds {longest} (max_model_len, kv_cache_bytes): "
                    "shorten it, have it cut by truncate_prompt_tokens, use shorter labels, or "
                    "lower the engine's max_draft_tokens",
                )
        if stops:
            stop_ids += self._special_stops(asked.stop, record)
        request = structs.replace(
            asked,
            id=id,
            prompt=prompt,
            max_tokens=most,
            stop=stops,
            stop_token_ids=stop_ids,
            parameters=(
                parameters_of(asked.parameters, record.sampling) if scoring is None else {}
            ),
            guide=guide,
            adapter=adapter_of(asked.adapter, record),
            record_version=version,
            scoring=scoring,
        )
        self._engine.require_fit(request)
        return request

    def guide(self, guide: GuideSpec | None) -> "Guidance | None":
        """Returns the compiled guide of a request; compiles it on this thread unless it is known.

        vLLM compiles guides itself: there, the guide is only checked, and the result is None.

        Raises:
            FieldError: The guide cannot be followed.
        """
        if guide is None:
            return None
        try:
            guides = self._engine.guides
            return guides.labels(guide) if guide.kind == "labels" else guides.of(guide)
        except GuideError as error:
            raise FieldError(guide.field, f"{guide.name}: {error}") from error

    def labels(self, asked: Request, version: int) -> GuideSpec:
        """Returns the labels that a request with `Scoring` scores.

        Raises:
            FieldError: Neither the request nor the task's record of this version has labels.
        """
        record = self._records.of(version)
        guide = asked.guide or guide_of(record)
        if guide is None or not guide.choices or asked.scoring is None:
            raise FieldError("labels", "the task has no choices; give labels")
        end = asked.scoring.end
        try:
            return _label_guide(guide, record.label_end if end is None else end, guide.field)
        except ValueError as error:
            raise FieldError("end", f"end: {error}") from error

    def _scoring_tokens(self, guide: GuideSpec, asked: Request) -> int:
        """Returns the number of tokens that a row needs behind its prompt to score labels.

        Raises:
            FieldError: The labels cannot be scored, or have too many probabilities for a response.
        """
        count = len(guide.choices) * asked.prompts
        if asked.scoring and asked.scoring.top_k is None and count > MOST_PROBABILITIES:
            raise FieldError(
                "top_k",
                f"top_k is unset, and a response would have {count} probabilities; at most "
                f"{MOST_PROBABILITIES} are reported: set top_k, or send fewer inputs",
            )
        try:
            return self._engine.scoring_tokens(guide)
        except GuideError as error:
            raise FieldError(guide.field, f"{guide.name}: {error}") from error

    def compile_own_guide(self) -> None:
        """Compiles the task's own guide before the first request arrives."""
        try:
            self.guide(guide_of(self._records.newest[0]))
        except FieldError as error:
            log.error("task %s: %s", self._records.newest[0].name, error)

    def _kept_tokens(self, asked: Request, record: TaskRecord, slots: int | None) -> int:
        """The number of a prompt's last tokens that ``truncate_prompt_tokens`` keeps.

        Args:
            slots: Number of tokens that scoring needs; None for an answer.
        """
        if asked.truncate_prompt_tokens != -1:
            return asked.truncate_prompt_tokens or 0
        longest = self._engine.longest
        if slots is not None:
            return max(longest - slots, 1)
        own = min(record.max_tokens, longest // 2)
        return max(longest - (own if asked.max_tokens is None else asked.max_tokens or 1), 1)

    def _special_stops(self, asked: Sequence[str], record: TaskRecord) -> tuple[int, ...]:
        """Returns the ids of stop strings that are special tokens, which answers' texts lack.

        Raises:
            FieldError: See `require_stops`. The task's stop strings were checked at its creation.
        """
        require_stops(self._tokenizer, asked)
        special = self._tokenizer.special_tokens
        found = (special.get(stop) for stop in (*asked, *record.stop))
        return tuple(id_ for id_ in found if id_ is not None and id_ < self._engine.vocab_size)
