"""For a real SGLang beside a newer transformers than its pin: a config that both register is no error."""

from typing import Any

import transformers.models.auto.configuration_auto as auto  # type: ignore[import-not-found]

_register = auto.CONFIG_MAPPING.register


def register(key: str, value: Any, exist_ok: bool = False) -> None:  # noqa: ARG001 - SGLang says False, and means it
    _register(key, value, exist_ok=True)


auto.CONFIG_MAPPING.register = register
