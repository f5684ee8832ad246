"""Reads times that are written out in text. Has no clock of its own."""

import calendar
import re

_WRITTEN = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(?:\d*)(?: ?(Z|UTC|[+-]\d\d:?\d\d))?"
)


def first_time(text: str) -> float | None:
    """Unix seconds of the first `2026-11-29 12:49:07` or ISO 8601 time in `text`; without a zone, as UTC."""
    found = _WRITTEN.search(text)
    if not found:
        return None
    year, month, day, hour, minute, second = (int(part) for part in found.groups()[:6])
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    whole = calendar.timegm((year, month, day, hour, minute, second))
    fraction = float(f"0.{found[7]}") if found[7] else 0.0
    return whole + fraction - _offset(found[8] or "")


def has_known_zone(text: str) -> bool:
    """Whether a written time says where it was: names of zones such as CET are not resolved."""
    found = _WRITTEN.search(text)
    return bool(found and found[8])


def _offset(zone: str) -> int:
    if zone in ("", "Z", "UTC"):
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
    if not (month and 1 <= day <= 31):
        return None
    year = _year(near)
    times = (calendar.timegm((y, month, day, hour, minute, second)) for y in (year - 1, year, year + 1))
    return float(min(times, key=lambda time: abs(time - near)))


def _year(seconds: float) -> int:
    """The year of Unix seconds, in UTC, near enough for its neighbours to be tried as well."""
    return 1970 + int(seconds / (365.2425 * _DAY))
