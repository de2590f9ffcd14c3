"""What a check found. The checks before the queue, doctor, node check and download share it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from launcher.errors import CookbookError

State = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """One thing that was checked: its state, what it is, what was found, and the next step."""

    state: State
    subject: str
    words: str
    remedy: str = ""

    @property
    def line(self) -> str:
        """What was found and the next step, in one line."""
        return f"{self.words}: {self.remedy}" if self.remedy else self.words


def ok(subject: str, words: str) -> Finding:
    return Finding("ok", subject, words)


def warning(subject: str, words: str, remedy: str) -> Finding:
    return Finding("warning", subject, words, remedy)


def failed(subject: str, words: str, remedy: str = "") -> Finding:
    """Return a fault; without a remedy if the words name it already."""
    return Finding("failed", subject, words, remedy)


def skipped(subject: str, words: str, remedy: str = "") -> Finding:
    return Finding("skipped", subject, words, remedy)


def of_error(subject: str, error: CookbookError) -> list[Finding]:
    """Return the faults of an error, which name their remedies themselves."""
    return [failed(subject, fault) for fault in error.faults]


def faults_of(findings: Iterable[Finding]) -> list[str]:
    """Return what failed, one line per finding."""
    return [each.line for each in findings if each.state == "failed"]
