"""What looks like a secret is not printed; what does not look like one is."""

import pytest

from runspec.redact import redacted


@pytest.mark.parametrize(
    "secret",
    [
        "hf_" + "aB3" * 10,
        "ghp_" + "x1" * 18,
        "github_pat_" + "a1" * 15,
        "glpat-" + "a1" * 10,
        "sk-proj-" + "a1" * 12,
        "AKIA" + "Z9" * 8,
        "xoxb-" + "1234567890-ab",
        "eyJhbGciOiJI.eyJzdWIiOiIx.abcdefghijk",
    ],
)
def test_tokens_are_replaced_wherever_they_stand(secret):
    for before, after in (("", ""), ("token=", "\n"), ('"', '"'), ("Bearer ", ", then")):
        assert redacted(f"{before}{secret}{after}", {}) == f"{before}<redacted>{after}"


def test_a_password_in_an_address_is_replaced_and_the_rest_is_not():
    told = redacted("cannot reach postgres://ann:s3cret@db:5432/x or http://db:80/a@b", {})
    assert told == "cannot reach postgres://<redacted>@db:5432/x or http://db:80/a@b"


@pytest.mark.parametrize(
    "text", ["hf_models", "task-force of 20 ranks", "sk-learn", "step 1/3 loss 2.5", "a: b@c"]
)
def test_ordinary_words_stay(text):
    assert redacted(text, {}) == text


def test_values_of_the_runs_own_secrets_are_named(tmp_path):
    (tmp_path / "key").write_text("from-the-file\n")
    own = f"A={tmp_path / 'key'}\nB=/nowhere\nSHORT=/nowhere"
    environ = {"COOKBOOK_SECRETS": own, "B": "from-the-variable", "SHORT": "a"}
    assert redacted("from-the-file, from-the-variable, a", environ) == "<A>, <B>, a"
