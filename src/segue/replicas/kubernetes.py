"""Which pods of a Kubernetes service are ready? Asks the API server of the cluster for the service's EndpointSlices.

The service account of the pod needs the right to list them (deploy/kubernetes/discovery.yaml). The token is read each
time, because Kubernetes renews it.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import ssl
from http import HTTPStatus
from pathlib import Path
from urllib.parse import SplitResult, urlencode

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured

ANSWER_S = 5.0
ANSWER_BYTES_MAX = 16 * 1024 * 1024
MANIFEST = "deploy/kubernetes/discovery.yaml"


class LookupFailed(Exception):
    """The replicas of an engine could not be looked up now; later that may succeed."""


class EndpointConditions(Struct, frozen=True):
    """Whether a pod takes requests."""

    # Missing means ready, as Kubernetes defines it.
    ready: bool | None = None


class Endpoint(Struct, frozen=True):
    """A pod."""

    addresses: list[str]
    conditions: EndpointConditions = EndpointConditions()


class EndpointPort(Struct, frozen=True):
    """A port of the pods of a slice."""

    name: str | None = None
    port: int | None = None


class EndpointSlice(Struct, frozen=True):
    """Some of the pods of a service, with the same ports."""

    endpoints: list[Endpoint] | None = None
    ports: list[EndpointPort] | None = None


class EndpointSliceList(Struct, frozen=True):
    """The answer of the API server, as far as it is read."""

    items: list[EndpointSlice]


_slices = msgspec.json.Decoder(EndpointSliceList).decode


def ready_endpoints(service: SplitResult, account: str) -> list[tuple[str, int]]:
    """Address and port of each pod of a service that is ready; `account` is the folder of the service account.

    A service is called as in the cluster's DNS: NAME, NAME.NAMESPACE or longer. Its port is the pods' own; it may be
    any where they have only one.
    """
    host = os.environ.get("KUBERNETES_SERVICE_HOST")
    if not host:
        raise Misconfigured(
            "engine_discovery: 'kubernetes' works only in a pod: KUBERNETES_SERVICE_HOST is not set. Elsewhere name "
            "the engines with engine_url, or use 'dns'."
        )
    name, _, rest = (service.hostname or "").partition(".")
    namespace = rest.partition(".")[0] or _read(account, "namespace")
    selector = urlencode({"labelSelector": f"kubernetes.io/service-name={name}"})
    path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?{selector}"
    status, body = _ask(host, path, account)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise Misconfigured(
            f"engine_discovery: Kubernetes does not let this pod list the endpointslices of namespace {namespace} "
            f"(status {status}). Apply {MANIFEST}, and set serviceAccountName and automountServiceAccountToken."
        )
    if status != HTTPStatus.OK:
        raise LookupFailed(f"the Kubernetes API answered with status {status}")
    try:
        slices = _slices(body).items
    except msgspec.MsgspecError as error:
        raise LookupFailed(f"the answer of the Kubernetes API cannot be read: {error}") from None
    found: list[tuple[str, int]] = []
    for endpoint_slice in slices:
        ready = [
            each for each in endpoint_slice.endpoints or () if each.conditions.ready is not False
        ]
        addresses = [address for each in ready for address in each.addresses]
        if addresses:
            port = _port(service, endpoint_slice.ports or [])
            found += [(address, port) for address in addresses if _is_address(address)]
    return found


def _port(service: SplitResult, ports: list[EndpointPort]) -> int:
    numbers = [port.port for port in ports if port.port is not None]
    if service.port in numbers or (not numbers and service.port):
        return service.port or 0
    if len(numbers) == 1:
        return numbers[0]
    listed = ", ".join(f"{port.port} ({port.name})" for port in ports) or "none"
    raise Misconfigured(
        f"engine_url: name one of the pods' ports of {service.hostname}, which are: {listed}."
    )


def _is_address(text: str) -> bool:
    """A slice of the type FQDN has names."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _ask(host: str, path: str, account: str) -> tuple[int, bytes]:
    port = int(os.environ.get("KUBERNETES_SERVICE_PORT") or 443)
    headers = {"authorization": f"Bearer {_read(account, 'token')}", "accept": "application/json"}
    try:
        trust = ssl.create_default_context(cafile=Path(account, "ca.crt"))
    except OSError as error:
        raise _unreadable(Path(account, "ca.crt"), error) from None
    connection = http.client.HTTPSConnection(host, port, context=trust, timeout=ANSWER_S)
    try:
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, response.read(ANSWER_BYTES_MAX)
    except (OSError, http.client.HTTPException) as error:
        words = f"the Kubernetes API at {host}:{port} cannot be reached: {error}"
        raise LookupFailed(words) from None
    finally:
        connection.close()


def _read(account: str, name: str) -> str:
    path = Path(account, name)
    try:
        return path.read_text("ascii").strip()
    except OSError as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: OSError) -> Misconfigured:
    return Misconfigured(
        f"kubernetes_account: {path} cannot be read: {error.strerror or error}. The pod needs a service account: "
        f"apply {MANIFEST}, and set serviceAccountName and automountServiceAccountToken."
    )
