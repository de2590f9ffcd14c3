"""Makes the pictures of docs/ from real runs: python -m benchmarks.pictures RUN|SWEEP ...

It writes docs/pictures/report_light.png and report_dark.png, the page of `cookbook report` as
headless Chromium shows it, and watch.svg, the view of `cookbook watch` of the first run. Needs
chromium (Debian: apt-get install chromium).
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from launcher import paths, site
from launcher.observe import report
from launcher.observe.live import View
from launcher.runs.states import state_of
from launcher.runs.sweeps import runs_of

FOLDER = paths.REPO_ROOT / "docs" / "pictures"
SIZE = (1200, 900)
# Chromium's numbers for prefers-color-scheme.
SCHEMES = {"dark": 0, "light": 1}


def picture(page: Path, target: Path, scheme: str) -> None:
    """Write what a browser shows of a page, as PNG."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium on this machine: apt-get install chromium")
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    argv += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    argv += [f"--user-data-dir={page.parent}", f"--window-size={SIZE[0]},{SIZE[1]}"]
    subprocess.run(
        [*argv, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True
    )


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    runs = runs_of(site.load(None).root, sys.argv[1:])
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report.write(runs, page)
        for scheme in SCHEMES:
            picture(page, FOLDER / f"report_{scheme}.png", scheme)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=100, record=True, file=nowhere, force_terminal=True)
        console.print(View(runs[0]).panel(state_of(runs[0]), console.width, 12))
    console.save_svg(str(FOLDER / "watch.svg"), title=f"cookbook watch {runs[0].name}")
    print("\n".join(str(path) for path in sorted(FOLDER.iterdir())))


if __name__ == "__main__":
    main()
