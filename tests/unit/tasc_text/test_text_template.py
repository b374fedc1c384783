"""A template has one place for the input; everything else in it means itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_text import PromptTemplate, TextError

around = st.text().filter(lambda text: "{input}" not in text)


@given(around, st.text(), around)
def test_the_input_stands_between_what_is_around_it(before: str, value: str, after: str) -> None:
    assert PromptTemplate(before + "{input}" + after).render(value) == before + value + after


def test_other_braces_and_escapes_are_verbatim() -> None:
    text = '{"a": {{}}, "b": "{}", "c": {0}, {input }} %s \\n {{input}}'
    assert PromptTemplate(text).render("{x}") == text.replace("{input}", "{x}")


def test_a_value_that_looks_like_the_field_is_verbatim() -> None:
    assert PromptTemplate("<{input}>").render("{input}{input}") == "<{input}{input}>"


@pytest.mark.parametrize("text", ["", "{INPUT}", "{input", "{input}{input}"])
def test_a_template_without_exactly_one_field_is_refused(text: str) -> None:
    with pytest.raises(TextError):
        PromptTemplate(text)
