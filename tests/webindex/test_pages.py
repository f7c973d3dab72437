"""Reading a page: any page at all gives a title, a text and links, always the same, and never an exception."""

import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st
from selectolax.lexbor import LexborHTMLParser

from perco.webindex.pages import (
    URL_BYTES_MAX,
    Page,
    ParseLimits,
    canonical_url,
    indexable,
    pack,
    parse,
    unpack,
)

HERE = "https://here.example/dir/page"


def html(body: str, **fields: object) -> Page:
    plain = Page(HERE, 200, "text/html", "utf-8", body.encode())
    return replace(plain, **fields)  # type: ignore[arg-type]


def links(body: str, **fields: object) -> dict[str, str]:
    return dict(parse(html(body, **fields)).links)


# ------------------------------------------------------------------------------------------- canonical URLs


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("HTTPS://Here.EXAMPLE", "https://here.example/"),
        ("http://here.example:80/a", "http://here.example/a"),
        ("https://here.example:443/a", "https://here.example/a"),
        ("https://here.example:80/a", "https://here.example:80/a"),
        ("https://here.example/a/./b/../c", "https://here.example/a/c"),
        ("https://here.example/%7euser/%e4 b", "https://here.example/~user/%E4%20b"),
        ("https://here.example/a?b=2&a=1#part", "https://here.example/a?a=1&b=2"),
        ("https://name:secret@here.example/a", "https://here.example/a"),
        ("https://bücher.example/straße", "https://xn--bcher-kva.example/stra%C3%9Fe"),
        ("  https://here.ex\nample/a\t ", "https://here.example/a"),
        ("https://[::1]:443/a", "https://[::1]/a"),
        ("file:///a/../b", "file:///b"),
        ("file://localhost/b", "file:///b"),
    ],
)
def test_one_resource_has_one_spelling(written: str, canonical: str) -> None:
    assert canonical_url(written) == canonical


@pytest.mark.parametrize(
    "written",
    [
        "",
        "page",
        "//here.example/a",
        "mailto:a@here.example",
        "data:text/html,<a href=x>",
        "javascript:void(0)",
        "ftp://here.example/a",
        "https:///a",
        "https://he re.example/",
        "https://here..example/",
        "https://here.example:99999/",
        "https://[::1/",
        "https://here.example/\ud800",
        "file://elsewhere/a",
        "data:" + "a" * 1_000_000,
    ],
)
def test_what_cannot_be_a_row_has_no_canonical_url(written: str) -> None:
    assert canonical_url(written) is None


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("other", "https://here.example/dir/other"),
        ("../other", "https://here.example/other"),
        ("/other", "https://here.example/other"),
        ("//there.example", "https://there.example/"),
        ("?a=1", "https://here.example/dir/page?a=1"),
        ("#part", HERE),
        ("", HERE),
    ],
)
def test_a_relative_link_is_resolved_against_its_page(written: str, canonical: str) -> None:
    assert canonical_url(written, HERE) == canonical


def test_a_url_may_be_as_long_as_a_key_and_no_longer() -> None:
    longest = "https://here.example/" + "a" * (URL_BYTES_MAX - len("https://here.example/"))
    assert canonical_url(longest) == longest
    assert canonical_url(longest + "a") is None
    assert canonical_url("https://here.example/" + "é" * 70) is None  # six bytes each


URL_SHREDS = (
    "http:// https:// HTTP: file:/// // / .. . %2e %zz % ? # & = ; a é ß xn-- xn--a @ : :80 :443 [ ] ::1 \\ \t \0 "
    "host.example host - _ ~ + %20 %C3%A9 %c3%28 ' \" < | ^ \u3002 \u200b \u212a"
)
FRAGMENTS = st.sampled_from(URL_SHREDS.split(" "))
URLS = st.lists(FRAGMENTS | st.just("\ud800"), max_size=12).map("".join) | st.text(max_size=40)


@given(URLS, st.none() | URLS)
def test_any_text_has_a_canonical_url_that_is_its_own_or_none(written: str, base: str | None) -> None:
    canonical = canonical_url(written, base)
    if canonical is not None:
        assert canonical.isascii()
        assert len(canonical) <= URL_BYTES_MAX
        assert canonical_url(canonical) == canonical
        assert canonical_url(canonical, "https://other.example/x") == canonical


# ------------------------------------------------------------------------------------------- packing

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
PAGES = st.builds(
    Page,
    url=TEXTS,
    status=st.integers(0, 999),
    content_type=st.none() | TEXTS | st.sampled_from(["text/html", "text/plain", "text/html; charset=utf-16"]),
    charset=st.none() | TEXTS | st.sampled_from(["utf-8", "latin-1", "utf-16", "hz", "zlib", "punycode", "\0"]),
    body=st.binary(max_size=200),
    location=st.none() | TEXTS,
)


@given(PAGES)
def test_a_page_comes_out_as_it_was_packed(page: Page) -> None:
    assert unpack(pack(page)) == page


@given(st.binary(max_size=60))
def test_what_is_not_a_packed_page_is_a_value_error(packed: bytes) -> None:
    with pytest.raises(ValueError, match="not a packed page"):
        unpack(packed)


def test_a_packed_page_has_the_types_of_a_page() -> None:
    wrong = pack(replace(html("x"), status="200"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="status is str"):
        unpack(wrong)


# ------------------------------------------------------------------------------------------- title and text


def test_title_and_text_are_what_is_shown() -> None:
    parsed = parse(
        html(
            "<!doctype html><title> A &amp;\n B </title><style>p {}</style><script>if (a<b) 'x'</script>"
            "<!-- <p>hidden --><h1>One</h1><p>t<b>w</b>o&nbsp;three<br>four<table><tr><td>five<td>six</table>"
            "<img src=x alt=seven><textarea><b>eight</textarea> 1 < 2 &lt; 3 &#x41;&#66;"
        )
    )
    assert parsed.title == "A & B"
    assert parsed.text == "One two three four five six seven <b>eight 1 < 2 < 3 AB"


@pytest.mark.parametrize(
    "body",
    [
        "a<p",
        "a<p class='",
        "a<!-- b",
        "a<script>b",
        "a<style>b</styl>",
        "a<p title='>b</p>",
        "a</",
        "a<!",
        "a<a href=x",
    ],
)
def test_markup_that_never_ends_hides_the_rest_of_the_page(body: str) -> None:
    assert parse(html(body)).text in ("a", "a <", "a</")


def test_the_first_title_counts_and_a_missing_one_is_empty() -> None:
    assert parse(html("<title>a</title><svg><title>b</title></svg>")).title == "a"
    assert parse(html("<p>a")).title == ""


def test_plain_text_is_not_read_as_markup() -> None:
    parsed = parse(html("<a href=x>a</a>\n b", content_type="text/plain"))
    assert parsed.text == "<a href=x>a</a> b"
    assert parsed.links == ()


def test_what_is_cut_is_noted() -> None:
    limits = ParseLimits(title_chars_max=3, text_chars_max=5, anchor_chars_max=2)
    parsed = parse(html("<title>abcdef</title><a href=x>abcdef</a> ghi"), limits)
    assert (parsed.title, parsed.text) == ("abc", "abcde")
    assert parsed.links == (("https://here.example/dir/x", "ab"),)
    assert parsed.notes == ("text cut at 5 characters",)


# ------------------------------------------------------------------------------------------- kinds of pages


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", b""),
        ("TEXT/HTML; charset=utf-8", b"a"),
        ("application/xhtml+xml", b"<html/>"),
        ("text/plain", b"a"),
        (None, b"  <!-- a --><!DOCTYPE html>"),
        (None, b"\xef\xbb\xbf<html>"),
        (None, "\ufeff<html>".encode("utf-16-le")),
        ("", b"plain text"),
        ("application/octet-stream", b"<html>"),
    ],
)
def test_markup_and_text_become_documents(content_type: str | None, body: bytes) -> None:
    assert indexable(Page(HERE, 200, content_type, None, body))


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("image/png", b"<html>"),
        ("application/pdf", b"%PDF"),
        ("text/css", b"a {}"),
        ("application/octet-stream", b"plain text"),
        (None, b"\x89PNG\r\n\x1a\n\0\0"),
        (None, b""),
        (None, b"<!--" + b"--> <!--" * 100),
    ],
)
def test_other_content_has_neither_document_nor_text_nor_links(content_type: str | None, body: bytes) -> None:
    page = Page(HERE, 200, content_type, None, body)
    assert indexable(page) is (body.startswith(b"<!--"))
    assert parse(page).text in ("", "<!--" + "--> <!--" * 100)
    assert parse(page).links == ()


def test_an_error_page_says_nothing() -> None:
    page = html("<title>Not found</title><a href=/>home</a>", status=404)
    assert not indexable(page)
    assert parse(page).links == ()
    assert parse(page).title == parse(page).text == ""


def test_a_redirect_is_one_link_without_a_text() -> None:
    page = html("<a href=a>moved</a>", status=301, location="/new#part")
    assert not indexable(page)
    assert parse(page).links == (("https://here.example/new", ""),)
    assert parse(page).text == ""


def test_a_redirect_to_itself_or_to_nowhere_is_no_link() -> None:
    assert parse(html("", status=302, location="#part")).links == ()
    assert parse(html("", status=302, location="mailto:a@b.example")).links == ()
    assert parse(html("<a href=x>", status=304)).links == ()


# ------------------------------------------------------------------------------------------- charset

WORDS = "Grüße — žluťoučký"


@pytest.mark.parametrize(
    ("encoding", "charset", "content_type", "meta"),
    [
        ("utf-8", "utf-8", "text/html", ""),
        ("utf-8", None, "text/html", ""),
        ("utf-8", "latin-1", "text/html", ""),
        ("utf-8", "no-such-charset", "text/html", ""),
        ("utf-8", "zlib", "text/html", ""),
        ("utf-8", "utf-16", "text/html", ""),
        ("utf-8", None, "text/html", "<meta charset=utf-16>"),
        ("utf-8", "", "text/html; charset=us-ascii", ""),
        ("iso8859-2", "ISO-8859-2", "text/html", ""),
        ("iso8859-2", None, "text/html; charset=iso-8859-2", ""),
        ("iso8859-2", None, "text/html", "<meta charset='iso-8859-2'>"),
        ("iso8859-2", "utf-8", "text/html", "<meta charset='iso-8859-2'>"),
        ("utf-16", None, "text/html", ""),
        ("utf-16-le", "utf-16", "text/html", ""),
    ],
)
def test_the_text_is_right_whatever_the_headers_say(
    encoding: str, charset: str | None, content_type: str, meta: str
) -> None:
    words = WORDS.replace("—", "-")
    body = f"{meta}<p>{words}".encode(encoding)
    assert parse(Page(HERE, 200, content_type, charset, body)).text == words


def test_text_in_no_encoding_at_all_is_read_as_far_as_it_goes() -> None:
    parsed = parse(Page(HERE, 200, "text/html", "utf-8", b"<p>one \xff two"))
    assert parsed.text == "one \ufffd two"
    assert parsed.notes == ("not all of the body is utf-8",)


def test_an_unknown_charset_is_noted() -> None:
    assert parse(html("a", charset="klingon")).notes == ("charset 'klingon' is not known",)


def test_a_body_cut_inside_a_character_is_still_in_its_encoding() -> None:
    parsed = parse(html("é" * 10), ParseLimits(body_bytes_max=5))
    assert parsed.text == "éé"
    assert parsed.notes == ("body cut at 5 bytes",)


# ------------------------------------------------------------------------------------------- links


def test_links_have_absolute_targets_and_the_words_they_stand_on() -> None:
    assert links(
        "<a href='a'>one <b>t</b>wo</a> <A HREF=b>three<p>four</A><a href=c><img alt=five></a>"
        "<area href=d alt=six><a name=e>no link</a><a href=f>"
    ) == {
        "https://here.example/dir/a": "one two",
        "https://here.example/dir/b": "three four",
        "https://here.example/dir/c": "five",
        "https://here.example/dir/d": "six",
        "https://here.example/dir/f": "",
    }


def test_links_to_one_target_are_one_link_with_all_their_words() -> None:
    assert links("<a href=a>one</a><a href=./a#x>two</a><a href=a>one</a>") == {"https://here.example/dir/a": "one two"}


def test_a_link_to_the_page_itself_is_no_link() -> None:
    assert links("<a href=#top>a</a><a href=page>b</a><a href=''>c</a><a href='https://HERE.example/dir/page'>") == {}


def test_links_that_lead_to_no_page_are_left_out_and_counted() -> None:
    parsed = parse(
        html("<a href=mailto:a@b.example>a</a><a href=data:,b>b</a><a href='javascript:c()'>c</a><a href=d>")
    )
    assert [target for target, _ in parsed.links] == ["https://here.example/dir/d"]
    assert parsed.notes == ("3 links skipped: not a URL that can be indexed",)


def test_a_link_too_long_for_a_key_is_left_out_and_counted() -> None:
    parsed = parse(html(f"<a href={'a' * 500}>a</a>"))
    assert parsed.links == ()
    assert parsed.notes == ("1 links skipped: not a URL that can be indexed",)


def test_the_first_base_with_an_address_moves_all_links() -> None:
    body = "<a href=a>a</a><base target=x><base href='//there.example/x/'><base href='//no.example/'><a href=b>b</a>"
    assert links(body) == {"https://there.example/x/a": "a", "https://there.example/x/b": "b"}


def test_a_base_that_is_no_address_is_ignored() -> None:
    assert links("<base href='data:,x'><a href=a>a</a>") == {"https://here.example/dir/a": "a"}


def test_an_international_host_is_one_target_in_either_spelling() -> None:
    assert links("<a href='//bücher.example'>a</a><a href='//xn--bcher-kva.example/'>b</a>") == {
        "https://xn--bcher-kva.example/": "a b"
    }


def test_references_in_addresses_are_read_but_query_arguments_are_not_taken_for_them() -> None:
    assert links("<a href='?a=1&amp;copy=2&reg=3'>a</a>") == {HERE + "?a=1&copy=2&reg=3": "a"}


def test_of_a_hundred_thousand_links_the_first_are_taken() -> None:
    body = "".join(f"<a href={number}>{number}</a>" for number in range(100_000))
    parsed = parse(html(body), ParseLimits(links_max=10))
    assert [anchor for _, anchor in parsed.links] == [str(number) for number in range(10)]
    assert "links cut at 10" in parsed.notes
    assert "link elements cut at 20000" in parsed.notes


# ------------------------------------------------------------------------------------------- any page


@given(PAGES)
def test_any_page_can_be_read_and_what_comes_of_it_can_be_stored(page: Page) -> None:
    parsed = parse(page)
    assert parsed == parse(page)
    assert unpack(pack(replace(page, url=parsed.title, location=parsed.text)))


MARKUP_SHREDS = (
    "<a#href=/x> </a> <A#HREF='y'> <b> </b> <p <p> > < </ <!-- --> <!--> <! <? <title> </title> </TITLE# <script> "
    "</script> <\u017f <\u212a> = ' \" &amp; & &# &#x41; &#99999999; &#xD800; <base#href=//b.example/> <img#alt=q> "
    "<area#href=z> text \0 \x0b <td> / <textarea> é"
)
SHREDS = st.sampled_from(MARKUP_SHREDS.split(" ")).map(lambda shred: shred.replace("#", " "))


@given(st.lists(SHREDS, max_size=25).map("".join))
def test_any_markup_can_be_read(markup: str) -> None:
    parsed = parse(html(markup))
    assert len(parsed.text) <= len(markup)
    parsed.text.encode()
    parsed.title.encode()


WORD = st.sampled_from(["one", "two", "three", " ", "&amp;", "&lt;b&gt;", "é", "\n"])
LINK = st.builds("<a href='/{}'>{}</a>".format, st.integers(0, 5), st.lists(WORD, max_size=3).map("".join))
SILENT = st.sampled_from(["<!-- <a href=/9>x</a> -->", "<script>'<a href=/9>'</script>", "<br>", "<style>a</style>"])
MARKUP = st.recursive(
    WORD | LINK | SILENT,
    lambda inner: st.builds(
        "<{0} class=\"a>b\" title='<a href=/8>'>{1}</{0}>".format,
        st.sampled_from(["div", "section", "b", "span", "em", "ul", "code"]),
        st.lists(inner, max_size=4).map("".join),
    ),
    max_leaves=15,
)
INLINE = frozenset({"a", "b", "span", "em", "code"})


@given(MARKUP)
def test_sound_markup_is_read_as_a_browser_reads_it(markup: str) -> None:
    parsed = parse(html(f"<!doctype html><html><head><title>t</title></head><body>{markup}</body></html>"))
    tree = LexborHTMLParser(f"<!doctype html><body>{markup}</body>")
    tree.strip_tags(["script", "style"])
    anchors: dict[str, dict[str, None]] = {}
    for link in tree.css("a[href]"):
        target = f"https://here.example{link.attributes['href']}"
        anchors.setdefault(target, {}).setdefault(" ".join(link.text().split()))
    assert tree.body is not None
    for element in tree.body.css("*"):
        if element.tag not in INLINE | {"body"}:
            element.insert_before(" ")
            element.insert_after(" ")
    assert parsed.text == " ".join(tree.body.text().split())
    assert dict(parsed.links) == {target: " ".join(" ".join(texts).split()) for target, texts in anchors.items()}


@pytest.mark.parametrize(
    "piece",
    [
        "<div>",
        "<p><font color={}>x</p>",
        "<b>",
        "<",
        "<a ",
        '<a b="',
        "<!--",
        "<script>",
        "&",
        "&#123456789",
        "<a href={}>",
    ],
)
def test_a_hostile_page_takes_no_more_than_its_size(piece: str) -> None:
    """A tree builder needs gigabytes or hours for some of these."""
    page = html("".join(piece.format(number) for number in range(60_000)))
    tracemalloc.start()
    try:
        parse(page)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 * len(page.body)


def test_of_a_page_of_a_hundred_megabytes_only_the_beginning_is_held() -> None:
    page = Page(HERE, 200, "text/html", "utf-8", b"<p>word</p>" + bytes(100_000_000))
    limits = ParseLimits(body_bytes_max=100_000)
    tracemalloc.start()
    try:
        parsed = parse(page, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed.text == "word"
    assert parsed.notes == ("body cut at 100000 bytes",)
    assert peak < 20 * limits.body_bytes_max
