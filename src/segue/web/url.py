"""Where does a URL lead, and is that a place of the public internet?

In: the text of a URL, or an address. Out: a `Target` with every part that a connection needs, or an error. This is the
only parser of URLs from outside: what it does not understand is refused, never repaired, because two parsers that
disagree are how such checks are bypassed (docs/inside/hazards.md T10). Nothing is looked up here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Literal
from urllib.parse import quote, urljoin

from msgspec import Struct

from segue.errors import InvalidRequest

Address = IPv4Address | IPv6Address

# No page has a longer URL.
URL_CHARS_MAX = 4_096
# How much of a URL an error shows.
SHOWN_CHARS_MAX = 200

_URL = re.compile(
    r"(?P<scheme>[hH][tT][tT][pP][sS]?)://"
    r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<name>[0-9A-Za-z.-]+))"
    r"(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<path>/[^?#]*)?(?P<query>\?[^#]*)?(?:#.*)?",
    re.ASCII | re.DOTALL,
)
# A backslash is a slash to some; white space and control characters are dropped by others; a lone surrogate cannot be
# sent at all.
_NEVER = re.compile(r"[\\\s\x00-\x20\x7f-\xa0\u2028\u2029\ufeff\ud800-\udfff]")
_LABEL = re.compile(r"(?!-)[0-9a-z-]{1,63}(?<!-)", re.ASCII)
# What stands as itself in a path or query; the rest is written as UTF-8 in percents.
_PLAIN = "/?:@!$&'()*+,;=-._~%"
DEFAULT_PORTS = {"http": 80, "https": 443}

# Names that are looked up on this machine or in this network, whatever they lead to.
_PRIVATE_WORDS = """
    localhost localdomain local internal intranet private corp home lan home.arpa svc consul localnet in-addr.arpa
    ip6.arpa test invalid example onion alt
"""
PRIVATE_NAMES = tuple(_PRIVATE_WORDS.split())

# Not for the public, by the registries of special addresses; written out, because what the standard library counts as
# global has changed from release to release.
PRIVATE_V4 = tuple(
    IPv4Network(text)
    for texts in (
        "0.0.0.0/8 10.0.0.0/8 127.0.0.0/8 172.16.0.0/12 192.168.0.0/16",  # this network
        "100.64.0.0/10",  # carriers' NAT; one cloud's metadata
        "168.63.129.16/32",  # public by number, but one cloud's host service
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "192.0.0.0/24",  # assignments of protocols; one cloud's metadata
        "192.88.99.0/24",  # relays of 6to4
        "192.0.2.0/24 198.51.100.0/24 203.0.113.0/24",  # documentation
        "198.18.0.0/15 224.0.0.0/4 240.0.0.0/4",  # benchmarks, multicast, reserved
    )
    for text in texts.split()
)
# Everything global is in here. Mapped, compatible and translated addresses (::ffff:0:0/96, 64:ff9b::/96, …), unique
# local, link-local, site-local and multicast ones are all outside.
GLOBAL_V6 = IPv6Network("2000::/3")
# Assignments of protocols (Teredo, benchmarking, ORCHID, …); documentation; 6to4, with an IPv4 address inside;
# documentation again.
PRIVATE_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
# ISATAP: the lower half of the address is one of these words and an IPv4 address.
_ISATAP = (0x00005EFE, 0x02005EFE)


class Target(Struct, frozen=True):
    """A URL, taken apart. `host` is a name in lower case, or an address without brackets."""

    scheme: Literal["http", "https"]
    host: str
    port: int
    path: str
    query: str

    @property
    def address(self) -> Address | None:
        """The address, where the host is one."""
        return _address(self.host)

    @property
    def origin(self) -> tuple[str, str, int]:
        """What must be equal for credentials to go along."""
        return self.scheme, self.host, self.port

    @property
    def url(self) -> str:
        """The URL as it is sent and shown."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == DEFAULT_PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}{self.path}{'?' if self.query else ''}{self.query}"


def refused(url: str, why: str) -> InvalidRequest:
    """The error for a URL that is not requested at all."""
    return InvalidRequest(f"The URL {shown(url)} is refused: {why}", code="url_refused")


def failed(url: str, why: str) -> InvalidRequest:
    """The error for a URL that was requested without a result."""
    return InvalidRequest(f"The URL {shown(url)} could not be read: {why}", code="url_failed")


def shown(url: str) -> str:
    """A URL as an error may show it: neither endless nor unreadable, and never with a password."""
    bare = re.sub(r"//[^/@]*@", "//…@", url[:SHOWN_CHARS_MAX])
    return f"'{''.join(char if char.isprintable() else '�' for char in bare)}'"


def parse(url: str) -> Target:
    """The target of a URL of http or https; everything unusual is refused."""
    if len(url) > URL_CHARS_MAX:
        raise refused(url, f"it is longer than {URL_CHARS_MAX} characters.")
    parsed = None if _NEVER.search(url) else _URL.fullmatch(url)
    if parsed is None:
        raise refused(url, "it is not a plain http or https URL without user and password.")
    scheme: Literal["http", "https"] = "https" if len(parsed["scheme"]) == 5 else "http"
    host = _host(url, parsed["name"], parsed["six"])
    port = int(parsed["port"]) if parsed["port"] else DEFAULT_PORTS[scheme]
    if not 0 < port < 65_536:
        raise refused(url, "its port is not between 1 and 65535.")
    query = quote((parsed["query"] or "?")[1:], safe=_PLAIN)
    return Target(scheme, host, port, quote(parsed["path"] or "/", safe=_PLAIN), query)


def parse_next(before: Target, location: str) -> Target:
    """The target of a redirect, which may be relative to the page before.

    What begins like a scheme is whole or wrong: `http:host` is a path to some and a host to others.
    """
    if location.startswith("//"):
        return parse(f"{before.scheme}:{location}")
    if _NEVER.search(location) or re.match(r"[^/?#]*:", location):
        return parse(location)
    return parse(urljoin(before.url, location))


def _host(url: str, name: str | None, six: str | None) -> str:
    if six is not None:
        address = _address(six)
        if not isinstance(address, IPv6Address):
            raise refused(url, "its address cannot be read.")
        return str(address)
    host = (name or "").lower().removesuffix(".")
    labels = host.split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise refused(url, "its host cannot be read.")
    # What ends in a number is an address to the code that connects: in decimal, in hex, in octal, with parts left out.
    # Only the form that all parsers read alike is accepted.
    is_number = re.fullmatch(r"[0-9]+|0x[0-9a-f]*", labels[-1])
    if is_number and not isinstance(_address(host), IPv4Address):
        raise refused(url, "its address is not written as four decimal numbers.")
    return host


def _address(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_public(address: Address) -> bool:
    """Whether this is an address of the public internet, and does not stand for another address."""
    if isinstance(address, IPv4Address):
        return address.is_global and not any(address in network for network in PRIVATE_V4)
    if address.scope_id or address not in GLOBAL_V6 or not address.is_global:
        return False
    has_v4_inside = (int(address) >> 32) & 0xFFFFFFFF in _ISATAP
    return not has_v4_inside and not any(address in network for network in PRIVATE_V6)


def is_public_name(host: str) -> bool:
    """Whether a name can be of the public internet; a name without a dot is of this network."""
    return "." in host and not is_within(host, PRIVATE_NAMES)


def is_within(host: str, domains: Iterable[str]) -> bool:
    """Whether the host is one of these domains or below one of them."""
    bare = [domain.lower().strip().removeprefix("*.").strip(".") for domain in domains]
    return any(host == domain or (domain and host.endswith("." + domain)) for domain in bare)
