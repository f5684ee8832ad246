"""What a stop would have needed: requests in flight, their length and speed, and whether it could end at all."""

from sglang_watchdog.diagnosis.signatures import ReleaseRange
from sglang_watchdog.diagnosis.timeline import Timeline
from sglang_watchdog.domain.unit import UnitSnapshot

# SGLang looks every 5 s whether the drain is over, and takes up to 15 s to end its schedulers after it.
_AFTER_THE_LAST_REQUEST = 20
_UNHEALTHY_STOP = 90  # from 0.5.14 on: 5 + 60 + 15 s of crash diagnostics
_LONG_ANSWER = 4096


def in_flight(timeline: Timeline) -> int:
    """Requests that the stop met: as the server counted them when draining, else as its last decode line did."""
    counted = timeline.drain.first if timeline.drain else 0
    decoding = timeline.decoding_at_stop
    return max(counted, decoding.running + decoding.queued if decoding else 0)


def drain_advice(timeline: Timeline, unit: UnitSnapshot | None, releases: ReleaseRange) -> tuple[str, ...]:
    busy = in_flight(timeline)
    if busy and releases.surely_before("0.5.10") and unit and unit.kill_mode == "control-group":
        return (
            f"This stop could never have ended: up to 0.5.9, with KillMode=control-group, the schedulers die of the "
            f"stop's SIGTERM at once and the {busy} requests wait for them for ever. Set KillMode=mixed in the unit, "
            "and stop the traffic before a stop. A longer TimeoutStopSec= would not help.",
        )
    advice = [_length(timeline, busy)] if busy else []
    advice.append(
        f"TimeoutStopSec= must be longer than the longest answer in flight plus {_AFTER_THE_LAST_REQUEST} s "
        f"({_UNHEALTHY_STOP} s at least for a server that hangs), or the traffic has to be stopped first."
    )
    if unit and unit.kill_mode == "control-group":
        advice.append("KillMode=mixed lets the server drain: control-group ends its schedulers at once.")
    return tuple(advice)


def _length(timeline: Timeline, busy: int) -> str:
    """How long the requests were when the stop came, and what a long answer would have taken."""
    sentence = f"{busy} requests were in flight"
    decoding = timeline.decoding_at_stop
    if decoding and decoding.running and decoding.tokens:
        sentence += f", about {decoding.tokens // decoding.running} tokens long each"
        if decoding.rate:
            speed = decoding.rate / decoding.running
            sentence += (
                f", at {speed:.0f} tokens/s each: an answer of {_LONG_ANSWER} takes {_LONG_ANSWER / speed:.0f} s"
            )
    drain = timeline.drain
    if drain and drain.last < drain.first:
        sentence += f"; {drain.first - drain.last} of them ended within {drain.seconds:.0f} s"
    return sentence + "."
