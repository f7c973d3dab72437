"""Pages as a crawl delivers them, and the parts that an index needs: title, text and links.

Everything here is a pure function of its arguments, because the incremental index and the batch build that checks this
index must read a page in the same way.

Markup is read in one pass, as a stream of tags and text; no tree is built. lxml's parser calls `_Reader` for each tag
and each piece of text. (libxml2 2.14 and later split markup into tags and text as the HTML standard says.) A tree
builder that follows the standard takes quadratic time on deep nesting, and quadratic memory on formatting elements that
are left open: 250 KB of `<p><font color=..>` make more than a gigabyte of nodes. So one hostile page would stop a
worker. Finding the title, the text, the links and the base URL needs no tree. The tests compare this reader with a
browser's parser.
"""

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal
from urllib.parse import urljoin, urlsplit, urlunsplit

import msgpack
from lxml import etree
from w3lib.encoding import html_body_declared_encoding, http_content_type_encoding, read_bom, resolve_encoding
from w3lib.url import canonicalize_url

URL_BYTES_MAX = 400
"""The maximum length of a canonical URL, in bytes of UTF-8. A URL is part of a row key, and keys are short."""

URL_INPUT_CHARS_MAX = 8192
"""A longer link is skipped without being parsed; most such links are `data:` URLs that lack their scheme."""

HREFS_MAX = 20_000
"""The maximum number of link elements of a page that are looked at, including those that repeat a target."""

EMBEDDED_MAX = 20
"""The maximum number of distinct pages that are shown inside another page."""


@dataclass(frozen=True, slots=True)
class Page:
    """The answer to a request for `url`, as a crawl delivers it."""

    url: str
    status: int = 200
    content_type: str | None = None
    charset: str | None = None
    """From the headers: may be missing, unknown or wrong."""
    body: bytes = b""
    location: str | None = None
    """Where a redirect leads; may be relative to `url`."""


@dataclass(frozen=True, slots=True)
class ParseLimits:
    """How much of one page is read; `Parsed.notes` says what was cut off."""

    body_bytes_max: int = 4 * 1024 * 1024
    text_chars_max: int = 100_000
    title_chars_max: int = 300
    anchor_chars_max: int = 200
    """The maximum length of the joined anchor texts of all links from the page to one target."""
    links_max: int = 2_000
    """The maximum number of distinct targets."""
    url_bytes_max: int = URL_BYTES_MAX


DEFAULT_LIMITS = ParseLimits()


@dataclass(frozen=True, slots=True)
class Parsed:
    """The content of a page: the same page and limits always give the same value."""

    title: str = ""
    text: str = ""
    links: tuple[tuple[str, str], ...] = ()
    """(canonical target, anchor text), one per target, in the order of the page."""
    embedded: tuple[str, ...] = ()
    """Canonical URLs of the pages that are shown inside this one, in frames and objects."""
    notes: tuple[str, ...] = ()


# --------------------------------------------------------------------------------------------- packing


def pack(page: Page) -> bytes:
    """The page as one msgpack map."""
    return bytes(
        msgpack.packb(
            {
                "url": page.url,
                "status": page.status,
                "content_type": page.content_type,
                "charset": page.charset,
                "body": page.body,
                "location": page.location,
            }
        )
    )


def unpack(packed: bytes) -> Page:
    """The page that `pack` has packed; ValueError for any other bytes."""
    try:
        fields = msgpack.unpackb(packed)
    except (ValueError, msgpack.UnpackException) as error:
        raise ValueError(f"not a packed page: {error}") from error
    return page_of(fields)


_FIELD_TYPES: dict[str, tuple[type, ...]] = {
    "url": (str,),
    "status": (int,),
    "content_type": (str, type(None)),
    "charset": (str, type(None)),
    "body": (bytes,),
    "location": (str, type(None)),
}


def page_of(fields: object) -> Page:
    """The page in an unpacked map; ValueError if the map is not a page."""
    if not isinstance(fields, dict) or fields.keys() != _FIELD_TYPES.keys():
        raise ValueError("not a packed page: the fields are not those of a page")
    for name, types in _FIELD_TYPES.items():
        if not isinstance(fields[name], types) or isinstance(fields[name], bool):
            raise ValueError(f"not a packed page: {name} is {type(fields[name]).__name__}")
    return Page(**fields)


# --------------------------------------------------------------------------------------------- URLs

_PORTS = {"http": ":80", "https": ":443"}
_SCHEMES = frozenset({"http", "https", "file"})
_HOST = re.compile(r"(?:[a-z0-9_-]{1,63}(?:\.[a-z0-9_-]{1,63})*\.?|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
# A URL that is already canonical: no query, no escapes, no dot segments (`_is_plain`). Most links are such URLs, and
# are not passed to `_canonical`.
_PLAIN = re.compile(r"https?://[a-z0-9][a-z0-9-]{0,62}(?:\.[a-z0-9][a-z0-9-]{0,62})+/[A-Za-z0-9_~-][A-Za-z0-9._~/-]*")
_CONTROLS = "".join(map(chr, range(33)))
_NO_LINE_BREAKS = str.maketrans("", "", "\t\r\n")


def canonical_url(url: str, base: str | None = None, bytes_max: int = URL_BYTES_MAX) -> str | None:
    """The canonical form of an http, https or file URL; None for anything that cannot be the key of a row.

    The fragment, the default port and any user name are dropped, the host becomes lower-case ASCII, dot segments are
    resolved, escapes are normalised, and query arguments are sorted. The result is None for other schemes, for text
    that is not a URL, and for a URL of more than `bytes_max` bytes. It never raises.
    """
    if len(url) > URL_INPUT_CHARS_MAX:
        return None
    url = url.strip(_CONTROLS).translate(_NO_LINE_BREAKS)
    try:
        if base is not None:
            url = urljoin(base, url)
        canonical = url if _is_plain(url) else _canonical(url)
    except ValueError:
        # urllib and w3lib raise ValueError for bad ports, bad IPv6 addresses and text that has no UTF-8 form.
        return None
    if canonical is None or len(canonical) > bytes_max:
        return None
    return canonical


KEY_PART_BYTES_MAX = 180
"""So short that two URLs, or a URL and a hash, fit into one row key."""


def key_part(url: str) -> str:
    """A canonical URL as part of a row key: the URL itself or, if it is long, its beginning and a digest. To find the
    smallest of several URLs, compare their key parts."""
    if len(url) <= KEY_PART_BYTES_MAX:
        return url
    digest = hashlib.sha256(url.encode()).hexdigest()[:32]
    return f"{url[: KEY_PART_BYTES_MAX - len(digest) - 1]}#{digest}"  # no canonical URL has a "#"


def _is_plain(url: str) -> bool:
    return "/." not in url and _PLAIN.fullmatch(url) is not None


@lru_cache(maxsize=4096)
def _canonical(url: str) -> str | None:
    scheme, rest, path, query, _ = urlsplit(canonicalize_url(url))
    if scheme not in _SCHEMES or not path.startswith("/"):
        return None
    host = rest.rpartition("@")[2].removesuffix(_PORTS.get(scheme, ":"))
    if scheme == "file":
        if host not in ("", "localhost"):
            return None
        host, path = "", "/" + path.lstrip("/")
    elif _HOST.fullmatch(host) is None:
        return None
    canonical = urlunsplit((scheme, host, path, query, ""))
    return canonical if canonical.isascii() and canonical.isprintable() else None


# --------------------------------------------------------------------------------------------- kinds

Kind = Literal["html", "text", "other"]

_HTML_TYPES = frozenset({"text/html", "application/xhtml+xml"})
_UNSAID_TYPES = frozenset({"", "*/*", "unknown/unknown", "application/unknown", "application/octet-stream"})
_NOT_PROSE = frozenset({"text/css", "text/javascript", "text/ecmascript", "text/xml"})
_SNIFFED_BYTES = 512
_LOOKS_LIKE_HTML = re.compile(
    rb"\s*+(?><!--.*?-->\s*+|<\?xml[^>]*>\s*+)*+"
    rb"<(?:!doctype\s+html|(?:html|head|title|meta|body|script|style|table|div|p|a|h1|br|b)(?=[\s/>]))",
    re.IGNORECASE | re.DOTALL,
)
_BINARY = re.compile(rb"[\x00-\x08\x0b\x0e-\x1a\x1c-\x1f]")


def kind(page: Page) -> Kind:
    """Whether the body is markup, plain text or neither: by its headers or, if they do not say, by its first bytes."""
    named = (page.content_type or "").partition(";")[0].strip().lower()
    if named in _HTML_TYPES:
        return "html"
    if named.startswith("text/"):
        return "other" if named in _NOT_PROSE else "text"
    if named not in _UNSAID_TYPES:
        return "other"
    return _sniff(page.body[:_SNIFFED_BYTES], text_allowed=named != "application/octet-stream")


def _sniff(head: bytes, text_allowed: bool) -> Kind:
    encoding, mark = read_bom(head)
    if encoding is not None and mark is not None:
        head = head[len(mark) :].decode(encoding, "ignore").encode()
    if _LOOKS_LIKE_HTML.match(head) is not None:
        return "html"
    return "text" if text_allowed and head and _BINARY.search(head) is None else "other"


def is_redirect(page: Page) -> bool:
    return 300 <= page.status < 400 and page.location is not None


def indexable(page: Page) -> bool:
    """Whether the page itself becomes a document; a redirect or an error does not."""
    return 200 <= page.status < 300 and kind(page) != "other"


# --------------------------------------------------------------------------------------------- charset

# Python has more codecs than these; some of the others unpack archives or take quadratic time.
_ENCODINGS = frozenset(
    {"utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"}
    | {f"iso8859-{part}" for part in range(1, 17)}
    | {f"cp125{page}" for page in range(9)}
    | {"ascii", "cp437", "cp850", "cp852", "cp866", "cp874", "koi8-r", "koi8-u", "mac-roman", "mac-cyrillic"}
    | {"gb18030", "gbk", "gb2312", "hz", "big5", "big5hkscs", "euc_jp", "shift_jis", "cp932", "iso2022_jp"}
    | {"euc_kr", "cp949", "tis-620"}
)
# A body with a byte order mark is decoded as the mark says. Python's codecs of these names fail without a mark.
_WITHOUT_MARK = {"utf-16": "utf-16-le", "utf-32": "utf-32-le"}
# Encodings that servers claim without checking. Text that is valid UTF-8 is hardly ever in one of these.
_CARELESS = frozenset({"cp1252", "iso8859-1", "iso8859-15", "ascii"})
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]{0,39}")


def _known_encoding(label: str | None) -> str | None:
    if label is None or _LABEL.fullmatch(label.strip("\"' ")) is None:
        return None
    name = resolve_encoding(label.strip("\"' "))
    name = _WITHOUT_MARK.get(name or "", name)
    return name if name in _ENCODINGS else None


def _candidates(page: Page, body: bytes, markup: bool) -> Iterator[str]:
    """Encodings to try, the most likely first."""
    said = _known_encoding(page.charset) or _known_encoding(http_content_type_encoding(page.content_type))
    if said is not None and (not said.startswith(("utf-16", "utf-32")) or b"\0" in body):
        if said in _CARELESS:
            yield "utf-8"
        yield said
    if markup:
        declared = _known_encoding(html_body_declared_encoding(body))
        # Markup whose declaration can be read byte by byte cannot be in UTF-16.
        if declared is not None and not declared.startswith(("utf-16", "utf-32")):
            if declared in _CARELESS:
                yield "utf-8"
            yield declared
    yield "utf-8"


def _decode(page: Page, body: bytes, whole: bool, markup: bool) -> tuple[str, tuple[str, ...]]:
    """The text of the body, and notes if its charset is not known, or if not all of it could be decoded."""
    encoding, mark = read_bom(body)
    if encoding is not None and mark is not None:
        return body[len(mark) :].decode(encoding, "replace"), ()
    notes: tuple[str, ...] = ()
    if page.charset and _known_encoding(page.charset) is None:
        notes = (f"charset {page.charset[:40]!r} is not known",)
    first = None
    for encoding in _candidates(page, body, markup):
        first = first or encoding
        try:
            # A body that was cut may end inside a character.
            return codecs.getincrementaldecoder(encoding)("strict").decode(body, whole), notes
        except UnicodeError:
            continue  # the next candidate may fit
    likeliest = first or "utf-8"
    return body.decode(likeliest, "replace"), (*notes, f"not all of the body is {likeliest}")


# --------------------------------------------------------------------------------------------- markup

_INLINE = frozenset(
    (
        *("a", "abbr", "acronym", "b", "bdi", "bdo", "big", "cite", "code", "data", "del", "dfn", "em", "font", "i"),
        *("ins", "kbd", "label", "mark", "nobr", "q", "s", "samp", "small", "span", "strike", "strong", "sub"),
        *("sup", "time", "tt", "u", "var", "wbr"),
    )
)
_HIDDEN = frozenset({"script", "style", "iframe", "noembed", "noframes", "title"})
_EMBEDS = {"iframe": "src", "frame": "src", "embed": "src", "object": "data"}
_SILENT = _INLINE | _HIDDEN
_SEEN = frozenset({"a", "area", "base", "img", *_EMBEDS, *_HIDDEN})


def _tidy(text: str, chars_max: int) -> str:
    """The text with single spaces, and without NULs, because programs that store text often cut it at a NUL."""
    return " ".join(text.replace("\0", " ").split())[:chars_max].rstrip()


class _Reader:
    """The target of lxml's parser: collects the content of a page from the tags and the text that the parser finds."""

    title: str | None
    base: str | None

    def __init__(self) -> None:
        self.title = self.base = None
        self.pieces: list[str] = []
        self.hrefs: list[tuple[str, str]] = []
        self.embeds: list[str] = []
        self.hrefs_cut = False
        self._hidden: list[str] | None = None  # the text of an element that is not shown, while it is open
        self._open_href: str | None = None
        self._open_since = 0

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        """Handle a tag. An inline tag does not separate words (<b>o</b>ne is one word); other tags do (one<td>two)."""
        if tag not in _SILENT:
            self.pieces.append(" ")
        if tag in _SEEN:
            self._element(tag, attributes)

    def data(self, text: str) -> None:
        (self.pieces if self._hidden is None else self._hidden).append(text)

    def end(self, tag: str) -> None:
        if tag not in _SILENT:
            self.pieces.append(" ")
        if tag == "a":
            self._close_link()
        elif tag in _HIDDEN and self._hidden is not None:
            if tag == "title" and self.title is None:
                self.title = "".join(self._hidden)
            self._hidden = None

    def close(self) -> None:
        self._close_link()

    def _element(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag in _HIDDEN:
            self._hidden = []
        if tag in _EMBEDS:
            address = attributes.get(_EMBEDS[tag])
            if address and len(self.embeds) < HREFS_MAX:
                self.embeds.append(address)
        elif tag == "img":
            self.pieces.append(attributes.get("alt", "") + " ")
        elif tag == "base":
            if self.base is None:
                self.base = attributes.get("href")
        elif tag == "area":
            if "href" in attributes:
                self._add(attributes["href"], attributes.get("alt", ""))
        elif tag == "a":
            self._close_link()
            self._open_href = attributes.get("href")
            self._open_since = len(self.pieces)

    def _close_link(self) -> None:
        if self._open_href is not None:
            self._add(self._open_href, "".join(self.pieces[self._open_since :]))
            self._open_href = None

    def _add(self, href: str, anchor: str) -> None:
        if len(self.hrefs) < HREFS_MAX:
            self.hrefs.append((href, anchor))
        else:
            self.hrefs_cut = True


def _read(markup: str) -> _Reader:
    """Read markup, split into tags and text as the HTML standard says; no tree is built. A link ends where a table or a
    table cell begins: lxml closes the link there, as old browsers did."""
    reader = _Reader()
    parser = etree.HTMLParser(target=reader, huge_tree=True)
    parser.feed(markup.replace("\0", " "))
    parser.close()
    return reader


# --------------------------------------------------------------------------------------------- parse


def parse(page: Page, limits: ParseLimits = DEFAULT_LIMITS) -> Parsed:
    """Title, text and links of a page. A redirect has one link, without an anchor text; an error page has nothing."""
    if is_redirect(page):
        return _parse_redirect(page, limits)
    if not indexable(page):
        return Parsed()
    whole = len(page.body) <= limits.body_bytes_max
    body = page.body if whole else page.body[: limits.body_bytes_max]
    markup = kind(page) == "html"
    decoded, notes = _decode(page, body, whole, markup)
    if not whole:
        notes = (f"body cut at {limits.body_bytes_max} bytes", *notes)
    read = _parse_html if markup else _parse_text
    parsed = read(page, decoded, limits)
    return replace(parsed, notes=notes + parsed.notes)


def _parse_redirect(page: Page, limits: ParseLimits) -> Parsed:
    target = canonical_url(page.location or "", page.url, limits.url_bytes_max)
    if target is None:
        return Parsed(notes=("the redirect leads to no URL that can be indexed",))
    own = canonical_url(page.url, None, limits.url_bytes_max)
    return Parsed(links=() if target == own else ((target, ""),))


def _parse_text(page: Page, decoded: str, limits: ParseLimits) -> Parsed:
    text, notes = _bounded_text(decoded, limits)
    return Parsed(text=text, notes=notes)


def _parse_html(page: Page, decoded: str, limits: ParseLimits) -> Parsed:
    reader = _read(decoded)
    text, notes = _bounded_text("".join(reader.pieces), limits)
    resolve = _resolver(page, reader.base, limits)
    own = canonical_url(page.url, None, limits.url_bytes_max)
    links, link_notes = _links(resolve, own, reader, limits)
    inside = dict.fromkeys(url for url in map(resolve, reader.embeds) if url is not None and url != own)
    if len(inside) > EMBEDDED_MAX:
        notes = (*notes, f"embedded pages cut at {EMBEDDED_MAX}")
    title = _tidy(reader.title or "", limits.title_chars_max)
    return Parsed(title, text, links, tuple(inside)[:EMBEDDED_MAX], notes + link_notes)


def rendered(text: str, embedded: Iterable[str], limits: ParseLimits = DEFAULT_LIMITS) -> str:
    """The text of a page as a reader sees it: its own text, then the own texts of the pages in its frames."""
    return _tidy(" ".join((text, *embedded)), limits.text_chars_max)


def _bounded_text(text: str, limits: ParseLimits) -> tuple[str, tuple[str, ...]]:
    tidy = _tidy(text, len(text))
    if len(tidy) <= limits.text_chars_max:
        return tidy, ()
    return tidy[: limits.text_chars_max].rstrip(), (f"text cut at {limits.text_chars_max} characters",)


def _links(
    resolve: Callable[[str], str | None], own: str | None, reader: _Reader, limits: ParseLimits
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    anchors: dict[str, dict[str, None]] = {}
    unusable = 0
    cut = False
    for href, anchor in reader.hrefs:
        target = resolve(href)
        if target is None:
            unusable += 1
        elif target != own:
            if target not in anchors:
                if len(anchors) == limits.links_max:
                    cut = True
                    break
                anchors[target] = {}
            anchors[target].setdefault(_tidy(anchor, limits.anchor_chars_max))
    notes = []
    if reader.hrefs_cut:
        notes.append(f"link elements cut at {HREFS_MAX}")
    if cut:
        notes.append(f"links cut at {limits.links_max}")
    if unusable:
        notes.append(f"{unusable} links skipped: not a URL that can be indexed")
    joined = ((target, _tidy(" ".join(texts), limits.anchor_chars_max)) for target, texts in anchors.items())
    return tuple(joined), tuple(notes)


def _resolver(page: Page, base_href: str | None, limits: ParseLimits) -> Callable[[str], str | None]:
    base = page.url
    if base_href is not None:
        base = canonical_url(base_href, page.url) or page.url
    known: dict[str, str | None] = {}

    def resolve(href: str) -> str | None:
        if href not in known:
            known[href] = canonical_url(href, base, limits.url_bytes_max)
        return known[href]

    return resolve
