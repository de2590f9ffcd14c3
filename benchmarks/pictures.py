"""Makes the pictures of docs/ from real runs: python -m benchmarks.pictures RUN|SWEEP ...

Headless Chromium shows pages as a user sees them: report_light.png and report_dark.png, the page of
`cookbook report`; tensorboard.png, the curves of all runs by `cookbook tensorboard`; mlflow.png,
the registered model that the first run made. watch.svg is the view of `cookbook watch` of the
first run. --only watch mlflow makes those two. Needs chromium (Debian: apt-get
install chromium).
"""

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console

from launcher import paths, site
from launcher.look import report
from launcher.look.live import View
from launcher.look.servers import free_port
from launcher.look.tensorboard import PORTS
from launcher.run.directory import Run
from launcher.run.states import state_of
from launcher.run.sweeps import runs_of

FOLDER = paths.REPO_ROOT / "docs" / "pictures"
SIZE = (1200, 900)
WIDE = (1330, 900)
# Chromium's numbers for prefers-color-scheme.
SCHEMES = {"dark": 0, "light": 1}
# A page of docs should load at once.
MOST_BYTES = 150_000
START_S = 120.0


def picture(
    url: str, target: Path, scheme: str, wait_ms: int = 0, size: tuple[int, int] = SIZE
) -> None:
    """Write what a browser shows of a page after wait_ms of its own time, as PNG."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("there is no chromium on this machine: apt-get install chromium")
    argv = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    argv += [f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"]
    argv += [f"--virtual-time-budget={wait_ms}"] if wait_ms else []
    with tempfile.TemporaryDirectory() as profile:
        argv += [f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}"]
        subprocess.run([*argv, f"--screenshot={target}", url], check=True, capture_output=True)
    _shrink(target)


def _shrink(target: Path) -> None:
    """Reduce the colours until the file is small; pages have few."""
    from PIL import Image

    whole = Image.open(target).convert("RGB")
    for colours in (256, 128, 64, 32, 16):
        # Rare colours are those of curves.
        small = whole.quantize(colours, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(target, optimize=True)
        if target.stat().st_size <= MOST_BYTES:
            return
    sys.exit(f"{target} has {target.stat().st_size} bytes: show less")


def _answers(port: int) -> bool:
    with suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


@contextmanager
def served(argv: Sequence[str], port: int) -> Iterator[str]:
    """The address of a server that the command starts, as long as the block lasts."""
    null = subprocess.DEVNULL
    process = subprocess.Popen(argv, stdout=null, stderr=null, start_new_session=True)
    try:
        deadline = time.monotonic() + START_S
        while not _answers(port):
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{argv} does not listen within {START_S:.0f} s")
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        # MLflow's server has workers of its own.
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def report_pictures(runs: list[Run]) -> None:
    """The report of all runs, light and dark."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        report.write(runs, page)
        for scheme in SCHEMES:
            picture(page.as_uri(), FOLDER / f"report_{scheme}.png", scheme, 2_000)


def watch_picture(runs: list[Run]) -> None:
    """The live view of the first run."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=100, record=True, file=nowhere, force_terminal=True)
        console.print(View(runs[0]).panel(state_of(runs[0]), console.width, 12))
    console.save_svg(str(FOLDER / "watch.svg"), title=f"cookbook watch {runs[0].name}")


def tensorboard_picture(runs: list[Run]) -> None:
    """The curves of all runs."""
    port = free_port(None, PORTS)
    argv = [sys.executable, "-m", "launcher", "tensorboard", *(run.name for run in runs)]
    with served([*argv, "--port", str(port)], port) as url:
        picture(f"{url}/#scalars", FOLDER / "tensorboard.png", "light", 30_000)


def mlflow_picture(runs: list[Run]) -> None:
    """The registered model that the first run made, as MLflow's own server shows it."""
    from mlflow import MlflowClient

    store = f"sqlite:///{site.load(None).root / 'tracking' / 'mlflow.db'}"
    versions = MlflowClient(store).search_model_versions()
    names = {each.name for each in versions if each.tags.get("run") == runs[0].name}
    if not names:
        sys.exit(f"{runs[0].name} is not registered: cookbook register {runs[0].name} --as NAME")
    port = free_port(None, PORTS)
    argv = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    with served(argv, port) as url:
        page = f"{url}/#/models/{min(names)}"
        picture(page, FOLDER / "mlflow.png", "light", 30_000, WIDE)


KINDS = {
    "report": report_pictures,
    "watch": watch_picture,
    "tensorboard": tensorboard_picture,
    "mlflow": mlflow_picture,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pictures", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN|SWEEP")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    given = parser.parse_args()
    runs = runs_of(site.load(None).root, given.runs)
    FOLDER.mkdir(exist_ok=True)
    for kind in given.only:
        KINDS[kind](runs)
    print("\n".join(str(path) for path in sorted(FOLDER.iterdir())))


if __name__ == "__main__":
    main()
