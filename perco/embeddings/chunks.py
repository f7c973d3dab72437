"""Cuts a text into chunks: its paragraphs, each with the headings above it.

A chunk depends on its own paragraph and headings alone. So an edit changes the chunks that it touches, and no others.
(A short paragraph is a part of the next one.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from perco.errors import UsageError

CHARS_MAX: Final = 1200
_CHARS_LEAST: Final = 60  # a shorter paragraph is joined with the next one
_TITLE_MAX: Final = 200  # of a heading; the rest of it is cut off
_HEADING: Final = re.compile(r"(#{1,6})[ \t]+(\S.*)")
_FENCE: Final = re.compile(r" {0,3}(`{3,}|~{3,})(.*)")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?])\s+|\n")


class Chunk(NamedTuple):
    """A part of a text. Attributes: `headings`: those above it, from the outermost, joined by " > "; `words`."""

    headings: str
    words: str


def split(text: str, chars_max: int = CHARS_MAX) -> list[Chunk]:
    """The chunks of a text, which may be Markdown: the words of none have more than `chars_max` characters.

    Raises: UsageError for a `chars_max` below 1.
    """
    if isinstance(chars_max, bool) or not isinstance(chars_max, int) or chars_max < 1:
        raise UsageError(f"chars_max is a number of characters, at least 1, not {chars_max!r}")
    out: list[Chunk] = []
    path: list[tuple[int, str]] = []
    short: list[str] = []
    bare = False  # the last heading has nothing below it yet

    def add(words: str, above: list[tuple[int, str]]) -> None:
        headings = " > ".join(title for _, title in above)
        out.extend(Chunk(headings, part) for part in _parts(words, chars_max))

    def end() -> None:
        if short:
            add("\n\n".join(short), path)
            short.clear()

    for block in _blocks(text.splitlines()):
        heading = _heading(block)
        if heading is not None:
            end()
            if bare and heading[0] <= path[-1][0]:
                add(path[-1][1], path[:-1])
            path, bare = [*(each for each in path if each[0] < heading[0]), heading], True
            continue
        bare = False
        short.append(block)
        if sum(map(len, short)) >= _CHARS_LEAST:
            end()
    end()
    if bare:
        add(path[-1][1], path[:-1])
    return out


def _heading(line: str) -> tuple[int, str] | None:
    """The level and the title of a heading; None for any other line."""
    found = _HEADING.fullmatch(line)
    if found is None:
        return None
    title = found[2].rstrip()
    without = title.rstrip("#")
    return len(found[1]), (without.rstrip() if without[-1:].isspace() else title)[:_TITLE_MAX]


def _blocks(lines: Iterable[str]) -> Iterator[str]:
    """Headings, paragraphs, and pieces of code between fences."""
    block: list[str] = []
    fence = ""
    for line in lines:
        found = _FENCE.fullmatch(line)
        if fence:
            block.append(line)
            if found and found[1].startswith(fence) and not found[2].strip():
                fence = ""
            continue
        if found and not (found[1][0] == "`" and "`" in found[2]):
            fence = found[1]
        if not line.strip() or _heading(line) is not None:
            if block:
                yield "\n".join(block)
            block = []
            if line.strip():
                yield line
        else:
            block.append(line)
    if block:
        yield "\n".join(block)


def _parts(words: str, chars_max: int) -> Iterator[str]:
    """A paragraph, cut at the ends of sentences or lines if it is too long."""
    at, words = 0, words.strip()
    while len(words) - at > chars_max:
        last = [found.end() for found in _SENTENCE_END.finditer(words, at, at + chars_max)]
        cut = last[-1] if last and last[-1] > at + chars_max // 4 else at + chars_max
        if part := words[at:cut].strip():
            yield part
        at = cut
    if part := words[at:].strip():
        yield part
