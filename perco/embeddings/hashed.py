"""Embeddings without a model: vectors of hashed words. They need no download, no service and no GPU.

Texts with the same words are near each other, and so are, a little, words that begin alike. They know nothing of
synonyms: for that, give `EmbeddingIndex` a model.
"""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final
from zlib import crc32

DIMENSIONS: Final = 512
_WORD: Final = re.compile(r"[^\W_]+")
_COMMON: Final = (
    "a an and are as at be been but by can do does for from had has have he how i if in into is it its may more no not "
    "of on one or other she so such than that the their them then there these they this to up use used was we were "
    "what when where which who will with you your"
)
_LEFT_OUT: Final = frozenset(_COMMON.split())
_STEM: Final = 5  # words that begin with the same so many letters count as alike
_STEM_WEIGHT: Final = 0.6


def embed(texts: Sequence[str]) -> list[bytes]:
    """A vector of 512 numbers for each text, of length 1."""
    return [_embedded(text) for text in texts]


def _embedded(text: str) -> bytes:
    found = array("f", bytes(4 * DIMENSIONS))
    for feature, count in Counter(_features(text)).items():
        place = crc32(feature.encode())
        weight = 1.0 + math.log(count)
        if feature.endswith("-"):
            weight *= _STEM_WEIGHT
        found[place % DIMENSIONS] += weight if place & 1 << 31 else -weight
    length = math.sqrt(sum(each * each for each in found))
    return array("f", [each / length for each in found]).tobytes() if length else found.tobytes()


def _features(text: str) -> Iterator[str]:
    for word in _WORD.findall(text.lower()):
        if word not in _LEFT_OUT:
            yield word
            if len(word) > _STEM:
                yield f"{word[:_STEM]}-"
