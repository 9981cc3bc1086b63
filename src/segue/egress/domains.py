"""Which domains may a container reach? What the operator allows, and the part of it that a request asks for.

A domain is the name of a host, or `*.` and a name for all hosts below it. Addresses are none. Pure: nothing is looked
up here; where a name leads is checked when it is connected to.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable

import msgspec
from msgspec import Raw, Struct

from segue.errors import Forbidden, InvalidRequest, Misconfigured
from segue.web.url import is_public_name

SCOPE = "network"
# More than any request needs; each connection is compared with all.
DOMAINS_MAX = 100
SHOWN_CHARS_MAX = 100

_label = r"(?!-)[a-z0-9-]{1,63}(?<!-)"
# The last part begins with a letter: what ends in a number is an address to some.
_name = re.compile(rf"(?:{_label}\.)+(?=[a-z]){_label}", re.ASCII)


class DomainSecret(Struct, frozen=True):
    """Refused; what is in it is not read."""


class NetworkPolicy(Struct, frozen=True):
    """What a request says of the network of its container."""

    type: str = "disabled"
    allowed_domains: list[str] | None = None
    domain_secrets: list[DomainSecret] | None = None


_policy = msgspec.json.Decoder(NetworkPolicy)


def normal(domain: str) -> str | None:
    """A domain in the one form in which domains are compared; None where it is none."""
    lower = domain.lower()
    name = lower.removeprefix("*.")
    is_name = len(name) <= 253 and _name.fullmatch(name)
    return lower if is_name and is_public_name(name) else None


def allows(domains: Iterable[str], host: str) -> bool:
    """Whether one of these domains is this host, or has it below it."""
    return any(
        host.endswith(domain[1:]) if domain.startswith("*.") else host == domain
        for domain in domains
    )


def covers(domains: Iterable[str], wanted: str) -> bool:
    """Whether everything that is wanted is within these domains."""
    if not wanted.startswith("*."):
        return allows(domains, wanted)
    wild = [domain[1:] for domain in domains if domain.startswith("*.")]
    return any(wanted[1:].endswith(domain) for domain in wild)


def of_operator(names: Iterable[str]) -> tuple[str, ...]:
    """The domains that the operator has set, checked."""
    found = []
    for name in names:
        domain = normal(name)
        if domain is None:
            raise Misconfigured(
                f"environment_domains: '{name}' is not a public host name. Write it as github.com, or as *.github.com "
                "for all hosts below it; addresses, ports, URLs and '*' are not allowed."
            )
        found.append(domain)
    return tuple(dict.fromkeys(found))


def asked_domains(
    policy: object, at: str, allowed: tuple[str, ...], may: Container[str]
) -> tuple[str, ...]:
    """The domains that a request asks for; none where its container has no network. Refused where the operator does not
    allow them all, or the key may not use the network."""
    if not isinstance(policy, Raw) or bytes(policy) == b"null":
        return ()
    try:
        asked = _policy.decode(policy)
    except msgspec.MsgspecError:
        raise _invalid(at, "an object with a type") from None
    if asked.type not in ("disabled", "allowlist"):
        raise _invalid(f"{at}.type", "'disabled' or 'allowlist'")
    if asked.domain_secrets:
        message = "This server has no secrets for domains: leave 'domain_secrets' out."
        raise InvalidRequest(message, code="unsupported_value", param=f"{at}.domain_secrets")
    if asked.type == "disabled":
        return ()
    if not 1 <= len(asked.allowed_domains or ()) <= DOMAINS_MAX:
        raise _invalid(f"{at}.allowed_domains", f"a list of 1 to {DOMAINS_MAX} domains")
    check_scope(may)
    return tuple(
        dict.fromkeys(
            _narrowed(name, f"{at}.allowed_domains[{index}]", allowed)
            for index, name in enumerate(asked.allowed_domains or ())
        )
    )


def check_scope(may: Container[str]) -> None:
    """Refuse a key that may not use the network."""
    if SCOPE not in may:
        message = f"This API key may not use the network: it has not the scope '{SCOPE}'."
        raise Forbidden(message)


def _narrowed(name: str, at: str, allowed: tuple[str, ...]) -> str:
    domain = normal(name)
    if domain is not None and covers(allowed, domain):
        return domain
    shown = "".join(char if char.isprintable() else "�" for char in name[:SHOWN_CHARS_MAX])
    why = "The operator of this server allows containers no network."
    if allowed:
        why = f"The operator of this server allows: {', '.join(allowed)}."
    message = f"The domain '{shown}' is not allowed. {why}"
    raise InvalidRequest(message, code="domain_not_allowed", param=at)


def _invalid(param: str, wanted: str) -> InvalidRequest:
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, code="invalid_value", param=param)
