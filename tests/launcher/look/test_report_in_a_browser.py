"""cookbook report as a browser shows it, in headless Chromium; skipped where there is none."""

import json
import math
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from launcher.look import report
from launcher.run.directory import Run

BROWSER = (
    shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
)
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(BROWSER is None, reason="no chromium: apt-get install chromium"),
]
STEPS = 2_000
SIZE = (1300, 1400)


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    """The report of two runs of a sweep, one of 2,000 steps and one without memory for any."""
    root = tmp_path_factory.mktemp("report")
    runs = []
    for number, name in enumerate(("small", "too large")):
        run = Run(root / "runs" / f"20260102-030405-fits-{number:02d}-0a1b")
        (run.path / "logs").mkdir(parents=True)
        made = {"recipe": "demo", "sweep": "20260102-030405-fits-0a1b", "cell": name}
        run.write("submission.json", {**made, "jobs": [{"job_id": f"7_{number}"}]})
        state = {"state": "FAILED", "cause": "out_of_memory"} if number else {"state": "COMPLETED"}
        ended = {"job_id": f"7_{number}", "attempt": 0, "started": 0.0, "ended": 90.0 - 80 * number}
        run.write("status.json", {**ended, **state})
        runs.append(run)
    with (runs[0].path / "metrics.jsonl").open("w") as metrics:
        for step in range(1, STEPS + 1):
            loss = 3 + math.sin(step / 900) + (9 if step == 777 else 0)
            row = {"step": step, "time": step / 1e3, "loss": loss, "lr": 1e-4, "grad_norm": loss}
            row |= {"tokens_per_second_per_gpu": 1e4 - loss, "mfu": 0.4, "step_time_s": 0.1 * loss}
            metrics.write(json.dumps({**row, "peak_memory_reserved_gb": 61.2}) + "\n")
    report.write(runs, root / "report.html")
    return root / "report.html"


def look(page: Path, dark: bool) -> Image.Image:
    """A picture of the page in one of the two colour schemes."""
    picture = page.with_name(f"{'dark' if dark else 'light'}.png")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    window = f"--window-size={SIZE[0]},{SIZE[1]}"
    argv = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", scheme]
    argv += [window, f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={picture}"]
    subprocess.run([*argv, page.as_uri()], check=True, capture_output=True, timeout=120)
    return Image.open(picture).convert("RGB")


def near(colours: dict[tuple[int, ...], int], wanted: tuple[int, ...]) -> int:
    """How many points are about of a colour; at the edge of a letter it is mixed."""
    apart = (
        (sum(abs(a - b) for a, b in zip(colour, wanted, strict=True)), n)
        for colour, n in colours.items()
    )
    return sum(count for distance, count in apart if distance < 60)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_in_a_browser(page, dark):
    assert page.read_text().count("OUT_OF_MEMORY") == 1
    picture = look(page, dark)
    assert picture.size == SIZE
    colours = {colour: count for count, colour in picture.getcolors(10**7)}
    back = (13, 17, 23) if dark else (255, 255, 255)
    assert picture.getpixel((2, 2)) == back and colours[back] > 0.5 * SIZE[0] * SIZE[1]
    # The first curve, in the scheme's own blue.
    assert near(colours, (88, 166, 255) if dark else (9, 105, 218)) > 1_000
    # Text can be told from the background.
    text = (230, 237, 243) if dark else (31, 35, 40)
    assert near(colours, text) > 1_000
