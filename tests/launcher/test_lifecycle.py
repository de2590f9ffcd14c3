"""The example of the whole way on the one-host Slurm: data, training, gates, serving, log, data."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launcher.kit import Kit

SCRIPT = Path(__file__).parents[2] / "examples" / "lifecycle" / "run.sh"


# It takes minutes; the parts have tests of their own.
@pytest.mark.named
def test_the_example_goes_from_data_to_a_champion_and_back(slurm_user: Kit):
    path = f"{Path(sys.executable).parent}:{slurm_user.env['PATH']}"
    env = {**slurm_user.env, "PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", str(SCRIPT)], env=env, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    for words in ("champion of support-intent is v1", "intent      classification", "latency"):
        assert words in done.stdout
    data = slurm_user.root / "datasets"
    answers = [json.loads(line) for line in (data / "help-desk/answers.jsonl").open()]
    assert len(answers) == 20 and all(each["answer"] for each in answers)
    logged = (data / "requests-support-intent" / "messages.jsonl").read_text().splitlines()
    assert len(logged) == 21, "each request is logged once"
    key = slurm_user.root / "endpoints" / "support-intent" / "key"
    assert key.stat().st_mode & 0o077 == 0
    for file in (slurm_user.root / "runs").rglob("*"):
        if file.is_file() and file.stat().st_size < 10**6:
            assert key.read_bytes().strip() not in file.read_bytes(), file
    listed = json.loads(slurm_user.cookbook("serve", "--list", "--json").stdout)
    assert listed[0]["url"] is None, "the example ends what it has started"
