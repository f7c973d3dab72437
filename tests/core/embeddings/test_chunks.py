"""How a text is cut into chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

import perco
from perco.embeddings import Chunk, split

LONG = "The first paragraph is long enough to stand alone, with its sixty characters."
MORE = "Another paragraph that is long enough to stand alone, with many characters."


def test_a_chunk_is_a_paragraph_under_its_headings() -> None:
    text = f"# Plans\n\n{LONG}\n\n## Next\n{MORE}\n\n# Past ##\n\n{LONG}\n"
    assert split(text) == [Chunk("Plans", LONG), Chunk("Plans > Next", MORE), Chunk("Past", LONG)]


def test_short_paragraphs_are_joined_but_not_across_headings() -> None:
    text = f"one\n\ntwo\n\n{LONG}\n\nthree\n\n# Four\n\nfive"
    assert split(text) == [Chunk("", f"one\n\ntwo\n\n{LONG}"), Chunk("", "three"), Chunk("Four", "five")]


def test_code_stays_together_and_has_no_headings() -> None:
    code = f"```python\n# no heading\n\nx = 1  # {LONG}\n```"
    assert split(f"{LONG}\n\n{code}\n\n{MORE}") == [Chunk("", LONG), Chunk("", code), Chunk("", MORE)]


def test_a_fence_that_is_never_closed_ends_with_the_text() -> None:
    assert split(f"{LONG}\n\n~~~\n\n# code") == [Chunk("", LONG), Chunk("", "~~~\n\n# code")]


def test_long_paragraphs_are_cut_at_the_ends_of_sentences() -> None:
    words = "One sentence. Another one! A third? And one more."
    assert [chunk.words for chunk in split(words, 30)] == ["One sentence. Another one!", "A third? And one more."]
    assert [chunk.words for chunk in split("x" * 25, 10)] == ["x" * 10, "x" * 10, "x" * 5]


def test_an_edit_changes_only_what_it_touches() -> None:
    paragraphs = [
        f"Paragraph {number} is long enough to stand alone, with its sixty characters." for number in range(9)
    ]
    before = split("\n\n".join(paragraphs))
    after = split("\n\n".join([*paragraphs[:4], MORE, *paragraphs[5:]]))
    assert set(before) ^ set(after) == {Chunk("", paragraphs[4]), Chunk("", MORE)}
    assert set(split("\n\n".join([MORE, *paragraphs]))) - set(before) == {Chunk("", MORE)}


@given(st.text(alphabet="ab #\n`.!", max_size=200), st.integers(4, 40))
def test_no_word_is_lost_and_no_chunk_is_too_long(text: str, chars_max: int) -> None:
    chunks = split(text, chars_max)
    assert all(0 < len(chunk.words) <= chars_max for chunk in chunks)
    letters = "".join(chunk.words + chunk.headings for chunk in chunks)
    for letter in "ab":
        headings = sum(line.startswith("#") for line in text.splitlines())
        assert letters.count(letter) == text.count(letter) or (headings and letters.count(letter) > text.count(letter))


def test_nothing_has_no_chunks() -> None:
    assert split("") == split(" \n\n \n") == []


def test_a_heading_with_nothing_below_it_is_a_chunk() -> None:
    text = "# One\n\n## Two\n\n## Three\n\n# Four\n"
    assert split(text) == [Chunk("One", "Two"), Chunk("One", "Three"), Chunk("", "Four")]


def test_fences_are_those_of_markdown() -> None:
    inline = "```ls``` lists files, which is long enough for a paragraph of its own."
    assert split(f"{inline}\n\n# Next\n\n{LONG}") == [Chunk("", inline), Chunk("Next", LONG)]
    nested = f"````\n```\n# no heading {LONG}\n```\n````"
    assert split(f"{nested}\n\n# Next\n\n{MORE}") == [Chunk("", nested), Chunk("Next", MORE)]
    info = f"```\n```python\n# no heading {LONG}\n```"
    assert split(f"{info}\n\n{MORE}") == [Chunk("", info), Chunk("", MORE)]


def test_hostile_texts_take_no_longer() -> None:
    assert split("# a" + " " * 100_000 + "b") == [Chunk("", "a")]
    assert len(split("x" * 2_000_000, 1000)) == 2000
    assert split("# " + "x" * 10_000 + f"\n\n{LONG}")[0].headings == "x" * 200


@pytest.mark.parametrize("chars_max", [0, -1, 1.5, True])
def test_the_length_of_a_chunk_is_checked(chars_max: Any) -> None:
    with pytest.raises(perco.UsageError, match="chars_max is a number of characters"):
        split(LONG, chars_max)
