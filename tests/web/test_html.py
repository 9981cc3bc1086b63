from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.web.html import (
    OPEN_CHARS_MAX,
    SLICE_BYTES,
    SLICE_CHARS,
    TEXT_CHARS_MAX,
    Link,
    read_page,
    tidied,
)

URL = "https://a.com/docs/page.html"
HTML = b"""<!doctype html><html><head><title>Rain &amp; snow
</title><style>p { color: red }</style><script>var secret = "<p>no</p>";</script></head>
<body><nav><a href="/">Home</a></nav><h1>Rain</h1><p>It <b>rains</b>
often.<br>Here.</p><ul><li>one<li>two</ul><template>unseen</template>
<p>See <a href="../next?x=1#part">the next page</a>, <a href="javascript:alert(1)">this</a>,
<a href="https://b.org/">that</a>.</p><pre>x = 1</pre></body></html>"""


def test_html_is_told_as_words() -> None:
    page = read_page(URL, HTML, "text/html")
    assert page is not None
    assert page.title == "Rain & snow"
    assert "# Rain" in page.text
    assert "It rains often.\nHere." in page.text
    assert "- one\n" in page.text
    for unseen in ("secret", "color", "unseen", "<"):
        assert unseen not in page.text
    assert page.links == (
        Link("https://a.com/", "Home"),
        Link("https://a.com/next?x=1", "the next page"),
        Link("https://b.org/", "that"),
    )


@pytest.mark.parametrize(
    "data, kind, charset, text",
    [
        ("<p>caf\xe9".encode("latin-1"), "text/html", "latin-1", "caf\xe9"),
        (b'<meta charset="iso-8859-1"><p>caf\xe9', "text/html", None, "caf\xe9"),
        ("<p>caf\xe9".encode(), "text/html", "no-such-charset", "caf\xe9"),
        (b"<p>caf\xe9", "text/html", None, "caf\ufffd"),
        (b"\xef\xbb\xbfplain", "text/plain", None, "plain"),
        (b"# Title\nwords", "text/markdown", None, "# Title\nwords"),
        (b"caf\xe9", "text/plain", "latin-1", "caf\xe9"),
        # No charset of the web. Python's own decoder takes twenty minutes for a page of 8 MB.
        (b"<p>rain-abc", "text/html", "punycode", "rain-abc"),
        (b"<p>+AGE-", "text/html", "utf-7", "+AGE-"),
    ],
)
def test_charset_is_the_one_that_was_said(
    data: bytes, kind: str, charset: str | None, text: str
) -> None:
    page = read_page("https://a.com/x", data, kind, charset)
    assert page is not None
    assert page.text.strip() == text


@pytest.mark.parametrize(
    "before, piece, after, seen",
    [
        ("<p>It rains.</p><img src='data:", "a", "'><p>It snows.</p>", "It rains.\n\nIt snows."),
        ("<p>It rains.</p><!--", "<p>", "--><p>It snows.</p>", "It rains.\n\nIt snows."),
        ("<p>It rains.</p><script>", "a", "</script><p>It snows.</p>", "It rains.\n\nIt snows."),
        ("<p>It rains.</p><style>", "</", "</style><p>It snows.</p>", "It rains.\n\nIt snows."),
        ("<p>It rains.</p><a", " b", "", "It rains."),
        ("", "&", " It rains.<p>", "&" * (3 * OPEN_CHARS_MAX) + " It rains."),
    ],
)
def test_what_stays_open_for_long_is_left_out(
    before: str, piece: str, after: str, seen: str
) -> None:
    """A picture inside of a page, a long comment, a long script: what follows it is read."""
    long = piece * (3 * OPEN_CHARS_MAX // len(piece))
    page = read_page(URL, (before + long + after).encode(), "text/html")
    assert page is not None
    assert page.text == seen


@pytest.mark.parametrize("quote", ["'", '"'])
def test_value_of_an_attribute_is_no_text_however_long(quote: str) -> None:
    """A picture that is written out inside of a page has tags of its own."""
    value = f"data:image/svg+xml,<svg>{'<path d=1> ' * OPEN_CHARS_MAX}</svg>"
    data = f"<p>It rains.<img alt=it's src={quote}{value}{quote} width=1>It snows."
    page = read_page(URL, data.encode(), "text/html")
    assert page is not None
    assert page.text == "It rains.It snows."


@pytest.mark.parametrize("charset", ["utf-8", "gb18030", "shift_jis", "koi8-r"])
@pytest.mark.parametrize("kind", ["text/html", "text/plain"])
def test_letters_between_two_slices_are_whole(charset: str, kind: str) -> None:
    text = "\u0431" * SLICE_BYTES
    page = read_page("https://a.com/x", f"a{text}".encode(charset), kind, charset)
    assert page is not None
    assert page.text == f"a{text}"


def test_page_that_is_no_text_in_its_end_is_no_page() -> None:
    long = b"a" * (TEXT_CHARS_MAX + SLICE_BYTES)
    assert read_page("https://a.com/x", long + b"\xff", "text/plain") is None


@given(st.text(" \t\n\xa0ab", max_size=60), st.integers(0, 4))
def test_white_space_is_the_same_wherever_slices_begin(text: str, moved: int) -> None:
    before = "x" * (SLICE_CHARS - len(text) // 2 + moved)
    assert tidied(before + text + "y") == before + tidied("x" + text + "y")[1:]


@pytest.mark.parametrize("data", [b"\x89PNG\0\0", b"%PDF-1.7 nonsense", b"\xff\xfe\xfa"])
def test_what_is_no_text_is_no_page(data: bytes) -> None:
    assert read_page("https://a.com/x", data) is None


@pytest.mark.parametrize(
    "name, data, title",
    [
        ("guide.md", b"intro\n\n## How to *start* ##\n", "How to *start*"),
        ("notes.txt", b"# not a title", "notes.txt"),
        ("bare.html", b"<p>no title", "bare.html"),
    ],
)
def test_title_is_found_or_is_the_name(name: str, data: bytes, title: str) -> None:
    page = read_page(f"file:///docs/{name}", data, name=name)
    assert page is not None
    assert page.title == title


@pytest.mark.parametrize(
    "piece",
    [
        "<![",
        "<!--",
        "<a ",
        "<p",
        "</",
        "&",
        "<a href='",
        "<div>",
        "<script>",
        "<title>",
        "<svg>",
        "<![CDATA[",
    ],
)
def test_odd_html_takes_no_time(piece: str) -> None:
    began = time.process_time()
    read_page(URL, (piece * (300_000 // len(piece))).encode(), "text/html")
    assert time.process_time() - began < 15


def test_long_text_is_cut() -> None:
    page = read_page("https://a.com/x", b"x" * (TEXT_CHARS_MAX + 1), "text/plain")
    assert page is not None
    assert len(page.text) == TEXT_CHARS_MAX


@given(st.binary(max_size=300), st.sampled_from(["text/html", "text/plain", ""]))
def test_any_bytes_can_be_looked_at(data: bytes, kind: str) -> None:
    read_page(URL, data, kind)
    read_page(URL, b"<html><p>" + data, "text/html", "utf-16")
