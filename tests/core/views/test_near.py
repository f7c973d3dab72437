"""Near-duplicates as they are defined: which documents belong together; no store."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, strategies as st

import perco
from perco import views
from perco.views.near import band_rows, clusters
from tests.component.notify.test_views_near import Docs, edited, text


def shingles(words: list[str]) -> set[str]:
    return set(views.words(3)(" ".join(words)))


def jaccard(one: set[str], other: set[str]) -> float:
    return len(one & other) / len(one | other)


def pairs(labels: dict[str, str]) -> set[tuple[str, str]]:
    """All pairs of documents with one label."""
    return {(a, b) for a, b in combinations(sorted(labels), 2) if labels[a] == labels[b]}


def test_planted_near_duplicates_are_found_and_others_are_not() -> None:
    """The definition, on 400 documents: precision and recall of the pairs in one cluster, beside exact similarities."""
    docs, rng = Docs(), random.Random(4)
    texts: dict[str, list[str]] = {}
    for family in range(100):
        base = text(rng)
        for copy in range(4):  # a copy with n words replaced has about (97 - 3n) / (97 + 3n) in common with its base
            texts[f"{family:03}-{copy}"] = edited(rng, base, [0, 1, 2, 12][copy])
    built = docs.views.build({docs.docs: {key: {docs.text: " ".join(words)} for key, words in texts.items()}})
    found = pairs({key: values[docs.label] for key, values in built[docs.docs].items()})
    features = {key: shingles(words) for key, words in texts.items()}
    exact = {(one, other): jaccard(features[one], features[other]) for one, other in combinations(sorted(texts), 2)}
    near = {pair for pair, similarity in exact.items() if similarity >= 0.85}
    far = {pair for pair, similarity in exact.items() if similarity < 0.7}
    assert len(near) >= 200
    assert len(found & near) / len(near) >= 0.97
    assert not found & far


def naive(signatures: list[bytes], threshold: float) -> list[int]:
    first = list(range(len(signatures)))
    for a, b in combinations(range(len(signatures)), 2):
        equal = sum(x == y for x, y in zip(signatures[a], signatures[b], strict=True)) / len(signatures[a])
        if (equal - 1 / 256) / (1 - 1 / 256) >= threshold - 1e-9:
            low, high = sorted((first[a], first[b]))
            first = [low if each == high else each for each in first]
    return first


@given(st.lists(st.binary(min_size=4, max_size=4).map(lambda each: bytes(b & 3 for b in each)), min_size=1), st.data())
def test_all_pairs_are_compared(signatures: list[bytes], data: Any) -> None:
    threshold = data.draw(st.sampled_from([0.2, 0.5, 0.75, 1.0]))
    assert clusters(signatures, threshold) == naive(signatures, threshold)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9, 1.0])
@pytest.mark.parametrize("permutations", [16, 128, 256])
def test_pairs_at_the_threshold_meet_in_a_band(threshold: float, permutations: int) -> None:
    def chance(rows: int) -> float:
        return 1 - (1 - threshold**rows) ** (permutations // rows)

    rows = band_rows(threshold, permutations)
    assert chance(rows) >= 0.95
    assert all(chance(more) < 0.95 for more in range(rows + 1, permutations + 1))


def test_features_of_a_text() -> None:
    assert sorted(views.words(3)("One, two; THREE four")) == ["one two three", "two three four"]
    assert (set(views.words(3)("one two")), set(views.words(2)(" .. "))) == ({"one two"}, set())


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"threshold": 0}, "threshold is a similarity"),
        ({"threshold": 1.5}, "threshold is a similarity"),
        ({"permutations": 0}, "permutations is a number of permutations"),
        ({"permutations": 5000}, "5000 permutations are more than 1024"),
        ({"features": 3}, "takes a plain function"),
        ({"version": 0}, "version"),
        ({"compared_max": 0}, "compared_max is a number of rows"),
    ],
)
def test_arguments_are_checked(how: Any, says: str) -> None:
    with pytest.raises(perco.UsageError, match=says):
        Docs(**how)


@pytest.mark.parametrize("name", ["rensa", "numpy"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(perco.UsageError, match=rf"near-duplicates need {name}: pip install 'perco\[near\]'"):
        Docs()


def test_a_table_of_the_same_name_is_refused() -> None:
    docs = perco.Table("docs", key=perco.TEXT)
    text, label = docs.column("text", perco.TEXT), docs.column("label", perco.TEXT)
    v = views.Views(perco.Schema(docs, perco.Table("near.links", key=perco.TEXT)))
    with pytest.raises(perco.UsageError, match=r"needs the table name 'near\.links'"):
        views.near_duplicates(v, text, id="near", into=label)


def names(found: Iterable[Any]) -> list[str]:
    return sorted(each.name for each in found)


@pytest.mark.parametrize(
    "how", [{"into": "number"}, {"into": "text"}, {"into": "table"}, {"id": "a.b"}, {"id": "x" * 36}, {"version": 0}]
)
def test_a_refused_declaration_adds_nothing(how: dict[str, Any]) -> None:
    docs = perco.Table("docs", key=perco.TEXT)
    text, number = docs.column("text", perco.TEXT), docs.column("number", perco.INT64)
    right = docs.column("right", perco.TEXT)
    v = views.Views(perco.Schema(docs))
    arguments: dict[str, Any] = {
        "id": "near",
        **how,
        "into": {"number": number, "text": text, "table": docs}.get(how.get("into", ""), right),
    }
    with pytest.raises(perco.PercoError):
        views.near_duplicates(v, text, **arguments)
    assert (names(v.schema.tables.values()), list(v.declared), list(v.schema.observers)) == (["docs"], [], [])
    views.near_duplicates(v, text, id="near", into=right)
