from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clusterrun.config import secrets
from clusterrun.config.secrets import (
    REDACTED,
    SHORTEST,
    is_secret,
    is_secret_value,
    named_secrets,
    redacted,
    secret_arguments,
)

NAMES = """
HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN AWS_SESSION_TOKEN hf_token WANDB_API_KEY OPENAI_APIKEY
wandbApiKey AWS_ACCESS_KEY_ID SSH_KEY AWS_SECRET_ACCESS_KEY CLIENT_SECRET SECRETS DB_PASSWORD
PGPASSWORD MYSQL_PWD GPG_PASSPHRASE GOOGLE_APPLICATION_CREDENTIALS HFToken DB_PASS PASS GH_PAT
MY_PAT AUTH BASIC_AUTH DATABASE_URL SENTRY_DSN SESSION_COOKIE AZURE_STORAGE_CONNECTION_STRING
SLACK_WEBHOOK WEBHOOK_URL API_KEYS TOKENS CREDS JWT OTP REDIS_URL AUTH_HEADER pw ADMIN_PASSWORD2
"""
RANDOM = "a1B2c3D4e5F6g7H8i9J0k1L2m3N4o5P6q7R8s9T0u1V2w3X4y5Z6" * 4
HEX = "0a1b2c3d4e5f60718293a4b5c6d7e8f901a2b3c4" * 2
FORMS = (  # in pieces, so that scanners of repositories do not find them
    *("https://me:pa55@host/x", f"https://{RANDOM[:24]}@git.host/x", "postgres://me:pa/55@db/x"),
    *("-----BEGIN RSA " + "PRIVATE KEY-----", "-----BEGIN PGP " + "PRIVATE KEY BLOCK-----"),
    *(f"hf_{RANDOM[:34]}", f"ghp_{RANDOM[:36]}", f"github_pat_{RANDOM[:22]}_{RANDOM[:59]}"),
    *(f"glpat-{RANDOM[:20]}", f"sk-proj-{RANDOM[:48]}", f"sk-ant-api03-{RANDOM[:20]}-{RANDOM}"),
    *(f"xoxb-{10 * '12'}-{RANDOM[:24]}", "AKIA" + 4 * "ABCD", "ASIA" + 4 * "ABCD"),
    *(f"AIza{RANDOM[:35]}", f"npm_{RANDOM[:36]}", f"pypi-AgEI{RANDOM[:80]}"),
    *("sk_" + f"live_{RANDOM[:24]}", f"1234567890:AA{RANDOM[:33]}", RANDOM[:36] + "/+a1"),
    *(f"eyJ{RANDOM[:20]}.eyJ{RANDOM[:30]}.{RANDOM[:43]}", f"wandb login {HEX[:40]}"),
    *("https://hooks.slack." + "com/services/T0/B0/XXXX", f"discord.com/api/webhooks/1/{RANDOM}"),
    *(f"https://b.s3/x?X-Amz-Signature={HEX[:64]}", f"https://a.blob/c?sv=1&sig={RANDOM[:43]}%3D"),
    *(f"AccountName=a;AccountKey={RANDOM[:86]}==;EndpointSuffix=x", f"key: {HEX[:40]}"),
    *(f"Authorization: Bearer {RANDOM[:30]}", "Authorization: Basic bWU6aHVudGVyMg=="),
    *(f"Cookie: session={RANDOM[:20]}; x=1", "password='two words'", f"dapi{HEX[:32]}"),
    *(f"//npm.x/:_authToken={HEX[:36]}", "password=b'hunter2'", f"lin_oauth_{HEX[:64]}"),
    *(f"GET https://x-token:{RANDOM[:30]}@github.com/x", f"Authorization: token {HEX[:40]}"),
    *(f"eyJ{RANDOM[:20]}..{RANDOM[:16]}.{RANDOM[:40]}.x", f"wandb login --relogin {HEX[:40]}"),
    f"a message that was shortened ... {RANDOM[12:40]}",
    *(f"hvs.{RANDOM[:24]}", f"SG.{RANDOM[:22]}.{RANDOM[:43]}", f"unknown_{RANDOM[:40]}"),
)
PARTS = ("hunter2", RANDOM[:12], RANDOM[24:36], HEX[:12], 3 * "ABCD", "55@", "two words")
PARTS += ("XXXX", "bWU6")
ORDINARY = [
    word
    for line in Path(__file__).with_name("ordinary.txt").read_text().splitlines()[1:]
    for word in line.split()
]


def test_names_of_secrets_are_known() -> None:
    for name in NAMES.split():
        assert is_secret(name, "hunter2")
        assert [n for n, _ in named_secrets(f"export {name}=hunter2")] == [name]
        shown = redacted(f'{{"{name}": "hunter2 x"}}') + redacted(f"{name}=hunter2")
        assert "hunter2" not in shown, name


def test_forms_of_secrets_are_known_wherever_they_stand() -> None:
    for text in FORMS:
        assert is_secret_value(text), text
        assert is_secret("X", text), text
        assert list(secret_arguments([text])), text
        shown = redacted(f"line {text}\n")
        shown += redacted(json.dumps(f"{text}\n\x1b[31m{text}\n{text}"))
        assert not any(part in shown for part in PARTS), text
        assert REDACTED in shown, text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_text_in_which_no_form_is_sought_is_shorter_than_each() -> None:
    parse = importlib.import_module("sre_parse").parse
    for each in (*secrets._TABLE["forms"], *secrets._TABLE["forms if they look random"]):
        assert parse(each.replace("{start}", "")).getwidth()[0] >= SHORTEST or "://" in each


INNOCENT = [
    *("https://host:8080/a@b", "hf_transformers_cache_directory", "wandb: commit " + HEX[:40]),
    *("sk-learn-experiment-long-name", "", f"commit {HEX[:40]}", "Basic configuration"),
]


def test_what_training_scripts_are_given_is_no_secret() -> None:
    for word in ORDINARY:
        name, _, value = word.partition("=")
        assert not is_secret(name.lstrip("-"), value), word
        assert not list(secret_arguments([word])), word
        assert not list(secret_arguments([name, value])), word
        assert "$" in word or redacted(word) == word
    assert not [text for text in INNOCENT if is_secret_value(text)]


def test_only_spelt_out_secrets_of_a_line_are_named() -> None:
    for line, names in [
        ("HF_TOKEN='abc' WANDB_API_KEY=x python", ["HF_TOKEN", "WANDB_API_KEY"]),
        ("export HF_TOKEN=$TOKEN PAT=`cat x` AUTH=", []),
        ('export HF_TOKEN="${TOKEN}"', []),
        ('curl -H "Authorization: Bearer $TOKEN"', []),
        ("export PATH=/opt/bin:$PATH", []),
    ]:
        assert [name for name, _ in named_secrets(line)] == names


@given(st.text())
def test_any_text_can_be_asked_about(text: str) -> None:
    assert is_secret_value(text) in (True, False)


def test_secrets_in_a_text_are_replaced() -> None:
    for text, shown in [
        ("HF_TOKEN=abcdef12", "HF_TOKEN=[redacted]"),
        ('{"api_key": "abcdef12"}', '{"api_key": "[redacted]"}'),
        ("--api-key gold1234 --lr 0.0001", "--api-key [redacted] --lr 0.0001"),
        ('["--api-key",\n  "gold1234"]', '["--api-key",\n  "[redacted]"]'),
        ("- --api-key\n- gold1234", "- --api-key\n- [redacted]"),
        ("Authorization: Bearer abc.def-ghi_jkl", "Authorization: [redacted]"),
        ("\\nDB_PASS=hunter2\\nnext", "\\nDB_PASS=[redacted]\\nnext"),
        ('{\\"pw\\": \\"a b\\"}', '{\\"pw\\": \\"[redacted]\\"}'),
        ("\x1b[31mpw=a&b c=d", "\x1b[31mpw=[redacted] c=d"),
        ("key eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0.abc", "key [redacted]"),
        ("-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\nx", "[redacted]\nx"),
        ("max_tokens=4096 lr: 0.0001 pad_token=None", "max_tokens=4096 lr: 0.0001 pad_token=None"),
        ("TOKENIZERS_PARALLELISM=false", "TOKENIZERS_PARALLELISM=false"),
        ("step 10 loss 2.5 tokens/s: 12345", "step 10 loss 2.5 tokens/s: 12345"),
    ]:
        assert redacted(text) == shown
