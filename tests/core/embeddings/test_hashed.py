"""Embeddings that are made of hashed words."""

from __future__ import annotations

from array import array

import pytest

from perco.embeddings import embed


def likeness(one: str, other: str) -> float:
    first, second = (array("f", each) for each in embed([one, other]))
    return sum(map(float.__mul__, first, second))


def test_texts_with_the_same_words_are_near_each_other() -> None:
    question = "How do I compress a file?"
    near, like, far = "compress the file", "compressing files", "the median of some numbers"
    assert likeness(question, near) == pytest.approx(1.0)
    assert likeness(question, near) > likeness(question, like) > 0.1 > abs(likeness(question, far))


def test_a_vector_has_the_length_one_and_is_always_the_same() -> None:
    [vector] = embed(["some words of a text"])
    assert len(vector) == 4 * 512
    assert sum(each * each for each in array("f", vector)) == pytest.approx(1.0)
    assert array("f", vector)[:4].tolist() == array("f", embed(["some words of a text"])[0])[:4].tolist()


def test_a_text_without_words_has_a_vector_without_a_direction() -> None:
    assert embed(["", "of the"]) == [bytes(4 * 512)] * 2
