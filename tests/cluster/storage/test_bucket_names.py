"""Which URLs a bucket can have."""

from __future__ import annotations

import pytest

from gpuctl.cluster.errors import BadInput
from gpuctl.cluster.storage.bucket_names import ENDPOINTS, parts_of


@pytest.fixture(autouse=True)
def clouds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "name",
    [
        *("s3://abc", "s3://a.b-c.1", f"s3://{'a' * 63}", "s3://my--bucket--usw2-az1--x-s3"),
        *("gs://a_b", "gs://1-1", f"gs://{'a' * 63}.{'b' * 63}.{'c' * 63}", "gs://a.1.1.1"),
        *("az://a-b-c", f"az://{'a' * 63}"),
    ],
)
def test_a_name_by_the_clouds_rules_is_taken(name: str) -> None:
    assert parts_of(f"{name}/prefix?region=x").netloc == name.partition("://")[2]


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            [
                *("s3://ab", f"s3://{'a' * 64}", "s3://Upper", "s3://a_b", "s3://a!b", "s3://a..b", "s3://.ab"),
                *("s3://ab-", "s3://192.168.5.4", "s3://bücket", "s3://a%20b", "s3://key:secret@bucket"),
            ],
            "S3 bucket name has 3 to 63 lower-case letters, digits, dashes and single dots, a letter or digit at",
        ),
        (
            [
                *("gs://ab", f"gs://{'a' * 64}", f"gs://{'a' * 64}.b", "gs://Upper", "gs://_ab", "gs://192.168.5.4"),
                *("gs://goog-data", "gs://my-google-data", "gs://" + ".".join(["a" * 60] * 4)),
            ],
            "Google Cloud bucket name has 3 to 63 lower-case letters, digits, dashes, underscores and dots",
        ),
        (
            [
                "az://ab",
                f"az://{'a' * 64}",
                "az://Upper",
                "az://a--b",
                "az://-ab",
                "az://ab-",
                "az://a.b",
                "az://$root",
            ],
            "an Azure container name has 3 to 63 lower-case letters, digits and single dashes",
        ),
    ],
    ids=["s3", "gs", "az"],
)
def test_a_name_that_cannot_be_is_refused_with_the_rule(names: list[str], said: str) -> None:
    for name in names:
        with pytest.raises(BadInput, match="has a name that no bucket can have") as caught:
            parts_of(f"{name}/prefix?secret_access_key=hidden")
        assert said in caught.value.hint
        assert "hidden" not in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("option", ["?endpoint=http://127.0.0.1:1", "?AWS_ENDPOINT_URL=http://127.0.0.1:1", ""])
def test_what_is_no_cloud_may_have_rules_of_its_own(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not option:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    assert parts_of(f"s3://B_1/p{option}").netloc == "B_1"
    with pytest.raises(BadInput, match="no bucket can have"):
        parts_of(f"s3://UPPER_case!/p{option}")


@pytest.mark.parametrize("path", ["/..", "/.", "/a/../b", "/a/%2e%2e/b", "/a%2F..", "//a", "/a//b", "/a/%2Fb", "/a//"])
def test_a_prefix_is_written_as_it_is(path: str) -> None:
    """Else two spellings of one prefix would be two to whoever compares them, and one to the store."""
    for bucket in ("s3://bucket", "gs://bucket", "az://box"):
        with pytest.raises(BadInput, match=r"has an empty part, .* in its prefix; write the prefix without it"):
            parts_of(f"{bucket}{path}")


@pytest.mark.parametrize("path", ["", "/", "/a", "/a/", "/a/b..c/.d", "/te%61m"])
def test_a_prefix_may_end_with_a_slash_and_have_dots(path: str) -> None:
    assert parts_of(f"s3://bucket{path}").path == path


def test_a_url_that_cannot_be_read_is_none() -> None:
    with pytest.raises(BadInput, match="is not a bucket URL"):
        parts_of("s3://[x")


@pytest.mark.parametrize("url", [" s3://bucket/p", "s3://bucket/p ", "file:///tmp/b\n", "s3://buck\tet/p"])
def test_a_space_at_an_end_or_a_control_character_is_refused(url: str) -> None:
    with pytest.raises(BadInput, match="has a space at an end or a control character in it"):
        parts_of(url)


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("az://data@lab.blob.core.windows.net/p", "az://CONTAINER/PREFIX?account_name=ACCOUNT"),
        ("az://lab.blob.core.windows.net/data", "az://CONTAINER/PREFIX?account_name=ACCOUNT"),
        ("s3://arn:aws:s3:us-east-1:123456789012:accesspoint/ap", "use its alias"),
    ],
)
def test_what_people_copy_in_place_of_a_bucket_is_told_apart(url: str, hint: str) -> None:
    with pytest.raises(BadInput) as caught:
        parts_of(url)
    assert hint in caught.value.hint
