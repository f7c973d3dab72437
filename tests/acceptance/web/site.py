"""A small web that changes: pages with links, duplicates, redirects and errors, from a seed."""

from __future__ import annotations

import random

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

    def page(self, number: int) -> Page:
        rng = self.rng
        if rng.random() < 0.08:
            return Page(url(number), status=301, location=url(rng.randrange(self.size)))
        if rng.random() < 0.05:
            return Page(url(number), status=404, content_type="text/html", body=b"<title>gone</title>")
        words = " ".join(rng.choices(WORDS, k=12))
        # Page 0 is popular: a hot target.
        targets = [0, *rng.choices(range(self.size), k=rng.randrange(5))]
        links = "".join(f'<a href="{url(t)}">{rng.choice(WORDS)}</a> ' for t in targets)
        body = f"<html><title>{rng.choice(WORDS)} {number % 5}</title><body><p>{words}</p>{links}</body></html>"
        return Page(url(number), content_type="text/html", charset="utf-8", body=body.encode())

    def change(self, count: int) -> list[Page | str]:
        """Some changes: pages added or replaced, URLs deleted."""
        out: list[Page | str] = []
        for _ in range(count):
            if self.pages and self.rng.random() < 0.2:
                gone = self.rng.choice(sorted(self.pages))
                del self.pages[gone]
                out.append(gone)
            else:
                page = self.page(self.rng.randrange(self.size))
                self.pages[page.url] = page
                out.append(page)
        return out
