"""Claims about a ledger's URL as other hosts are given it."""

from __future__ import annotations

import pytest

from pipeline.ledger.url import without_credentials


@pytest.mark.parametrize(
    ("url", "given"),
    [
        ("redis://10.0.0.1:6379/0", "redis://10.0.0.1:6379/0"),
        ("rediss://:secret@ledger:6379/2", "rediss://ledger:6379/2"),
        ("rediss://ann:a/b@c@ledger:6379", "rediss://ledger:6379"),
        ("rediss://***@ledger:6379/0", "rediss://ledger:6379/0"),
        ("rediss://ledger/0?password=secret&username=ann&ssl_ca_certs=/here/ca.pem&db=3", "rediss://ledger/0?db=3"),
        ("redis+sentinel://:pw@a:1,b:2/service/0?token=/here/t", "redis+sentinel://a:1,b:2/service/0"),
    ],
)
def test_other_hosts_are_given_no_secret_and_no_path_of_this_host(url: str, given: str) -> None:
    assert without_credentials(url) == given
