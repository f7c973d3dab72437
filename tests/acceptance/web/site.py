"""A small web that changes: pages with links, duplicates, ranks, frames, redirects and errors, from a seed."""

from __future__ import annotations

import random

from perco.webindex.batch import DEFAULT_RANK
from perco.webindex.pages import Page

WORDS = ("lock", "primary", "snapshot", "tablet", "oracle", "observer", "worker", "scanner", "commit", "watermark")


def url(number: int) -> str:
    return f"https://site.invalid/page-{number}"


class Site:
    """The pages that exist now."""

    def __init__(self, seed: int, size: int = 24) -> None:
        self.rng = random.Random(seed)
        self.size = size
        self.pages: dict[str, Page] = {}
        self.ranks: dict[str, float] = {}

    def page(self, number: int) -> Page:
        rng = self.rng
        if rng.random() < 0.08:
            return Page(url(number), status=301, location=url(rng.randrange(self.size)))
        if rng.random() < 0.05:
            return Page(url(number), status=404, content_type="text/html", body=b"<title>gone</title>")
        words = " ".join(rng.choices(WORDS, k=12))
        if rng.random() < 0.4:  # a copy of one of two: hot clusters, whose canonical changes again and again
            words = rng.choice(("everybody says this", "many say that"))
        # Page 0 is popular: a hot target.
        targets = [0, *rng.choices(range(self.size), k=rng.randrange(5))]
        title = "copy" if "say" in words else f"{rng.choice(WORDS)} {number % 5}"
        links = "".join(f'<a href="{url(t)}">{"" if title == "copy" else rng.choice(WORDS)}</a> ' for t in targets)
        # Page 1 is shown by others.
        frame = f'<iframe src="{url(1)}"></iframe>' if number != 1 and rng.random() < 0.2 else ""
        body = f"<html><title>{title}</title><body><p>{words}</p>{frame}{links}</body></html>"
        return Page(url(number), content_type="text/html", charset="utf-8", body=body.encode())

    def change(self, count: int) -> list[Page | str | tuple[str, float]]:
        """Some changes: pages added or replaced, URLs deleted, ranks."""
        out: list[Page | str | tuple[str, float]] = []
        for i in range(count):
            kind = self.rng.random()
            if i == 0:
                out.append(self.put(self.page(1)))  # pages that others show change every time
            elif self.pages and kind < 0.2:
                gone = self.rng.choice(sorted(self.pages))
                del self.pages[gone]
                self.ranks.pop(gone)
                out.append(gone)
            elif self.pages and kind < 0.4:
                ranked = self.rng.choice(sorted(self.pages))
                self.ranks[ranked] = self.rng.randrange(1, 40) / 10
                out.append((ranked, self.ranks[ranked]))
            else:
                out.append(self.put(self.page(self.rng.randrange(self.size))))
        return out

    def put(self, page: Page) -> Page:
        self.pages[page.url] = page
        self.ranks.setdefault(page.url, DEFAULT_RANK)
        return page
