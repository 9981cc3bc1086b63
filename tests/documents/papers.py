"""PDF files to read: written by hand, page by page."""

from __future__ import annotations

import zlib

# Some seconds of work for the parser, in two kilobytes, and less than a page may have.
TEDIOUS = b"BT /F1 12 Tf " + b"(a) Tj 1 0 0 1 5 5 Tm " * 40_000 + b"ET"


def pdf(*texts: str, title: str = "") -> bytes:
    """A document with these words on its pages."""
    return drawn(
        *(f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode() for text in texts), title=title
    )


def drawn(*streams: bytes, title: str = "") -> bytes:
    """A document with what these operators draw on its pages."""
    count = len(streams)
    kids = " ".join(f"{4 + 2 * number} 0 R" for number in range(count))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for number, stream in enumerate(streams):
        packed = zlib.compress(stream, 9)
        objects += [
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % (5 + 2 * number),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%b\nendstream" % (len(packed), packed),
        ]
    objects.append(f"<< /Title ({title}) >>".encode())
    data, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, 1):
        places.append(len(data))
        data += b"%d 0 obj\n%b\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    head = b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    tail = b"trailer << /Size %d /Root 1 0 R /Info %d 0 R >>\nstartxref\n%d\n%%%%EOF\n"
    return data + head + table + tail % (len(objects) + 1, len(objects), len(data))
