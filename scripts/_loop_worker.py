"""One data-parallel rank of decode_loop.py: its model, its requests, and the agreed batch."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from _loop_capture import Captured, Stepper, capturing
from _loop_check import Checker
from _loop_model import VOCABULARY, LoopModel, Tap
from _loop_plants import planted
from _loop_requests import Request, Rows, Traffic

from mla_ops.cli.model import demo_config
from mla_ops.cli.options import DTYPES

PAGE_SIZE = 64


@dataclass(frozen=True)
class Settings:
    """The options of a run, the same on every rank."""

    capture: str
    device: str
    preset: str
    dtype: str
    layers: int
    steps: int
    batch_sizes: tuple[int, ...]
    data_parallel: int
    max_seq_len: int
    check_every: int
    seed: int
    plant: str | None = None

    @property
    def num_pages(self) -> int:
        """Half of what full rows would need: requests wait for pages and reuse them."""
        pages_of_a_row = -(-self.max_seq_len // PAGE_SIZE)
        return max(self.batch_sizes[-1] * pages_of_a_row // 2, pages_of_a_row)

    @property
    def phase_steps(self) -> int:
        """Twice through every size, when there are steps enough."""
        return max(self.steps // (2 * len(self.batch_sizes) + 2), 6)


@dataclass
class Result:
    """What one rank saw; seconds are those of decode steps alone."""

    decode_seconds: float = 0.0
    warm_up_seconds: float = 0.0
    live_rows: int = 0
    padded_rows: int = 0
    dummy_batches: int = 0
    checks: int = 0
    finished: int = 0
    pages_handed_out: int = 0
    sizes: Counter[int] = field(default_factory=Counter)
    captured: Captured = field(default_factory=lambda: Captured(None, None, None, None))
    faults: list[str] = field(default_factory=list)


class Ranks:
    """The agreement of the ranks, over gloo on the host; a lone rank agrees with itself."""

    def __init__(self, rank: int, count: int, rendezvous: str) -> None:
        self.count = count
        if count > 1:
            if sys.platform == "linux":
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            dist.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count
            )

    def largest(self, *values: int) -> list[int]:
        """Return the largest of every value over the ranks."""
        if self.count == 1:
            return list(values)
        agreed = torch.tensor(values)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return agreed.tolist()

    def meet(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            dist.barrier()

    def part(self) -> None:
        """Leave the group."""
        if self.count > 1:
            dist.destroy_process_group()


class Worker:
    """Serves the requests of one rank."""

    def __init__(self, settings: Settings, rank: int, rendezvous: str) -> None:
        self.settings, self.rank = settings, rank
        self.device = torch.device(settings.device)
        self.ranks = Ranks(rank, settings.data_parallel, rendezvous)
        model = LoopModel(
            demo_config(settings.preset),
            num_layers=settings.layers,
            max_batch_size=settings.batch_sizes[-1],
            max_seq_len=settings.max_seq_len,
            num_pages=settings.num_pages,
            seed=settings.seed,
            dtype=DTYPES[settings.dtype],
            device=self.device,
        )
        self.model = planted(model, settings.plant)
        self.rows = Rows(settings.batch_sizes, settings.num_pages, PAGE_SIZE)
        self.traffic = Traffic(
            settings.batch_sizes,
            phase_steps=settings.phase_steps,
            max_prompt=settings.max_seq_len // 2,
            max_output=min(settings.max_seq_len // 4, settings.phase_steps),
            seed=settings.seed,
            rank=rank,
        )
        self.prompts = torch.Generator(self.device).manual_seed(settings.seed * 1000 + rank)
        self.checker = Checker(self.model)
        self.result = Result()
        self._checked: set[tuple[int, int]] = set()
        self._last_size = 0
        self._began = 0.0

    @torch.no_grad()
    def run(self) -> Result:
        """Warm up, decode all steps, and tell what was seen."""
        settings, result = self.settings, self.result
        begin = time.perf_counter()
        with capturing(settings.capture, self.model, settings.batch_sizes) as stepper:
            self._synchronize()
            self.ranks.meet()
            self._began = time.perf_counter()
            result.warm_up_seconds = self._began - begin
            for step in _progress(settings.steps, settings.capture, shown=self.rank == 0):
                self._step(step, stepper)
            self._synchronize()
            result.decode_seconds += time.perf_counter() - self._began
            result.captured = stepper.captured()
        result.finished = self.rows.finished
        result.pages_handed_out = self.rows.pages_handed_out
        self.ranks.part()
        return result

    def _step(self, step: int, stepper: Stepper) -> None:
        for row in self.rows.leave():
            self.model.cache.free(row)
        entering = self.rows.enter(self.traffic.arrivals(step, self.rows.in_flight))
        batch_size, pause = self.ranks.largest(self.rows.batch_size, bool(entering))
        # Where every rank is idle, all run a dummy batch of the smallest size.
        batch_size = batch_size or self.settings.batch_sizes[0]
        if pause:
            with self._paused():
                self._prefill(entering)
        taps = stepper.step(batch_size)
        self.rows.advance()
        self._count(batch_size)
        if self._is_sampled(step, batch_size):
            with self._paused():
                self._check(step, batch_size, taps)

    def _prefill(self, entering: list[tuple[int, Request]]) -> None:
        for row, request in entering:
            self.model.cache.allocate(row, request.total)
            size = (request.prompt_tokens,)
            prompt = torch.randint(VOCABULARY, size, generator=self.prompts, device=self.device)
            self.model.prefill(row, prompt)

    def _count(self, batch_size: int) -> None:
        live = len(self.rows.active)
        self.result.live_rows += live
        self.result.padded_rows += batch_size
        self.result.dummy_batches += live == 0
        self.result.sizes[batch_size] += 1

    def _is_sampled(self, step: int, batch_size: int) -> bool:
        """Sample at intervals, and at each change from one size to another when it is new.

        The answer is the same on every rank.
        """
        change = (self._last_size, batch_size)
        self._last_size = batch_size
        new = change not in self._checked
        self._checked.add(change)
        return new or step % self.settings.check_every == 0

    def _check(self, step: int, batch_size: int, taps: tuple[Tap, ...]) -> None:
        self.result.checks += 1
        fault = self.checker.check(batch_size, taps, self.rows.active)
        if fault:
            self.result.faults.append(f"rank {self.rank}, step {step}: {fault}")

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """Stop the clock on every rank for what is no decode step; all enter it together."""
        self._synchronize()
        self.result.decode_seconds += time.perf_counter() - self._began
        yield
        self._synchronize()
        self.ranks.meet()
        self._began = time.perf_counter()

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _progress(steps: int, text: str, *, shown: bool) -> Iterator[int]:
    """Count to ``steps``, with tqdm's bar where it is installed, else a line each tenth."""
    if not shown:
        yield from range(steps)
        return
    try:
        from tqdm import tqdm
    except ImportError:
        for step in range(steps):
            if step % max(steps // 10, 1) == 0:
                print(f"{text}: step {step} of {steps}", file=sys.stderr, flush=True)
            yield step
        return
    bar: Any = tqdm(range(steps), desc=text, unit="step", file=sys.stderr, mininterval=1.0)
    yield from bar
