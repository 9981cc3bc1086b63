from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.web.html import OPEN_CHARS_MAX, TEXT_CHARS_MAX, Link, read_page

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
