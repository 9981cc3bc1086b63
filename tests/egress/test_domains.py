"""Domains: what the operator may write, and how a request narrows it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from segue.egress.domains import allows, asked_domains, covers, normal, of_operator
from segue.errors import ApiError, Misconfigured

OPERATOR = ("github.com", "*.githubusercontent.com")
MAY = {"network"}


@pytest.mark.parametrize(
    "domain, host, is_allowed",
    [
        ("github.com", "github.com", True),
        ("github.com", "www.github.com", False),
        ("github.com", "evilgithub.com", False),
        ("*.github.com", "www.github.com", True),
        ("*.github.com", "a.b.github.com", True),
        ("*.github.com", "github.com", False),
        ("*.github.com", "evilgithub.com", False),
    ],
)
def test_domain_is_a_host_or_all_below_it(domain: str, host: str, is_allowed: bool) -> None:
    assert allows([domain], host) == is_allowed


@pytest.mark.parametrize(
    "name",
    [
        *("", "*", "*.", "*.*.org", "a.*.org", "org", "localhost", "a.localhost", "x.internal", "a_b.org"),
        *("127.0.0.1", "[::1]", "::1", "0x7f.1", "1.2", "a.0x7f", "a..b", "-a.org", "a-.org", "a.org."),
        *("https://a.org", "a.org:443", "a.org/x", "user@a.org", "a b.org", "a.org\n", "\u00e9.org", "a" * 64 + ".org"),
        ".".join(["a" * 60] * 5) + ".org",
    ],
)  # fmt: skip
def test_operator_names_public_hosts_only(name: str) -> None:
    assert normal(name) is None
    with pytest.raises(Misconfigured, match="environment_domains"):
        of_operator([name])


def test_operators_domains_are_compared_in_one_form() -> None:
    assert of_operator(["GitHub.com", "github.com", "*.A.example.com"]) == (
        "github.com",
        "*.a.example.com",
    )


labels = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
names = st.builds(lambda parts: ".".join([*parts, "com"]), st.lists(labels, min_size=1, max_size=3))
domains = st.builds(lambda wild, name: "*." * wild + name, st.booleans(), names)


@given(st.lists(domains, max_size=4), domains, names)
def test_what_is_covered_allows_no_more(outer: list[str], wanted: str, host: str) -> None:
    """A request that was let through reaches nothing that the operator does not allow."""
    if covers(outer, wanted) and allows([wanted], host):
        assert allows(outer, host)
    assert covers([wanted], wanted)


def policy(**fields: object) -> Raw:
    return Raw(msgspec.json.encode({"type": "allowlist", **fields}))


@pytest.mark.parametrize(
    "asked, expected",
    [
        (msgspec.UNSET, ()),
        (Raw(b"null"), ()),
        (policy(type="disabled"), ()),
        (policy(allowed_domains=["GitHub.com"]), ("github.com",)),
        (policy(allowed_domains=["a.githubusercontent.com"]), ("a.githubusercontent.com",)),
        (policy(allowed_domains=["*.a.githubusercontent.com"]), ("*.a.githubusercontent.com",)),
        (policy(allowed_domains=["*.githubusercontent.com"] * 2), ("*.githubusercontent.com",)),
    ],
)
def test_request_narrows_what_the_operator_allows(asked: object, expected: tuple[str, ...]) -> None:
    assert asked_domains(asked, "p", OPERATOR, MAY) == expected


@pytest.mark.parametrize(
    "asked, code, param",
    [
        (policy(allowed_domains=["github.com", "x.org"]), "domain_not_allowed", "[1]"),
        (policy(allowed_domains=["*.github.com"]), "domain_not_allowed", "[0]"),
        (policy(allowed_domains=["githubusercontent.com"]), "domain_not_allowed", "[0]"),
        (policy(allowed_domains=["*.com"]), "domain_not_allowed", "[0]"),
        (policy(allowed_domains=["1.2.3.4"]), "domain_not_allowed", "[0]"),
        (policy(allowed_domains=[]), "invalid_value", "allowed_domains"),
        (policy(), "invalid_value", "allowed_domains"),
        (policy(allowed_domains=["github.com"] * 101), "invalid_value", "allowed_domains"),
        (policy(allowed_domains=[1]), "invalid_value", "p"),
        (policy(type="all"), "invalid_value", "type"),
        (Raw(b"[]"), "invalid_value", "p"),
        (
            policy(allowed_domains=["github.com"], domain_secrets=[{"name": "K", "value": "v"}]),
            "unsupported_value",
            "domain_secrets",
        ),
    ],
)
def test_request_outside_it_is_refused_by_name(asked: Raw, code: str, param: str) -> None:
    with pytest.raises(ApiError) as refused:
        asked_domains(asked, "p", OPERATOR, MAY)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert (refused.value.param or "").endswith(param)
    if code == "domain_not_allowed":
        assert "github.com" in refused.value.message


def test_key_needs_the_scope() -> None:
    with pytest.raises(ApiError) as refused:
        asked_domains(policy(allowed_domains=["github.com"]), "p", OPERATOR, set())
    assert refused.value.status == 403
    assert asked_domains(policy(type="disabled"), "p", OPERATOR, set()) == ()
