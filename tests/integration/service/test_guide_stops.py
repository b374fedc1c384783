"""A guide that no trial sees through, and that stops in the middle of an answer."""

import httpx
import pytest
from serving import ALPHA, Service

pytestmark = [pytest.mark.ray, pytest.mark.redis]
# More ways to be behind a "b" than are followed; behind an "a", where the trial looks, is one.
GRAMMAR = 'start: "a"' + ' | "b"' * 3000


@pytest.mark.parametrize("stream", [False, True])
def test_who_sent_the_guide_is_told_so(service: Service, stream: bool) -> None:
    (b,) = service.tasks[ALPHA].tokenizer.encode_prompt("b")
    body = {"model": ALPHA, "prompt": "hi", "guided_grammar": GRAMMAR, "stream": stream}
    body["logit_bias"] = {str(b): 100}
    response = httpx.post(f"{service.base}/v1/completions", json=body, timeout=60)
    assert "guided_grammar cannot be followed" in response.text
    assert "internal error" not in response.text
    if not stream:
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "guided_grammar"
