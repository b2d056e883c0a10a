"""Secrets in URLs are masked wherever URLs are shown."""

from __future__ import annotations

import pytest

from pipeline.ledger.url import hide_password


@pytest.mark.parametrize(
    "name",
    ["token", "key", "api_key", "apikey", "access_token", "X-Amz-Signature", "sig", "password", "auth", "AccessKey"],
)
@pytest.mark.parametrize("before", ["?", "?a=b&", "/path?a=b&c=d&", "#"])
def test_a_secret_in_a_query_is_masked(name: str, before: str) -> None:
    shown = hide_password(f"see https://host/x{before}{name}=s3cr3t&model=m, or http://b/?{name}=s3cr3t")
    assert "s3cr3t" not in shown and "model=m" in shown


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+sentinel", "unix"])
def test_the_token_file_of_a_ledgers_url_is_shown(scheme: str) -> None:
    url = f"{scheme}://host/0?token=/run/ledger.token&ssl_ca_certs=/ca.pem&ssl_keyfile=/key.pem"
    assert hide_password(url) == url
