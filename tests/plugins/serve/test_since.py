"""--since: how long ago, or a date."""

from datetime import UTC, datetime, timedelta

import click
import pytest
from click.testing import CliRunner

from launcher.errors import UsageFault
from plugins.serve.cli.since import since_option


@click.command()
@since_option("Those since")
def asked(since: float | None) -> None:
    click.echo(since)


def test_since_takes_a_time_or_how_long_ago():
    def told(*words: str) -> str:
        return CliRunner().invoke(asked, words, catch_exceptions=False).stdout.strip()

    assert told() == ""
    day = datetime(2026, 1, 31, 21, 59, tzinfo=UTC).timestamp()
    for text in ("2026-01-31T21:59", "2026-01-31T23:59+02:00"):
        assert told("--since", text) == str(day)
    ago = (datetime.now(UTC) - timedelta(hours=36)).timestamp()
    assert float(told("--since", "36h")) == pytest.approx(ago, abs=60)
    with pytest.raises(UsageFault, match="write how long ago"):
        told("--since", "yesterday")
