"""mkdocs calls these while it builds the site: the number of a rule, such as N8, leads to the rule in protocol.md."""

from __future__ import annotations

import re
from os.path import relpath
from posixpath import dirname
from typing import Any, Final

PROTOCOL: Final = "protocol.md"
_RULE: Final = re.compile(r"^(- )\*\*([A-Z]\d{1,2})\*\*", re.MULTILINE)
_TAG: Final = re.compile(r"(<[^>]*>)")
_NUMBER: Final = re.compile(r"\b[A-Z]\d{1,2}\b")
_NO_LINKS: Final = ("a", "code", "pre", "script", "style", "h1", "title")

_rules: set[str] = set()


def on_files(files: Any, config: Any) -> Any:
    """Find the rules."""
    _rules.update(number for _, number in _RULE.findall(files.get_file_from_path(PROTOCOL).content_string))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Give each rule an address."""
    if page.file.src_uri != PROTOCOL:
        return markdown
    return _RULE.sub(r'\1<span id="\2"></span>**\2**', markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Link the numbers of rules, except in code, links and titles."""
    protocol = page.file.src_uri == PROTOCOL
    target = relpath("protocol.html", dirname(page.file.dest_uri) or ".")

    def link(found: re.Match[str]) -> str:
        return f'<a href="{"" if protocol else target}#{found[0]}">{found[0]}</a>' if found[0] in _rules else found[0]

    out: list[str] = []
    inside: list[str] = []
    for part in _TAG.split(html):
        if part.startswith("<"):
            name = part.strip("</>").split()[0].lower() if part.strip("</> ") else ""
            if name in _NO_LINKS:
                if part.startswith("</"):
                    inside.pop()
                elif not part.endswith("/>"):
                    inside.append(name)
            out.append(part)
        else:
            out.append(part if inside else _NUMBER.sub(link, part))
    return "".join(out)
