"""The figures of the simulated SGLang that come from outside: the published sweep, formulas, flags, and words."""

from __future__ import annotations

import pytest

from sim_sglang import flags, logs
from sim_sglang.faults import Fault, parse
from sim_sglang.memory import Demand, PoolError, Pools, size_pools
from sim_sglang.profiles import DENSE, GIB, HYBRID_122B, MIB, TINY, Profile
from sim_sglang.release import Release

OLD, MIDDLE, NEW = (Release.parse(text) for text in ("0.5.9", "0.5.16", "0.5.23"))
# Free bytes of a 96 GB card ahead of the weights: the driver's reserve, a context and NCCL taken off.
BEFORE = (97_887 - 615 - 700 - 512) * MIB


def sized(release: Release, profile: Profile, steps: int, *, radix: bool = True, held: int = 0) -> Pools:
    draft = profile.draft_weights // 4 if release.sizes_pools_last else 0
    demand = Demand(4, profile.mem_fraction, steps + 1, 48, None, None, radix, draft_counted=False)
    before = BEFORE - held
    return size_pools(release, profile, demand, before, before - profile.weights // 4 - draft)


@pytest.mark.parametrize(("steps", "tokens", "requests"), [(1, 455_357, 26), (2, 377_207, 21), (3, 295_931, 17)])
def test_the_pools_of_the_published_sweep_come_out_of_sglangs_formulas(steps: int, tokens: int, requests: int) -> None:
    pools = sized(OLD, HYBRID_122B, steps)
    assert (pools.tokens, pools.max_running) == (tokens, requests)


def test_the_line_of_the_sweep_goes_on_and_crosses_zero_between_steps_6_and_7() -> None:
    four, five, six = (sized(OLD, HYBRID_122B, steps) for steps in (4, 5, 6))
    assert four.tokens - five.tokens == pytest.approx(80_000, rel=0.03)
    assert five.tokens - six.tokens == pytest.approx(80_000, rel=0.03)
    assert 0 < six.tokens < 80_000
    with pytest.raises(PoolError, match="Not enough memory"):
        sized(OLD, HYBRID_122B, 7)


@pytest.mark.parametrize(
    ("release", "text"),
    [
        ("0.5.2", "Not enough memory. Please try to increase --mem-fraction-static."),
        ("0.5.9", "--mem-fraction-static. Current value: self.server_args.mem_fraction_static=0.8"),
        ("0.5.10", "--mem-fraction-static. Current value: mem_fraction_static=0.8"),
        ("0.5.12", "Not enough memory. Please try to increase --mem-fraction-static."),
    ],
)
def test_eleven_draft_tokens_cannot_size_the_pool_in_each_releases_words(release: str, text: str) -> None:
    with pytest.raises(PoolError) as refused:
        sized(Release.parse(release), HYBRID_122B, 10)
    assert str(refused.value).endswith(text)


def test_newer_releases_serve_fewer_requests_instead_unless_the_prefix_cache_is_off() -> None:
    assert sized(MIDDLE, HYBRID_122B, 10).max_running < sized(MIDDLE, HYBRID_122B, 3).max_running
    with pytest.raises(PoolError, match=r"Loaded weights leave no GPU memory .* above 0.674 "):
        sized(MIDDLE, HYBRID_122B, 10, radix=False)


def test_memory_that_others_hold_makes_a_start_smaller_without_a_word() -> None:
    free, shared = sized(OLD, HYBRID_122B, 3), sized(OLD, HYBRID_122B, 3, held=5 * GIB)
    assert 0 < shared.tokens < free.tokens / 2
    assert shared.max_running < free.max_running


def test_a_dense_models_pool_does_not_shrink_with_draft_tokens() -> None:
    assert sized(OLD, DENSE, 3).tokens == sized(OLD, DENSE, 10).tokens


@pytest.mark.parametrize(("steps", "speed"), [(1, 123), (2, 186), (3, 234), (4, 277), (5, 282)])
def test_speed_is_that_of_the_sweep(steps: int, speed: float) -> None:
    assert HYBRID_122B.rate(steps) == speed


@pytest.mark.parametrize(("release", "rate"), [("0.5.9", 0.92), ("0.5.10", 0.92), ("0.5.11", 0.90), ("0.5.23", 0.90)])
def test_accept_rate_is_what_each_release_makes_of_an_accept_len(release: str, rate: float) -> None:
    assert HYBRID_122B.accepted(5) == 5.5
    assert round(Release.parse(release).accept_rate(5.5, 6), 2) == rate


SPEC = ("--model-path", "m", "--speculative-algorithm", "NEXTN")


def resolved(release: Release, *argv: str, profile: Profile = HYBRID_122B) -> flags.ServerArgs:
    args = flags.parse(release, profile, argv)
    flags.resolve(args, profile)
    return args


def test_steps_alone_set_the_draft_tokens() -> None:
    args = resolved(OLD, *SPEC, *["--speculative-num-steps", "4", "--speculative-eagle-topk", "1"], *["--tp", "4"])
    assert (args.steps, args.draft_tokens, args.tp) == (4, 5, 4)
    assert args.get("speculative_algorithm") == "EAGLE"
    assert any("is adjusted to speculative_num_steps + 1" in note for note in args.notes)


def test_speculation_without_numbers_takes_the_models_defaults() -> None:
    assert (resolved(OLD, *SPEC).steps, resolved(OLD, *SPEC, profile=DENSE).steps) == (3, 5)


@pytest.mark.parametrize(
    ("release", "argv", "status", "words"),
    [
        (OLD, ("--model-path", "m", "--foo"), 2, "launch_server.py: error: unrecognized arguments: --foo"),
        (MIDDLE, ("--port", "1"), 2, "sglang serve: error: the following arguments are required: --model-path/--model"),
        (OLD, (*SPEC, "--speculative-num-steps", "3"), 1, flags.STEPS_WITHOUT_TOPK),
        (NEW, (*SPEC, "--speculative-eagle-topk", "1"), 1, "AssertionError"),
        (NEW, ("--model-path", "m", "--cuda-graph-max-bs", "8"), 2, "ambiguous option: --cuda-graph-max-bs"),
        (OLD, ("--model-path", "m", "--speculative-algorithm", "DFLASH"), 2, "invalid choice: 'DFLASH'"),
    ],
)
def test_flags_are_refused_as_the_release_refuses_them(
    release: Release, argv: tuple[str, ...], status: int, words: str
) -> None:
    with pytest.raises(flags.Refused) as refused:
        resolved(release, *argv)
    assert refused.value.status == status
    assert words in refused.value.text.splitlines()[-1]


def test_an_old_flag_is_taken_by_the_releases_that_still_know_it() -> None:
    for release in (OLD, MIDDLE):
        assert max(resolved(release, "--model-path", "m", "--cuda-graph-max-bs", "8").graph_batches) == 8


@pytest.mark.parametrize("release", ["0.5.9", "0.5.12", "0.5.14", "0.5.16", "0.5.18", "0.5.20", "0.5.23"])
def test_the_line_of_server_args_is_longer_than_journalctl_shows_by_itself(release: str) -> None:
    line = resolved(Release.parse(release), "--model-path", "m", "--mem-fraction-static", "0.85").line()
    assert len(line) > 4096
    assert "mem_fraction_static=0.85" in line or "'mem_fraction_static': 0.85" in line


def test_an_out_of_memory_names_the_strangers_on_the_card() -> None:
    text = logs.out_of_memory(0, 32 * MIB, 96 * GIB, 16 * MIB, 80 * GIB, {2231: 15 * GIB})
    assert "Process 2231 has 15.00 GiB memory in use." in text
    assert "Tried to allocate 32.00 MiB. GPU 0 has a total capacity of 96.00 GiB of which 16.00 MiB is free." in text


def test_faults_are_read_with_their_numbers_and_an_unknown_name_is_an_error() -> None:
    assert parse("crash_after 3\nkv_oom\n\nruntime_oom=2") == {
        Fault.CRASH_AFTER: 3,
        Fault.KV_OOM: 0,
        Fault.RUNTIME_OOM: 2,
    }
    with pytest.raises(ValueError, match="kv_ooom"):
        parse("kv_ooom")


def test_releases_are_ordered_as_numbers_and_a_post_release_is_the_release_it_mends() -> None:
    assert Release.parse("0.5.9") < Release.parse("0.5.10.post1") == Release.parse("0.5.10")
    assert TINY.accepted(2) == 3
