"""Process edge: the project's own errors become one sentence and an exit status."""

import sys

from sglang_watchdog.cli.app import app
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError


def main() -> None:
    """Exit status 2 for unusable input, 1 for any other failure of ours."""
    try:
        app()
    except WatchdogError as error:
        print(f"sglang-watchdog: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UnusableInput) else 1)


if __name__ == "__main__":
    main()
