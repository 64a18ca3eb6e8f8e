"""What the command line prints: tables that fit the terminal, progress, and an early end."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

INTERRUPTED = 130  # exit status after Ctrl-C, as a shell has it: 128 + SIGINT
PIPE_CLOSED = 141  # 128 + SIGPIPE
_COLOURS = {"ok": "32", "FAIL": "1;31", "-": "2"}


def _painted(text: str, width: int) -> str:
    code = _COLOURS.get(text)
    plain = text.ljust(width)
    if code is None or not sys.stdout.isatty() or os.environ.get("NO_COLOR"):
        return plain
    return f"\x1b[{code}m{plain}\x1b[0m"


def print_table(
    title: str, columns: list[str], rows: list[list[str]], optional: tuple[str, ...] = ()
) -> None:
    """Aligned text. On a terminal that is too narrow, the columns that are named in ``optional``
    are left out, one after the other; a file or a pipe gets all of them."""
    left = list(range(len(columns)))
    widths = [max(len(row[i]) for row in [columns, *rows]) for i in left]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name in optional:
        if sum(widths[i] + 2 for i in left) > room:
            left = [i for i in left if columns[i] != name]
    print(title)
    for row in [columns, *rows]:
        print("  " + "  ".join(_painted(row[i], widths[i]) for i in left).rstrip())


class Progress:
    """What is being done, on stderr: one line that changes on a terminal, a line each otherwise."""

    def __init__(self, total: int | None = None) -> None:
        self.total, self.done = total, 0
        self._ended = not sys.stderr.isatty()

    def start(self, what: str) -> None:
        self.done += 1
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        begin, end = ("", "\n") if self._ended else ("\r\x1b[K", "")
        print(f"{begin}[{count}] {what}", end=end, file=sys.stderr, flush=True)

    def finish(self) -> None:
        """Clears the line that changes."""
        if not self._ended:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        self._ended = True


def run_to_the_end(main: Callable[[], int]) -> int:
    """The exit status of ``main``, also when Ctrl-C or a reader that closes the pipe ends it."""
    try:
        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # What is still in the buffer has nowhere to go, or the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return status
