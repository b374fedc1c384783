"""A template has one place for the input; everything else in it means itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasc_text import PromptTemplate, TextError

around = st.text().filter(lambda text: "{input}" not in text)


@given(around, st.text(), around)
def test_the_input_stands_between_what_is_around_it(before: str, value: str, after: str) -> None:
    assert PromptTemplate(before + "{input}" + after).render(value) == before + value + after


@pytest.mark.parametrize("value", ["{x}", "{input}{input}"])
def test_other_braces_and_escapes_and_values_like_the_field_are_verbatim(value: str) -> None:
    text = '{"a": {{}}, "b": "{}", "c": {0}, {input }} %s \\n {{input}}'
    before, after = text.split("{input}")
    assert PromptTemplate(text).render(value) == before + value + after


@pytest.mark.parametrize("text", ["", "{INPUT}", "{input", "{input}{input}"])
def test_a_template_without_exactly_one_field_is_refused(text: str) -> None:
    with pytest.raises(TextError):
        PromptTemplate(text)
