"""Report: what explain found, as a table, as JSON, as an exception."""

from __future__ import annotations

import io
import textwrap
from dataclasses import asdict, dataclass
from typing import TypedDict

from mla_ops.diagnostics.finding import KINDS, Finding
from mla_ops.diagnostics.json_text import json_text
from mla_ops.diagnostics.lines import shown_line

__all__ = ["ExplainReport", "Facts", "Report"]

_WIDTH = 99
SCHEMA = "mla_ops.explain/1"


class Facts(TypedDict):
    """Figures of a run; null where torch does not tell.

    Attributes:
        steps: calls that were asked for.
        graphs: graphs compiled, recompilations included.
        graph_breaks: graph breaks.
        recompiles: compilations of a frame that already had one.
        cudagraphs_asked: graphs on CUDA that asked for CUDA graphs.
        cudagraphs_recorded: CUDA graphs recorded.
        cudagraphs_replayed: CUDA graphs replayed; null without a GPU.
        cudagraphs_rerecorded: recordings beyond one for each piece and set of sizes.
        cudagraphs_skipped: times torch left CUDA graphs out and said so.
        partitions: pieces of the graphs that CUDA graphs may record.
        metadata_launches: computations of scheduler metadata a step.
        kernels: kernels that Inductor generated, calls a step.
        bytes_copied: bytes a step in copies of big buffers.
    """

    steps: int
    graphs: int | None
    graph_breaks: int | None
    recompiles: int | None
    cudagraphs_asked: int
    cudagraphs_recorded: int | None
    cudagraphs_replayed: int | None
    cudagraphs_rerecorded: int | None
    cudagraphs_skipped: int | None
    partitions: int
    metadata_launches: int | None
    kernels: int | None
    bytes_copied: int | None


class ExplainReport(TypedDict):
    """All that ``explain --json`` prints.

    Attributes:
        schema: "mla_ops.explain/1"; the number changes when a field changes its meaning.
        ok: whether nothing was found.
        facts: figures of the run.
        findings: causes of lost time, the worst kinds first.
    """

    schema: str
    ok: bool
    facts: Facts
    findings: list[Finding]


@dataclass(frozen=True)
class Report:
    """What ``explain`` found.

    Attributes:
        facts: figures of the run, "unknown" (None) where torch does not tell.
        findings: what costs time, in the order of ``KINDS``.
    """

    facts: Facts
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Tell whether nothing was found."""
        return not self.findings

    def to_json(self) -> str:
        """Return the report as JSON, an ``ExplainReport``; what is None here is null there."""
        findings = [asdict(finding) for finding in self.findings]
        return json_text(
            {"schema": SCHEMA, "ok": self.ok, "facts": self.facts, "findings": findings}
        )

    def raise_if_failed(self) -> None:
        """Do nothing if nothing was found.

        Raises:
            RuntimeError: with the findings.
        """
        if not self.ok:
            raise RuntimeError(self._plain())

    def __str__(self) -> str:
        if self.ok:
            return self._plain()
        try:
            return self._rich()
        except ImportError:
            return self._plain()

    def _plain(self) -> str:
        lines = [self._summary()]
        for finding in self.findings:
            lines.append(_headline(finding))
            for label, text in (("what", finding.what), ("cost", KINDS[finding.kind])):
                lines.append(_wrapped(label, text))
            lines.append(_wrapped("fix", finding.fix))
        return "\n".join(lines)

    def _rich(self) -> str:
        from rich.box import SIMPLE
        from rich.console import Console
        from rich.table import Table

        table = Table(box=SIMPLE, pad_edge=False)
        for title in ("cause", "where", "what, and how to mend it"):
            table.add_column(title, overflow="fold")
        for finding in self.findings:
            place = (shown_line(finding.where), finding.argument, finding.operator, _size(finding))
            table.add_row(
                f"{finding.kind} x{finding.count}" if finding.count > 1 else finding.kind,
                "\n".join(filter(None, place)),
                f"{finding.what}\nfix: {finding.fix}",
                end_section=True,
            )
        text = io.StringIO()
        Console(file=text, width=_WIDTH, markup=False, highlight=False).print(table)
        shown = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        return f"{self._summary()}\n{shown}"

    def _summary(self) -> str:
        facts = [f"{_spaced(name)} {_number(value)}" for name, value in self.facts.items()]
        count = len(self.findings)
        verdict = "nothing found" if self.ok else f"{count} finding{'s' * (count > 1)}"
        return textwrap.fill(f"explain: {verdict}; {', '.join(facts)}", _WIDTH)


def _headline(finding: Finding) -> str:
    words = [finding.kind]
    if finding.count > 1:
        words.append(f"x{finding.count}")
    words += filter(None, (finding.argument, finding.operator, _size(finding)))
    if finding.where:
        words.append(f"at {shown_line(finding.where)}")
    return "- " + " ".join(words)


def _wrapped(label: str, text: str) -> str:
    return textwrap.fill(
        f"{label}: {text}", _WIDTH, initial_indent="    ", subsequent_indent="        "
    )


def _size(finding: Finding) -> str:
    return "" if finding.bytes is None else f"{finding.bytes} bytes"


def _spaced(name: str) -> str:
    return name.replace("_", " ").replace("cudagraphs", "CUDA graphs")


def _number(value: object) -> str:
    return "unknown" if value is None else str(value)
