"""Claims about URLs of object stores, which hold no credentials."""

from __future__ import annotations

import pytest

from pipeline.files.urls import check_url, is_url, scheme_of, without_store_credentials


@pytest.mark.parametrize("url", ["s3://bucket", "s3://bucket/run/a/", "gs://bucket/run", "file:///runs/away"])
def test_a_url_is_kept_without_its_last_slash(url: str) -> None:
    assert check_url(url) == url.rstrip("/")
    assert is_url(url)
    assert scheme_of(url) == url.partition(":")[0]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://key:secret@bucket/run", "credentials come from the environment"),
        ("s3://bucket/run?X-Amz-Signature=abc", "credentials come from the environment"),
        ("s3:///run", "no bucket"),
        ("abfs://bucket/run", "abfs:// is not the URL of an object store; expected s3://"),
        ("file://runs/away", "three slashes"),
        ("runs/away", "is not the URL of an object store"),
        ("s3://bucket::zip://a", "no bucket"),
    ],
)
def test_another_url_is_refused_in_a_sentence_that_does_not_repeat_it(url: str, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        check_url(url)
    assert "secret" not in str(refused.value)
    assert "Signature" not in str(refused.value)


def test_a_pattern_is_no_query() -> None:
    assert check_url("s3://bucket/train-?.jsonl") == "s3://bucket/train-?.jsonl"


def test_no_credential_of_a_store_stays_in_an_environment_under_any_name() -> None:
    secret = "wJalrXUtnFEMI-of-a-test"
    given = {
        "AWS_ACCESS_KEY_ID": "AKIA-of-a-test",
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_SESSION_TOKEN": "token-of-a-test",
        "GOOGLE_APPLICATION_CREDENTIALS": "/home/me/key.json",
        "FSSPEC_S3_SECRET": "other-of-a-test",
        "MY_COPY": f"aws:{secret}",
        "AWS_REGION": "eu-central-1",
        "OPENAI_API_KEY": "sk-of-a-test",
    }
    assert without_store_credentials(given) == {"AWS_REGION": "eu-central-1", "OPENAI_API_KEY": "sk-of-a-test"}
