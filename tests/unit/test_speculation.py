"""The speculation config: what of a command it is, and when two of them are the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_watchdog.domain.speculation import Command, SpeculationConfig

BASE = ["python", "-m", "sglang.launch_server", "--model-path", "/m", "--tp", "4"]
MANAGED = frozenset({"--mem-fraction-static"})
names = st.sampled_from(["--speculative-num-steps", "--speculative-algorithm", "--tp", "--host", "--x"])
options = st.lists(st.tuples(names, st.lists(st.from_regex(r"[a-z0-9/.]{1,8}", fullmatch=True), max_size=2)))


def config(*words: str, managed: frozenset[str] = frozenset()) -> SpeculationConfig:
    return SpeculationConfig.of([*BASE, *words], managed)


@given(options)
def test_a_command_that_is_taken_apart_and_put_together_is_the_same(given_options: list[tuple[str, list[str]]]) -> None:
    argv = (*BASE[:3], *(word for name, values in given_options for word in (name, *values)))
    assert Command.parse(argv).argv() == argv


@given(options)
def test_a_command_is_its_speculation_config_and_the_rest(given_options: list[tuple[str, list[str]]]) -> None:
    argv = [*BASE, *(word for name, values in given_options for word in (name, *values))]
    rest = Command.parse(argv).without(frozenset()).argv()
    speculation = SpeculationConfig.of(argv)
    assert not any(word.startswith("--speculative-") for word in rest)
    assert SpeculationConfig.of([*rest, *speculation.words()]) == speculation
    assert SpeculationConfig.of(rest) == SpeculationConfig()


def test_an_equals_sign_and_the_order_make_no_difference() -> None:
    one = config("--speculative-num-steps", "4", "--speculative-algorithm=EAGLE")
    assert one == config("--speculative-algorithm", "EAGLE", "--port", "1", "--speculative-num-steps=4")
    assert one.steps == 4


def test_the_last_of_two_values_counts_as_argparse_has_it() -> None:
    assert config("--speculative-num-steps", "4", "--speculative-num-steps", "10").steps == 10
    assert Command.parse(["x", "--port", "1", "--port=2"]).value("--port") == "2"
    assert Command.parse(["x", "--flag"]).value("--flag") is None


def test_both_names_of_the_draft_model_are_one_flag() -> None:
    assert config("--speculative-draft-model", "/d") == config("--speculative-draft-model-path", "/d")


def test_a_memory_flag_belongs_to_it_only_where_the_operator_says_so() -> None:
    assert config("--mem-fraction-static", "0.8") == SpeculationConfig()
    managed = config("--mem-fraction-static", "0.8", managed=MANAGED)
    assert managed.words() == ("--mem-fraction-static", "0.8")
    assert managed.describe() == "no speculation, --mem-fraction-static 0.8"


@pytest.mark.parametrize(
    ("asked", "topk", "used"), [("9", "1", 5), (None, "1", 5), ("9", "2", 9), (None, "2", None), ("x", "2", None)]
)
def test_the_draft_tokens_follow_from_the_steps_when_topk_is_1(asked: str | None, topk: str, used: int | None) -> None:
    tokens = ["--speculative-num-draft-tokens", asked] if asked else []
    assert config("--speculative-num-steps", "4", "--speculative-eagle-topk", topk, *tokens).draft_tokens == used


def test_configs_that_have_the_same_effect_are_the_same() -> None:
    plain = config("--speculative-num-steps", "4", "--speculative-eagle-topk", "1")
    spelled_out = config(*plain.words(), "--speculative-num-draft-tokens", "5")
    ignored = config(*plain.words(), "--speculative-num-draft-tokens", "11")
    assert plain.same_as(spelled_out)
    assert plain.same_as(ignored)
    assert not plain.same_as(config("--speculative-num-steps", "5", "--speculative-eagle-topk", "1"))
    assert not plain.same_as(SpeculationConfig())


def test_it_says_what_it_is() -> None:
    assert config("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "4").describe() == "steps 4"
    assert config("--speculative-algorithm", "NGRAM").describe() == "speculation"
    assert SpeculationConfig().describe() == "no speculation"
    assert not SpeculationConfig().speculates


def test_which_of_two_needs_more_memory_is_told_where_only_the_number_of_drafts_differs() -> None:
    def eagle(steps: str, *more: str) -> SpeculationConfig:
        topk = ("--speculative-eagle-topk", "1")
        return config("--speculative-algorithm", "EAGLE", "--speculative-num-steps", steps, *topk, *more)

    assert eagle("5").needs_more_than(eagle("4"))
    assert eagle("4").needs_more_than(eagle("5")) is False
    assert eagle("4").needs_more_than(SpeculationConfig())
    assert SpeculationConfig().needs_more_than(eagle("4")) is False
    assert eagle("4", "--speculative-attention-mode", "decode").needs_more_than(eagle("5")) is None
    assert config("--speculative-algorithm", "NGRAM").needs_more_than(eagle("5")) is None
