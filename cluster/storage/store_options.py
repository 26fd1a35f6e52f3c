"""The options of a bucket's URL: which of them are the store's, and which are of the HTTP client below it.

obstore takes the two apart, and an option of the client among the store's is no error there but a panic: Rust prints a
backtrace before Python hears of it. So nothing gets there that is not known here. Names are those of obstore 0.12
(``S3Config``, ``GCSConfig``, ``AzureConfig``, ``ClientConfig``) and the aliases that object_store has for them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from urllib.parse import urlsplit


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_CLIENT = _names("""
allow_http allow_invalid_certificates connect_timeout default_content_type http1_only http2_keep_alive_interval
http2_keep_alive_timeout http2_keep_alive_while_idle http2_max_frame_size http2_only pool_idle_timeout
pool_max_idle_per_host proxy_ca_certificate proxy_excludes proxy_url randomize_addresses read_timeout timeout user_agent
""")
_STORE = {
    "s3": _names("""
access_key_id bucket bucket_name checksum_algorithm conditional_put container_authorization_token_file
container_credentials_full_uri container_credentials_relative_uri copy_if_not_exists default_region disable_bulk_delete
disable_tagging endpoint endpoint_url endpoint_url_sts imdsv1_fallback metadata_endpoint region request_payer role_arn
role_session_name s3_express secret_access_key server_side_encryption session_token skip_signature
sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id token unsigned_payload virtual_hosted_style_request
web_identity_token_file
"""),
    "gs": _names("""
application_credentials base_url bearer_token bucket bucket_name service_account service_account_key
service_account_path skip_signature
"""),
    "az": _names("""
access_key account_key account_name authority_host authority_id client_id client_secret container_name credential_type
disable_tagging encryption_key endpoint fabric_cluster_identifier fabric_session_token fabric_token_service_url
fabric_workload_host federated_token_file identity_endpoint master_key msi_endpoint msi_resource_id object_id sas_key
sas_token skip_signature tenant_id token use_azure_cli use_emulator use_fabric_endpoint
"""),
}
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?|[0-9a-f:.]*:[0-9a-f:.]*", re.ASCII)
"""A name, an IPv4 or an IPv6 address, as ``urlsplit`` gives it."""
_PREFIXES = {"s3": ("aws_",), "gs": ("google_",), "az": ("azure_storage_", "azure_")}
_OTHER_VARIABLES: dict[str, tuple[str, ...]] = {"s3": (), "gs": (), "az": ("IDENTITY_ENDPOINT",)}
"""Those that obstore reads without the prefix."""
_ADDRESSES = _names("""
authority_host base_url container_credentials_full_uri endpoint endpoint_url endpoint_url_sts identity_endpoint
metadata_endpoint msi_endpoint
""")


class StoreOptions(NamedTuple):
    store: dict[str, str]
    client: dict[str, str]


def sort_out(scheme: str, options: Iterable[tuple[str, str]]) -> StoreOptions:
    """Raises ``ValueError`` for an option that obstore does not know, that is given twice, or that is an address and
    does not read as one."""
    found = StoreOptions({}, {})
    for given, value in options:
        name = given.lower()
        plain = plain_name(scheme, name)
        if plain not in _CLIENT and plain not in _STORE[scheme]:
            near = difflib.get_close_matches(plain, [*_STORE[scheme], *_CLIENT], n=1)
            raise ValueError(f"unknown option {given!r}" + (f" (did you mean {near[0]}?)" if near else ""))
        if not value:
            raise ValueError(f"the option {given!r} is empty")
        if plain in _ADDRESSES:
            check_address(given, value)
        part, key = (found.client, plain) if plain in _CLIENT else (found.store, name)
        if any(plain_name(scheme, other) == plain for other in part):
            raise ValueError(f"the option {given!r} is given twice")
        part[key] = value
    return found


def check_address(name: str, value: str) -> None:
    """Raises ``ValueError`` unless it is a URL that obstore takes; on others it panics when it signs a request."""
    try:
        parts = urlsplit(value)
        port = parts.port  # raises ValueError itself beyond 65535
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.hostname or "") or port == 0:
        raise ValueError(f"{name}={value} is not an address such as http://127.0.0.1:9000")


def check_environment(scheme: str, environ: Mapping[str, str]) -> None:
    """Raises ``ValueError`` for a variable that obstore reads, and panics on: an address that is none, and a value
    with a line end or the like in it, as of a key that was pasted."""
    for name, value in environ.items():
        plain = plain_name(scheme, name.lower())
        if not value or name == name.lower() or (plain == name.lower() and name not in _OTHER_VARIABLES[scheme]):
            continue
        if plain in _STORE[scheme] or plain in _CLIENT:
            if not value.isprintable():
                raise ValueError(f"{name} has a line end or a control character in it")
            if plain in _ADDRESSES:
                check_address(name, value)


def plain_name(scheme: str, name: str) -> str:
    """An option's name without the store's prefix: ``aws_region`` is ``region``."""
    for prefix in _PREFIXES[scheme]:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name
