"""Log-probabilities as OpenAI's two endpoints write them. It computes none."""

from collections.abc import Sequence
from typing import Any

from tasc_serve.calls import TokenText

_LEAST = -9999.0  # what OpenAI writes for tokens that cannot be; JSON has no infinity


def completion_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Columns, one entry for each token. A place's likeliest tokens include the chosen one."""
    told = any(token.top for token in tokens)
    return {
        "tokens": [_name(token.utf8) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": [_likeliest(token) for token in tokens] if told else None,
        "text_offset": [token.offset for token in tokens],
    }


def chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Rows, one for each token."""
    content = [
        {
            **_entry(token.utf8, token.logprob),
            "top_logprobs": [_entry(utf8, logprob) for utf8, logprob in token.top],
        }
        for token in tokens
    ]
    return {"content": content}


def _likeliest(token: TokenText) -> dict[str, float]:
    found: dict[str, float] = {}
    for utf8, logprob in (*token.top, (token.utf8, token.logprob)):
        name = _name(utf8)  # two tokens may have one text: the likelier one is told
        found[name] = max(_finite(logprob), found.get(name, _LEAST))
    return found


def _entry(utf8: bytes, logprob: float) -> dict[str, Any]:
    return {"token": _name(utf8), "logprob": _finite(logprob), "bytes": list(utf8)}


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST)


def _name(utf8: bytes) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI names them."""
    try:
        return utf8.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in utf8)
