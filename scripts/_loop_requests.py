"""The traffic of decode_loop.py and the rows it is served in: host side, no tensors.

Everything follows from a seed: two runs see the same requests at the same steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Request:
    """A prompt and how many tokens it decodes to."""

    number: int
    prompt_tokens: int
    output_tokens: int

    @property
    def total(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass
class Active:
    """A request in its row."""

    request: Request
    decoded: int = 0

    @property
    def length(self) -> int:
        return self.request.prompt_tokens + self.decoded


class Traffic:
    """Requests of random length whose number in flight wanders through every captured size.

    Time is cut into phases; each aims at a random number of requests that pads to one of the
    sizes, or at none. Rank 0 begins with the smallest size, the others idle: the order in which
    buffers sized by the first call used to break.

    Args:
        batch_sizes: captured sizes, ascending.
        phase_steps: steps of a phase.
        max_prompt: tokens of the longest prompt.
        max_output: tokens of the longest output.
        seed: of the whole run.
        rank: of this process.
    """

    def __init__(
        self,
        batch_sizes: Sequence[int],
        *,
        phase_steps: int,
        max_prompt: int,
        max_output: int,
        seed: int,
        rank: int,
    ) -> None:
        self._random = random.Random(f"{seed}/{rank}")
        self._bounds = [(0, 0), *zip((0, *batch_sizes), batch_sizes, strict=False)]
        self._phase_steps = phase_steps
        self._max_prompt, self._max_output = max_prompt, max_output
        self._upcoming = [self._bounds[1] if rank == 0 else self._bounds[0]]
        self._target = 0
        self._numbers = 0

    def arrivals(self, step: int, in_flight: int) -> list[Request]:
        """Return who arrives before ``step``."""
        if step % self._phase_steps == 0:
            self._next_phase()
        missing = self._target - in_flight
        # Most of a phase is spent near its target.
        hurry = max(1, -(-4 * self._target // self._phase_steps))
        return [self._request() for _ in range(min(missing, self._random.randint(0, 2 * hurry)))]

    def _next_phase(self) -> None:
        if not self._upcoming:
            self._upcoming = self._random.sample(self._bounds, len(self._bounds))
        below, size = self._upcoming.pop()
        self._target = self._random.randint(below + 1, size) if size else 0

    def _request(self) -> Request:
        self._numbers += 1
        return Request(
            self._numbers,
            self._random.randint(1, self._max_prompt),
            self._random.randint(1, self._max_output),
        )


class Rows:
    """Who sits in which row of the batch, and who waits for a row or for pages.

    A finished request leaves a hole; the next one fills the lowest. The batch is padded from the
    highest row in use to the next captured size.
    """

    def __init__(self, batch_sizes: Sequence[int], num_pages: int, page_size: int) -> None:
        self._sizes = batch_sizes
        self._free_pages, self._page_size = num_pages, page_size
        self.active: dict[int, Active] = {}
        self._waiting: list[Request] = []
        self.pages_handed_out = 0
        self.finished = 0

    @property
    def in_flight(self) -> int:
        return len(self.active) + len(self._waiting)

    @property
    def batch_size(self) -> int:
        """Return the captured size that holds every row in use, 0 without any."""
        highest = max(self.active, default=-1)
        return 0 if highest < 0 else next(size for size in self._sizes if size > highest)

    def leave(self) -> list[int]:
        """Take the finished requests out; return their rows."""
        done = [
            row
            for row, active in self.active.items()
            if active.decoded == active.request.output_tokens
        ]
        for row in done:
            self._free_pages += self._pages(self.active.pop(row).request)
        self.finished += len(done)
        return done

    def enter(self, arrivals: Sequence[Request]) -> list[tuple[int, Request]]:
        """Seat who fits, in order of arrival; return (row, request)."""
        self._waiting += arrivals
        seated = []
        empty = iter(row for row in range(self._sizes[-1]) if row not in self.active)
        while self._waiting and self._pages(self._waiting[0]) <= self._free_pages:
            row = next(empty, None)
            if row is None:
                break
            request = self._waiting.pop(0)
            self._free_pages -= self._pages(request)
            self.pages_handed_out += self._pages(request)
            seated.append((row, request))
        self.active.update((row, Active(request)) for row, request in seated)
        return seated

    def advance(self) -> None:
        """Note that every live row decoded a token."""
        for active in self.active.values():
            active.decoded += 1

    def _pages(self, request: Request) -> int:
        return -(-request.total // self._page_size)
