"""Every wording in the catalog is tested by its own sample lines."""

import pytest

from sglang_watchdog.diagnosis.signatures import Meaning, ReleaseMark, ReleaseRange, Signature, catalog
from sglang_watchdog.domain.evidence import Source

SIGNATURES = catalog().signatures


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.id)
def test_a_signature_matches_its_samples_and_not_its_neighbours(signature: Signature) -> None:
    assert signature.samples
    assert signature.others
    assert [line for line in signature.samples if not signature.search(line)] == []
    assert [line for line in signature.others if signature.search(line)] == []


@pytest.mark.parametrize("signature", SIGNATURES, ids=lambda s: s.id)
def test_no_other_cause_claims_a_signature_s_samples(signature: Signature) -> None:
    """A line that two causes claim would be decided by chance. Benign ones come first, whatever else matches."""
    if signature.means is Meaning.BENIGN:
        return
    peers = [s for s in SIGNATURES if s.source is signature.source and s.means is not signature.means]
    for line in signature.samples:
        claims = {s.means for s in peers if s.search(line)}
        benign = Meaning.BENIGN in claims
        assert benign or not claims - {Meaning.CHILD_DIED, Meaning.ECHO, Meaning.OWN_KILL}, line


def test_ids_are_unique() -> None:
    ids = [signature.id for signature in SIGNATURES]
    assert len(ids) == len(set(ids))


def test_a_benign_wording_is_looked_at_no_further() -> None:
    line = "DetokenizerManager watchdog timeout (self.watchdog_timeout=60, self.soft=True)"
    (match,) = catalog().of(Source.SGLANG).matches(line)
    assert match[0].means is Meaning.BENIGN


@pytest.mark.parametrize("mark", catalog().marks, ids=lambda m: m.needle)
def test_a_release_mark_matches_its_samples(mark: ReleaseMark) -> None:
    assert mark.samples
    assert all(mark.needle in line and mark.pattern.search(line) for line in mark.samples)


def test_ranges_of_releases_narrow_and_never_contradict() -> None:
    both = ReleaseRange.parse("0.5.10..").narrowed(ReleaseRange.parse("..0.5.18"))
    assert both == ReleaseRange.parse("0.5.10..0.5.18")
    assert both.narrowed(ReleaseRange.parse("0.6..")) == both
    assert both.surely_from("0.5.10")
    assert not both.surely_from("0.5.11")
    assert both.surely_before("0.5.19")
    assert not both.surely_before("0.5.18")


def test_a_range_of_releases_that_is_none_is_a_mistake() -> None:
    assert ReleaseRange.parse("all") == ReleaseRange()
    with pytest.raises(ValueError, match="no range"):
        ReleaseRange.parse("0.5.9")


def test_a_line_of_a_shape_that_held_no_needle_is_still_looked_at_for_needles_with_digits() -> None:
    index = catalog().of(Source.SGLANG)
    assert index.matches("OSError: [Errno 11] Cannot allocate memory") == []
    assert index.matches("OSError: [Errno 11] Cannot allocate memory") == []
    (match,) = index.matches("OSError: [Errno 12] Cannot allocate memory")
    assert match[0].means is Meaning.HOST_ALLOCATION
