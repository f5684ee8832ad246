"""Process edge: the project's own errors become one sentence and an exit status."""

import errno
import os
import sys

from sglang_watchdog.cli.app import app
from sglang_watchdog.domain.errors import UnusableInput, WatchdogError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def main() -> None:
    """Exit status 2 for unusable input, 1 for any other failure of ours."""
    try:
        try:
            app()
        finally:
            if sys.stdout:
                sys.stdout.flush()
    except WatchdogError as error:
        print(f"sglang-watchdog: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UnusableInput) else 1)
    except OSError as error:
        if "run" in sys.argv[1:2] or error.filename or error.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python tries once more to write the rest, and says so
        print(f"sglang-watchdog: the answer cannot be written: {error.strerror or error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
