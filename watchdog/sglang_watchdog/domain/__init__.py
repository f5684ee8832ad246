"""Frozen values and closed enums that every other part speaks in. Pure: no clock, no I/O, no host part."""
