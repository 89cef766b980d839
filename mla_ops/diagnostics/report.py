"""Report: what explain found, as a table, as JSON, as an exception."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec

from mla_ops.diagnostics.finding import KINDS, Finding
from mla_ops.diagnostics.lines import shown_line

__all__ = ["Report"]

_WIDTH = 99


@dataclass(frozen=True)
class Report:
    """What ``explain`` found.

    Attributes:
        facts: figures of the run, "unknown" (None) where torch does not tell: ``steps``,
            ``graphs``, ``graph_breaks``, ``recompiles``, ``cudagraphs_asked`` (graphs on CUDA that
            asked for them), ``cudagraphs_recorded``, ``cudagraphs_replayed``,
            ``cudagraphs_rerecorded``, ``cudagraphs_skipped``, ``partitions`` (pieces that CUDA
            graphs may record), ``metadata_launches`` a step, ``kernels`` a step,
            ``bytes_copied`` a step in copies of big buffers.
        findings: what costs time, in the order of ``KINDS``.
    """

    facts: Mapping[str, int | None]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Tell whether nothing was found."""
        return not self.findings

    def to_json(self) -> str:
        """Return the report as JSON.

        The object has ``ok`` (bool), ``facts`` (name -> integer or null) and ``findings``, a list
        of objects with ``kind``, ``what``, ``fix``, ``where``, ``argument``, ``operator``,
        ``bytes`` (strings and an integer, or null) and ``count`` (integer).
        """
        body = {
            "ok": self.ok,
            "facts": dict(self.facts),
            "findings": [asdict(finding) for finding in self.findings],
        }
        return json.dumps(body, indent=2)

    def raise_if_failed(self) -> None:
        """Do nothing if nothing was found.

        Raises:
            RuntimeError: with the findings.
        """
        if not self.ok:
            raise RuntimeError(self._plain())

    def __str__(self) -> str:
        if self.ok or find_spec("rich") is None:
            return self._plain()
        return self._rich()

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


def _number(value: int | None) -> str:
    return "unknown" if value is None else str(value)
