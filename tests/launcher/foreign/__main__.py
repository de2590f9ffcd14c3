"""The counts of docs/coming_from.md: what becomes of the keys of ten configs of each trainer.

python -m tests.launcher.foreign

The files hold the keys and values of examples that the trainers publish; the first line names each.
"""

import re
import sys
from pathlib import Path

from launcher import paths, yamlfile
from launcher.workflows import convert

FOLDER = Path(__file__).parent
COUNTS = FOLDER / "counts.yaml"
PAGE = paths.REPO_ROOT / "docs/coming_from.md"
_BETWEEN = re.compile(r"(<!-- counts -->\n).*?(\n<!-- end of counts -->)", re.DOTALL)
_STATES = ("taken", "unused", "refused", "unknown")


def configs() -> list[Path]:
    """The files, by trainer."""
    return sorted(FOLDER.glob("*/*.yaml"))


def counted(file: Path) -> dict[str, int]:
    """What becomes of a file's keys."""
    counts = convert.read(file).counts
    return {state: counts[state] for state in _STATES}


def table(counts: dict[str, dict[str, int]]) -> str:
    """The table of the page: a line for each trainer."""
    lines = [
        "| trainer | configs | become recipes | keys | taken | unused | refused | unknown |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for peer in convert.PEERS.values():
        folder = peer.prefix.rstrip(":")
        own = [each for name, each in counts.items() if name.startswith(f"{folder}/")]
        whole = sum(not (each["refused"] or each["unknown"]) for each in own)
        sums = [sum(each[state] for each in own) for state in _STATES]
        cells = [peer.name, len(own), whole, sum(sums), *sums]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def page(text: str, counts: dict[str, dict[str, int]]) -> str:
    """The page with the table of these counts."""
    return _BETWEEN.sub(lambda found: f"{found[1]}{table(counts)}{found[2]}", text)


def main() -> None:
    """Count, write counts.yaml, and put the table into the page."""
    counts = {str(file.relative_to(FOLDER)): counted(file) for file in configs()}
    COUNTS.write_text(yamlfile.dump(counts), encoding="utf-8")
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), counts), encoding="utf-8")
    sys.stdout.write(table(counts) + "\n")


if __name__ == "__main__":
    main()
