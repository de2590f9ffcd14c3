"""How findings are printed, and the exit status that they lead to."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import click

from launcher.checks.finding import Finding


def show(findings: Iterable[Finding], as_json: bool, **more: Any) -> int:
    """Print findings, as they come, as one aligned list; return how many of them failed.

    as_json: print one object with the findings and what else is given.
    """
    shown = []
    for finding in findings:
        shown.append(finding)
        if not as_json:
            click.echo(f"{finding.state:<8} {finding.subject:<19} {finding.line}")
    if as_json:
        click.echo(json.dumps({"findings": list(map(asdict, shown)), **more}, indent=1))
    return sum(each.state == "failed" for each in shown)
