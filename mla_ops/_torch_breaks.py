"""What Dynamo tells of graph breaks: a module that touches private torch names.

Breaks that torch resumes from are in a list. Where it cannot resume (a break in a loop, in try, in
a context manager) it leaves the rest of the function, mostly all of it, to Python and says so
only in the log ``graph_breaks``. Each answer is None or False when the name it needs is gone.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

__all__ = ["Stack", "graph_breaks", "unresumed_breaks", "unsupported", "went_back"]

# (file, line), the innermost last.
Stack = list[tuple[str, int]]

_LOGGERS = ("torch._dynamo.symbolic_convert", "torch._dynamo.convert_frame")
_LOGGER = "graph_break_log"
_SKIPS = re.compile(r"Failed to handle graph break gracefully|that we cannot resume from")
# Between these is why, as in the list of breaks; a second reason is that of the skip itself.
_REASON = re.compile(
    r"Graph break encountered:\s*(.+?)\s*"
    r"(?:For more details about|\*\*\* While handling|Stack variable source|User code trace|\Z)",
    re.DOTALL,
)
_PLACE = re.compile(r"in user code at (.+):(\d+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TRACEBACK = "User code traceback:"
# How convert_frame tells what symbolic_convert did not: the reason is the exception.
_UNTRACED = "results in a skip"
# What the list has for a break that torch went back from, at the line it went back to.
_WENT_BACK = "step_unsupported"
# Not a break: the function raised, and the caller sees its error.
_RAISED = "Observed exception"


def graph_breaks() -> list[tuple[str, Stack]] | None:
    """List reason and stack of every graph break since the last reset that torch resumed from."""
    from torch._dynamo import utils

    reasons = getattr(utils, "graph_break_reasons", None)
    if reasons is None:
        return None
    found = []
    for entry in reasons:
        frames = getattr(entry, "user_stack", ())
        stack = [(frame.filename, int(frame.lineno or 0)) for frame in frames]
        found.append((str(getattr(entry, "reason", entry)), stack))
    return found


def went_back(reason: str) -> bool:
    """Tell whether ``graph_breaks`` has an entry for a break that ``unresumed_breaks`` tells."""
    return reason.strip() == _WENT_BACK


def unsupported() -> Counter[str]:
    """Count, by reason, what Dynamo could not trace in this process."""
    from torch._dynamo import utils

    return Counter(getattr(utils, "counters", {}).get("unimplemented", ()))


@contextlib.contextmanager
def unresumed_breaks(callback: Callable[[str, Stack], None]) -> Iterator[bool]:
    """Call ``callback`` with each break that torch cannot resume from; yield whether it tells.

    A stand-in takes the place of torch's logger: neither the level of the logger, nor
    ``logging.disable``, nor what is printed has to change.
    """
    with contextlib.ExitStack() as stack:
        found = False
        for name in _LOGGERS:
            with contextlib.suppress(ImportError):
                module = import_module(name)
                logger = getattr(module, _LOGGER, None)
                if logger is not None:
                    found = True
                    setattr(module, _LOGGER, _Listening(logger, callback))
                    stack.callback(setattr, module, _LOGGER, logger)
        yield found


class _Listening:
    """A logger that also tells each message to a callback."""

    def __init__(self, logger: Any, callback: Callable[[str, Stack], None]) -> None:
        self._logger = logger
        self._callback = callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def isEnabledFor(self, level: int) -> bool:
        """Ask for every message; ``logger`` itself decides what to print."""
        return True

    def debug(self, message: str, *args: Any, **options: Any) -> None:
        """Log, and tell the callback if the message is about a break without a resumption."""
        self._logger.debug(message, *args, **{"stacklevel": 2, **options})
        found = _read(message % args if args else message)
        if found is not None:
            self._callback(*found)


def _read(text: str) -> tuple[str, Stack] | None:
    """Read reason and stack from a message."""
    if _UNTRACED in text:
        return str(sys.exc_info()[1] or text), _frames(text)
    reason = _REASON.search(text)
    if reason is None or not _SKIPS.search(text) or reason[1].startswith(_RAISED):
        return None
    place = _PLACE.search(text)
    stack = _frames(text.partition(_TRACEBACK)[2])
    last = [(place[1], int(place[2]))] if place else []
    return reason[1], stack if stack[-1:] == last else stack + last


def _frames(text: str) -> Stack:
    return [(file, int(line)) for file, line in _FRAME.findall(text)]
