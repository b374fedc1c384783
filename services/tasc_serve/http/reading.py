"""From request bodies to calls: what a body asks for, and what it cannot ask for at once.

It knows limits and fields; it knows no backend and writes no answer.
"""

import json
import secrets
import uuid

from tasc_engine import GuideSpec
from tasc_runtime.protocol import Call
from tasc_runtime.sampling_options import AnswerGuide, FieldError, SamplingOptions
from tasc_serve.errors import ApiError
from tasc_serve.http.schemas import (
    ChatRequest,
    CompletionRequest,
    JsonObjectFormat,
    JsonSchemaFormat,
)
from tasc_serve.settings import LimitSettings

Request = CompletionRequest | ChatRequest
_TOKEN_BYTES = 4  # of a prompt's text that a token id stands for, about
_ANY_OBJECT = '{"type":"object"}'


def call_of(body: Request, limits: LimitSettings) -> Call:
    """Raises ApiError 400 for what is over a limit, and for fields that contradict each other."""
    prompt = body.messages[0].content if isinstance(body, ChatRequest) else body.prompt
    try:
        _require_one_limit(body)
        asked = _asked_of(body)
        _require_small(asked.guide, limits)
    except FieldError as error:
        raise ApiError(400, str(error), error.field) from error
    call = Call(
        id=uuid.uuid4().hex,
        prompt=prompt if isinstance(prompt, str) else tuple(prompt),
        templated=isinstance(body, ChatRequest),
        max_tokens=body.limit,
        stop=body.stops,
        draft=body.draft,
        stream=body.stream,
        options=asked,
        n=body.n or 1,
        max_tokens_field=body.limit_field,
        timeout_s=min(body.timeout or limits.request_timeout_s, limits.request_timeout_s),
    )
    if isinstance(prompt, str):
        size = len(prompt.encode())
        _check(call.prompt_field, f"has {size} bytes", size, limits.max_prompt_bytes)
    else:
        most = limits.max_prompt_bytes // _TOKEN_BYTES
        _check(call.prompt_field, f"has {len(prompt)} token ids", len(prompt), most)
    _check(body.limit_field, f"is {body.limit} tokens", body.limit or 0, limits.max_tokens)
    _check("n", f"is {call.n} answers", call.n, limits.max_choices)
    if over := limits.over_total(call.n, body.limit or 0):
        raise ApiError(400, over, "n")
    return call


def _require_one_limit(body: Request) -> None:
    if isinstance(body, ChatRequest) and None not in (body.max_tokens, body.max_completion_tokens):
        raise FieldError(
            "max_completion_tokens",
            "max_tokens and max_completion_tokens are sent; they are one limit, send one of them",
        )


def _require_small(guide: AnswerGuide | None, limits: LimitSettings) -> None:
    """Before anything is done with it that takes longer the larger it is."""
    if guide is None:
        return
    choices, text = guide.spec.choices, guide.spec.text
    for found, what, most in (
        (len(choices), "choices", limits.max_guide_choices),
        (sum(len(c.encode()) for c in choices), "bytes", limits.max_guide_choices_bytes),
        (len(text.encode()), "bytes", limits.max_guide_bytes),
    ):
        if found > most:
            message = f"{guide.name} has {found} {what}; at most {most} are taken: send a smaller"
            raise FieldError(guide.field, message)


def _check(field: str, found: str, size: int, limit: int) -> None:
    if size > limit:
        raise ApiError(400, f"{field} {found}; at most {limit} are taken", field)


def _asked_of(body: Request) -> SamplingOptions:
    if isinstance(body, ChatRequest) and body.top_logprobs is not None and not body.logprobs:
        raise FieldError(
            "top_logprobs", "top_logprobs comes without logprobs; set logprobs to true"
        )
    return SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=None if body.top_k is None else max(body.top_k, 0),
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items()),
        # Drawn here and sent along, so that a call that is made again gets the same answer.
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        guide=_guide_of(body),
        logprobs=body.told_logprobs,
        ignore_eos=body.ignore_eos,
        adapter=body.adapter,
    )


def _guide_of(body: Request) -> AnswerGuide | None:
    """Raises FieldError: there are two, or what it says is empty or no JSON."""
    named = {
        "response_format": isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat),
        "guided_choice": body.guided_choice is not None,
        "guided_regex": body.guided_regex is not None,
        "guided_json": body.guided_json is not None,
        "guided_grammar": body.guided_grammar is not None,
    }
    given = [name for name, is_given in named.items() if is_given]
    if len(given) > 1:
        raise FieldError(given[1], f"{' and '.join(given)} are sent; an answer has one guide")
    if not given:
        return None
    if getattr(body, given[0]) in ([], ""):
        message = f"{given[0]} is empty; say what the answer may be, or leave it out"
        raise FieldError(given[0], message)
    try:
        return AnswerGuide(_spec_of(body), given[0])
    except (ValueError, RecursionError) as error:
        raise FieldError(given[0], f"{given[0]}: {error}") from error


def _spec_of(body: Request) -> GuideSpec:
    if body.guided_choice is not None:
        return GuideSpec("choice", choices=tuple(body.guided_choice))
    if body.guided_regex is not None:
        return GuideSpec("regex", text=body.guided_regex)
    if body.guided_grammar is not None:
        return GuideSpec("grammar", text=body.guided_grammar)
    if isinstance(body.response_format, JsonSchemaFormat):
        schema = body.response_format.json_schema.schema_
    elif body.guided_json is not None:
        schema = body.guided_json
    else:
        return GuideSpec("json_schema", text=_ANY_OBJECT)
    return GuideSpec("json_schema", text=json.dumps(schema, allow_nan=False))
