"""A synthetic web, made from a seed: any number of pages, distributed as on the real web.

Each page is a function of the seed, of its number and of the number of pages. So a million pages take no memory, and
any of them can be made again. The synthetic web resembles the real one in these ways:

-   The links to pages follow a power law: the number of links to page k is in proportion to (k + 1) ** -0.6, so the
    share of pages with n links falls about as n ** -2.7. (Broder et al. 2000 found -2.1 for links to pages, and -2.7
    for links from pages.) Half of the links lead to a page whose number is near the number of the linking page.
-   The sizes of hosts follow a power law too. The number of links from a page is log-normal: most pages have a few
    links, some have a hundred.
-   Three pages in ten are copies of another page (Fetterly et al. 2003: 29 %), and have its links, as mirrors do. The
    sizes of clusters follow a power law.
-   Words follow Zipf's law. The text of a link is mostly the title of the page that the link leads to.
-   One page in fifty shows another page in a frame, always one of the same few; one in fifty is a redirect or an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from perco.webindex.pages import Page

SYNTHETIC_URL = "https://h{host}.synthetic.invalid/p{page}"

_SKEW = 0.6  # how unequally pages are linked to; 0: all alike; towards 1: one page has all links
_LINKS_MEDIAN, _LINKS_SIGMA, _LINKS_MAX = 6.0, 0.9, 100  # the number of links from a page, log-normal
_AT_HOME = 0.5  # the share of links that lead to a page with a near number
_COPIES, _COPIES_SKEW = 0.3, 0.7  # the share of pages that are copies, and how unequal the sizes of clusters are
_WORDS = 60  # the median number of words on a page
_VOCABULARY = 20_000  # how many words there are
_FRAMED, _BROKEN = 0.02, 0.02  # the share of pages that show another page, and that of redirects and errors
_FRAMES = 20  # how many pages are shown by others
_HOST_PAGES = 40  # the number of pages of a host, on average


class SyntheticWeb:
    """A synthetic web of `pages` pages, made from `seed`."""

    pages: int
    seed: int
    hosts: int

    def __init__(self, pages: int, seed: int = 0) -> None:
        self.pages, self.seed = pages, seed
        self.hosts = max(1, pages // _HOST_PAGES)

    def __iter__(self) -> Iterator[Page]:
        """All pages, in an order that does not depend on how popular they are."""
        order = list(range(self.pages))
        Random(f"{self.seed}/order").shuffle(order)
        return map(self.page, order)

    def url(self, number: int) -> str:
        """The URL of a page. Its host depends on the seed, its number and the number of pages; host 0 is largest."""
        rng = Random(f"{self.seed}/host/{number}")
        return SYNTHETIC_URL.format(host=_skewed(rng, self.hosts, 0.5), page=number)

    def original(self, number: int) -> int:
        """The number of the page that a page is a copy of; for most pages, its own number."""
        rng = Random(f"{self.seed}/copy/{number}")
        if rng.random() >= _COPIES:
            return number
        copied = _skewed(rng, self.pages, _COPIES_SKEW)
        # The number of a page's copies must not depend on the number of links to it.
        return (copied * 7919 + self.seed) % self.pages

    def page(self, number: int) -> Page:
        """A page as a crawl would deliver it."""
        rng = Random(f"{self.seed}/page/{number}")
        url = self.url(number)
        kind = rng.random()
        if kind < _BROKEN / 2:
            return Page(url, status=301, location=self.url(_skewed(rng, self.pages, _SKEW)))
        if kind < _BROKEN:
            return Page(url, status=404, content_type="text/html", body=b"<title>Not found</title>")
        body = self._body(self.original(number))
        return Page(url, content_type="text/html", charset="utf-8", body=body.encode())

    def title(self, number: int) -> str:
        rng = Random(f"{self.seed}/title/{number}")
        return " ".join(self._word(rng) for _ in range(rng.randint(2, 6)))

    def _body(self, number: int) -> str:
        rng = Random(f"{self.seed}/body/{number}")
        words = [self._word(rng) for _ in range(1 + int(_WORDS * rng.lognormvariate(0, 0.6)))]
        links = []
        for _ in range(min(int(_LINKS_MEDIAN * rng.lognormvariate(0, _LINKS_SIGMA)), _LINKS_MAX)):
            target = self._target(rng, number)
            text = self.title(target) if rng.random() < 0.7 else self._word(rng)
            links.append(f'<a href="{self.url(target)}">{text}</a>')
        frame = ""
        if rng.random() < _FRAMED and number >= _FRAMES:
            frame = f'<iframe src="{self.url(rng.randrange(min(_FRAMES, self.pages)))}"></iframe>'
        return (
            f"<html><head><title>{self.title(number)}</title></head><body>{frame}<p>{' '.join(words)}</p>"
            f"{' '.join(links)}</body></html>"
        )

    def _target(self, rng: Random, number: int) -> int:
        if rng.random() < _AT_HOME:
            near = number + int(rng.lognormvariate(0, 1.5)) * rng.choice((-1, 1))
            return near % self.pages
        return _skewed(rng, self.pages, _SKEW)

    def _word(self, rng: Random) -> str:
        return f"w{_skewed(rng, _VOCABULARY, 0.75)}"


def _skewed(rng: Random, count: int, skew: float) -> int:
    """A random number below `count`: k with a probability in proportion to (k + 1) ** -skew, 0 <= skew < 1."""
    return min(int(count * rng.random() ** (1.0 / (1.0 - skew))), count - 1)
