"""No secret value survives, and what the diagnosis reads stays as it is."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_watchdog.domain.secrets import REDACTED, names_secret, redact_argv, redact_mapping, redact_text

SECRET_NAMES = ["--api-key", "--admin-api-key", "--ssl-keyfile-password", "--hf-token", "--client-secret", "--api-k"]
SECRET_VARIABLES = ["HF_TOKEN", "api_key", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_API_KEY", "X-Api-Key"]
HARMLESS_OPTIONS = [
    "--max-total-tokens",
    "--speculative-num-draft-tokens",
    "--speculative-token-map",
    "--tokenizer-path",
    "--skip-tokenizer-init",
    "--swa-full-tokens-ratio",
    "--ssl-keyfile",
]
# What a token looks like; "7" keeps it from being a word of the text around it.
secrets = st.text(string.ascii_letters + string.digits + "_-./+=", min_size=8).map(lambda text: f"q7{text}")
hard_secrets = st.text(min_size=1).map(lambda text: f"q7{text}")
words = st.from_regex(r"[a-z]{1,10}", fullmatch=True).filter(lambda word: not names_secret(word) and word != "bearer")


@given(st.sampled_from(SECRET_NAMES), hard_secrets, st.lists(words), st.booleans())
def test_no_secret_of_a_command_line_survives(option: str, secret: str, rest: list[str], joined: bool) -> None:
    given_as = [f"{option}={secret}"] if joined else [option, secret]
    argv = ["python", "-m", "sglang.launch_server", *given_as, *rest]
    redacted = redact_argv(argv)
    assert len(redacted) == len(argv)
    assert not any(secret in word for word in redacted)
    assert redacted[: 3 + (not joined)] == tuple(argv[: 3 + (not joined)])
    assert redacted[3 + len(given_as) :] == tuple(rest)


@given(st.sampled_from(SECRET_VARIABLES), hard_secrets)
def test_no_secret_of_an_assignment_in_a_command_line_survives(name: str, secret: str) -> None:
    assert redact_argv(["docker", "run", "-e", f"{name}={secret}"])[3] == f"{name}={REDACTED}"


@pytest.mark.parametrize(
    "form",
    [
        "{name}={secret}",
        "{name}='{secret}', host=1",
        '{{"{name}": "{secret}"}}',
        "{name}: {secret}",
        '{{\\"{name}\\": \\"{secret}\\"}}',
    ],
)
@given(name=st.sampled_from(SECRET_VARIABLES), secret=secrets, before=words, after=words)
def test_no_named_secret_of_a_text_survives(form: str, name: str, secret: str, before: str, after: str) -> None:
    redacted = redact_text(f"{before} {form.format(name=name, secret=secret)} {after}")
    assert secret not in redacted
    assert redacted.startswith(f"{before} ")
    assert redacted.endswith(f" {after}")


@pytest.mark.parametrize(
    "form",
    [
        "python -m sglang.launch_server {option} {secret} --port 1",
        "{option}={secret} --port 1",
        "{option} '{secret} with blanks' --port 1",
        "['{option}', '{secret}', '--port', '1']",
        '["{option}", "{secret}"]',
        "{option} \\\n  {secret}",
    ],
)
@given(option=st.sampled_from(SECRET_NAMES), secret=secrets)
def test_no_secret_of_a_command_in_a_text_survives(form: str, option: str, secret: str) -> None:
    redacted = redact_text(form.format(option=option, secret=secret))
    assert secret not in redacted
    assert option in redacted
    assert ("--port" in redacted) == ("--port" in form)


@given(secret=secrets)
def test_secrets_are_known_by_their_form(secret: str) -> None:
    for text in (f"Authorization: Bearer {secret}", f"-H 'Authorization: Basic {secret}'", f"bearer {secret}"):
        assert secret not in redact_text(text)
    assert "A" * 34 not in redact_text(f"login failed for hf_{'A' * 34}")
    assert "B" * 32 not in redact_text(f"key sk-proj-{'B' * 32} refused")
    assert redact_text("https://me:hunter2@host/x") == f"https://me:{REDACTED}@host/x"


@given(st.text())
def test_redacting_a_text_twice_changes_nothing_more(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@given(st.lists(st.one_of(st.text(), st.sampled_from(SECRET_NAMES), secrets)))
def test_redacting_a_command_line_twice_changes_nothing_more(argv: list[str]) -> None:
    once = redact_argv(argv)
    assert redact_argv(once) == once


@given(st.lists(words))
def test_words_that_are_no_secrets_stay(plain: list[str]) -> None:
    assert redact_argv(plain) == tuple(plain)
    assert redact_text(" ".join(plain)) == " ".join(plain)


@pytest.mark.parametrize("option", HARMLESS_OPTIONS)
def test_an_option_that_only_sounds_secret_keeps_its_value(option: str) -> None:
    assert redact_argv([option, "8192"]) == (option, "8192")
    assert redact_text(f"{option} 8192 {option}=8192") == f"{option} 8192 {option}=8192"


@pytest.mark.parametrize(
    "line",
    [
        "Prefill batch. #new-seq: 1, #new-token: 8192, #cached-token: 0, token usage: 0.00, #running-req: 0",
        "Decode batch. #running-req: 1, #token: 100, token usage: 0.01, gen throughput (token/s): 50.1, #queue-req: 0",
        "max_total_num_tokens=455357, chunked_prefill_size=8192, max_running_requests=26, num_draft_tokens=5",
        "ServerArgs(model_path='/m', tokenizer_path='/m', tokenizer_mode='auto', api_key=None, new_token_ratio=0.7)",
        "KeyError: 'model.layers.0'",
        "SyntaxError: Unexpected token: }",
        "RuntimeError: missing key: lm_head.weight",
        "eos_token_id=2, token_type_ids=None, num_key_value_heads=8, req_to_token_pool=3",
        "hf_chat_template_name=None, hf_transfer_of_a_large_file=1",
        "use --api-key, --admin-api-key",
        'api_key=""',
    ],
)
def test_a_line_that_the_diagnosis_reads_stays_as_it_is(line: str) -> None:
    assert redact_text(line) == line


def test_settings_lose_their_secrets_at_any_depth() -> None:
    settings = {
        "api_key": "q7secret",
        "admin_api_key": None,
        "max_total_tokens": 4096,
        "tokenizer_path": "/models/m",
        "extra": {"hf_token": "q7secret", "steps": 4},
        "argv": ["--api-key", "q7secret", "--port", "1"],
        "password": ["q7secret"],
        "note": "HF_TOKEN=q7secret",
        "ratios": [0.5, "HF_TOKEN=q7secret"],
    }
    assert redact_mapping(settings) == {
        "api_key": REDACTED,
        "admin_api_key": None,
        "max_total_tokens": 4096,
        "tokenizer_path": "/models/m",
        "extra": {"hf_token": REDACTED, "steps": 4},
        "argv": ["--api-key", REDACTED, "--port", "1"],
        "password": REDACTED,
        "note": f"HF_TOKEN={REDACTED}",
        "ratios": [0.5, f"HF_TOKEN={REDACTED}"],
    }


def test_a_long_line_without_blanks_costs_one_pass() -> None:
    line = "token" * 10_000
    assert redact_text(line) == line
