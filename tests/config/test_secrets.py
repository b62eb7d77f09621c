from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config import keys, resolved, secrets, values
from clusterrun.config.secrets import is_secret_name, is_secret_value, redacted, secret_assignments


@pytest.mark.parametrize("module", [keys, resolved, secrets, values])
def test_documented_examples_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]  # a module is what it takes
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "GITHUB_TOKEN", "AWS_SESSION_TOKEN", "hf_token"),
        *("WANDB_API_KEY", "OPENAI_APIKEY", "wandbApiKey", "AWS_ACCESS_KEY_ID", "SSH_KEY"),
        *("AWS_SECRET_ACCESS_KEY", "CLIENT_SECRET", "SECRETS", "DB_PASSWORD", "PGPASSWORD"),
        *("MYSQL_PWD", "GPG_PASSPHRASE", "GOOGLE_APPLICATION_CREDENTIALS", "HFToken"),
    ],
)
def test_a_name_of_a_secret_is_known(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("TOKENIZERS_PARALLELISM", "MAX_TOKENS", "PAD_TOKEN", "EOS_TOKEN_ID", "PWD", "OLDPWD"),
        *("NUM_KEY_VALUE_HEADS", "KEYBOARD", "MONKEY", "OMP_NUM_THREADS", "NCCL_DEBUG", "A", ""),
        *("PASS", "WANDB_PROJECT", "HF_HOME", "KEY", "SSH_AUTH_SOCK", "_"),
    ],
)
def test_a_name_of_training_is_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    "text",
    [
        "https://user:pa55@host/x",
        "hf_" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "sk-proj-" + "a1B2" * 9,
        "AKIA" + "ABCD" * 4,
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_a_known_form_of_secret_is_known_by_its_value(text: str) -> None:
    assert is_secret_value(text)


@pytest.mark.parametrize(
    "text",
    [
        "https://host:8080/a@b",
        "hf_transformers_cache_directory",
        "sk-learn-experiment-long-name",
        "",
    ],
)
def test_an_innocent_value_is_none(text: str) -> None:
    assert not is_secret_value(text)


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("export HF_TOKEN=abc", ["HF_TOKEN"]),
        ("HF_TOKEN='abc' WANDB_API_KEY=x python", ["HF_TOKEN", "WANDB_API_KEY"]),
        ("export HF_TOKEN=$TOKEN", []),
        ('export HF_TOKEN="${TOKEN}"', []),
        ("export HF_TOKEN=`cat x`", []),
        ("export HF_TOKEN=", []),
        ("export PATH=/opt/bin:$PATH", []),
    ],
)
def test_only_spelt_out_secrets_of_a_line_are_named(line: str, names: list[str]) -> None:
    assert list(secret_assignments(line)) == names


@given(st.text())
def test_any_text_can_be_asked_about(text: str) -> None:
    assert is_secret_name(text) in (True, False)
    assert is_secret_value(text) in (True, False)
    assert is_secret_name("HF_TOKEN" if not text else "X_TOKEN")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("HF_TOKEN=abcdef12", "HF_TOKEN=[redacted]"),
        ('{"api_key": "abcdef12"}', '{"api_key": "[redacted]"}'),
        ("--api-key gold1234 --lr 0.0001", "--api-key [redacted] --lr 0.0001"),
        ('["--api-key",\n  "gold1234"]', '["--api-key",\n  "[redacted]"]'),
        ("- --api-key\n- gold1234", "- --api-key\n- [redacted]"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: Bearer [redacted]"),
        ("key eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.abc", "key [redacted]"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\nx", "[redacted]\nx"),
        ("max_tokens=4096 lr: 0.0001 pad_token=None", "max_tokens=4096 lr: 0.0001 pad_token=None"),
        ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
        ("step 10 loss 2.5 tokens/s: 12345", "step 10 loss 2.5 tokens/s: 12345"),
    ],
)
def test_secrets_in_a_text_are_replaced(text: str, shown: str) -> None:
    assert redacted(text) == shown
