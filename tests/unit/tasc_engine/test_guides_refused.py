"""Guides that cannot be: each is refused, soon and by name; equal ones have one hash."""

import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from guide_walks import allowed, regex

from tasc_engine.errors import GuideError
from tasc_engine.guides import GuideLimits, Guides
from tasc_engine.request import GuideSpec
from tasc_text import TaskTokenizer

EOS = 0


@pytest.fixture(scope="module")
def guides(tokenizer: TaskTokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.vocab_size)


def refused(guides: Guides, spec: GuideSpec) -> str:
    with pytest.raises(GuideError) as caught:
        guides.of(spec, 99)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("regex", "(a", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"[^\s\S]", "no token may follow"),
        ("regex", r"a[^\s\S]", "no token may follow"),
        ("regex", "a{0}", "only an empty one"),
        ("regex", "(" * 5000 + ")" * 5000, "maximum number of nested"),
        ("regex", "a" * 70_000, "70000 characters; at most 65536"),
        ("json_schema", "{", "no JSON object"),
        ("json_schema", " []", "no JSON object but ' []'; send an object"),
        ("json_schema", "true", "no JSON object but 'true'; send an object"),
        ("json_schema", '{"type": "integer"}, "lark_grammar": "start: /a/"', "no JSON object"),
        ("json_schema", '{"items": ' * 3000 + "{}" + "}" * 3000, "recursion limit"),
        ("json_schema", '{"type": "foo"}', "Invalid type: foo"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "retriev"),
        ("grammar", "start: foo", 'unknown name: "foo"'),
        ("grammar", '{"grammars": [{"json_schema": {}}]}', "expecting rule"),
        ("grammar", "start: start start", "no token may follow"),
        ("grammar", 'start: b "y"\nb[stop="x"]: /.*/', "rollback not supported"),
    ],
)
def test_what_cannot_guide_is_refused_with_the_reason(
    guides: Guides, kind: str, text: str, told: str
) -> None:
    reason = refused(guides, GuideSpec(kind, text=text))
    assert told in reason
    assert kind in reason
    assert len(reason) < 400


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        (GuideLimits(compile_seconds=0.3, compile_bytes=2**33), r"start: A\nA: %s & ~%s"),
        (GuideLimits(compile_seconds=60.0, compile_bytes=2**25), r"start: A\nA: %s & ~%s"),
    ],
)
def test_what_would_compile_for_hours_is_given_up_and_others_are_not(
    tokenizer: TaskTokenizer, limits: GuideLimits, text: str
) -> None:
    guides = Guides(tokenizer, tokenizer.vocab_size, limits)
    long = text.replace(r"\n", "\n") % ("/(.*b.{20}.*)/", "/(.*c.{20}.*)/")
    told = f"more than {limits.compile_seconds:g} s or {limits.compile_bytes / 2**20:g} MiB"
    assert told in refused(guides, GuideSpec("grammar", text=long))
    assert allowed(guides.of(regex("friday"), 99))


def test_without_the_library_only_choices_guide(
    tokenizer: TaskTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    guides = Guides(tokenizer, tokenizer.vocab_size)
    assert allowed(guides.of(GuideSpec("choice", ("friday",)), 99))
    assert "pip install llguidance" in refused(guides, regex("friday"))


def test_a_tokenizer_whose_tokens_are_read_otherwise_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Prepend", "prepend": "x"}
    content["decoder"] = {
        "type": "Sequence",
        "decoders": [content["decoder"], {"type": "Strip", "content": "x", "start": 1, "stop": 0}],
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = TaskTokenizer(tmp_path / "tokenizer.json", [EOS])
    guides = Guides(tokenizer, tokenizer.vocab_size)
    assert "otherwise than the tokenizer" in refused(guides, regex("friday"))
    assert "vocab size too small" in refused(Guides(tokenizer, 100), regex("friday"))


def test_importing_guides_leaves_the_library_alone() -> None:
    code = "import sys, tasc_engine.guides; print('llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ({"kind": "choice"}, "choices is empty; give at least one"),
        ({"kind": "choice", "choices": ("a",), "text": "b"}, "text besides"),
        ({"kind": "regex"}, "by regex needs its text"),
        ({"kind": "regex", "text": "a", "choices": ("a",)}, "nothing else"),
        ({"kind": "yaml", "text": "a"}, "'yaml'; it is one of choice, json_schema, regex, grammar"),
        ({"kind": "choice", "choices": ("a", "b\ud800")}, r"choice 1 .*'\\ud800' at character 1"),
        ({"kind": "regex", "text": "\udfff"}, r"regex .*'\\udfff' at character 0"),
    ],
)
def test_what_is_no_guide_is_refused_by_name(parts: dict, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        GuideSpec(**parts)


def test_equal_guides_have_one_hash_wherever_they_come_from() -> None:
    one, other = GuideSpec("choice", ("a", "東 🙂")), GuideSpec("choice", ("a", "東 🙂"))
    assert hash(one) == hash(other)
    assert {one: 1}[other] == 1
    assert one != GuideSpec("choice", ("a",))
    sent = pickle.dumps(one)
    assert sent == pickle.dumps(other)
    assert pickle.loads(sent) == one
    assert one.characters == 4
    assert b"_hash" not in sent
