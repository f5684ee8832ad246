"""Reads times that are written out in text. Has no clock of its own."""

import calendar
import re
from functools import lru_cache

_WRITTEN = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?(?:\d*)(?: ?(Z|UTC|[+-]\d\d:?\d\d))?")

LATEST = 253_370_764_800  # Unix seconds: the year 9999 begins, and soon after it every calendar ends


def in_calendar(seconds: float) -> float | None:
    """Unix seconds that can be shown as a time; None for what damage or a joke has put there."""
    return seconds if 0 <= seconds <= LATEST else None


def first_time(text: str) -> float | None:
    """Unix seconds of the first `2026-11-29 12:49:07` or ISO 8601 time in `text`; without a zone, as UTC."""
    found = _WRITTEN.search(text)
    if not found:
        return None
    stamp, fraction, zone = found.groups()
    seconds = _whole_seconds(stamp)
    if seconds is None:
        return None
    return in_calendar(seconds + (float(f"0.{fraction}") if fraction else 0.0) - (_offset(zone) if zone else 0))


@lru_cache(maxsize=8)  # many lines of a log are of the same second
def _whole_seconds(stamp: str) -> int | None:
    """Of `2026-11-29 12:49:07`, as UTC; None where there is no such day."""
    year, month, day, hour, minute, second = map(int, re.split("[-: T]", stamp))
    return _unix(year, month, day, hour, minute, second)


def _unix(year: int, month: int, day: int, hour: int, minute: int, second: int) -> int | None:
    if not (1 <= year <= 9999 and 1 <= month <= 12 and 1 <= day <= 31):
        return None
    return calendar.timegm((year, month, day, hour, minute, second))


def has_known_zone(text: str) -> bool:
    """Whether a written time says where it was: names of zones such as CET are not resolved."""
    found = _WRITTEN.search(text)
    return bool(found and found[3])


def _offset(zone: str) -> int:
    if zone in ("Z", "UTC"):
        return 0
    digits = zone[1:].replace(":", "")
    seconds = int(digits[:2]) * 3600 + int(digits[2:]) * 60
    return -seconds if zone[0] == "-" else seconds


_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_DAY = 86400


def month_time(text: str, near: float) -> float | None:
    """Unix seconds of `Mar 09 22:35:06`, which has no year: that of `near`. None where `near` is not known."""
    if not (text and near):
        return None
    month = _MONTHS.find(text[:3]) // 3 + 1
    day, hour, minute, second = (int(text[i : i + 2]) for i in (4, 7, 10, 13))
    year = _year(near)
    times = [_unix(y, month, day, hour, minute, second) for y in (year - 1, year, year + 1)]
    known = [float(time) for time in times if time is not None]
    return min(known, key=lambda time: abs(time - near), default=None)


def _year(seconds: float) -> int:
    """The year of Unix seconds, in UTC, near enough for its neighbours to be tried as well."""
    return 1970 + int(seconds / (365.2425 * _DAY))
