"""cookbook doctor --drill on the one-host Slurm: what the run survives, and the page about it."""

import json

import pytest

from launcher.errors import UsageFault
from launcher.observe.drill import Outcome, Site, page
from launcher.workflows.drill import chosen
from tests.launcher.kit import Kit, report

# Where requeued jobs wait, and imports take long.
SITE = Site("here", "20261124-120000-drill-ab12", ["n1", "n2"], 4, 20, 0.25, True)


@pytest.mark.long
def test_a_drill_tells_what_the_run_survived_and_at_what_cost(user: Kit):
    done = user.cookbook("doctor", "--drill", "--faults", "node,checkpoint,requeue", "--json")
    told = json.loads(done.stdout)
    run = user.root / "runs" / told["run"]
    assert done.returncode == 0, f"{told}\n{done.stderr}\n{report(run)}"
    damaged, node, requeue = told["outcomes"]
    assert [each["fault"] for each in told["outcomes"]] == ["checkpoint", "node", "requeue"]
    assert all(each["survived"] for each in told["outcomes"]), told
    assert damaged["cause"] == node["cause"] == "killed" and requeue["cause"] == "time_limit"
    # The newest checkpoint was damaged, so that the one before it was used.
    assert damaged["lost_steps"] > 20 > node["lost_steps"] > 0 == requeue["lost_steps"]
    assert requeue["waited_s"] > node["waited_s"]
    text = (run / "drill.txt").read_text()
    assert "The run survived 3 of 3 faults." in text and "save_every_n_steps 20" in text
    # Slurm may still be completing the job.
    user.wait(run, "CANCELLED")


def test_the_page_names_the_setting_for_each_slow_part():
    faced = [
        Outcome("rank", True, "killed", 7, 90.0, 1.0, 80.0),
        Outcome("requeue", True, "time_limit", 0, 1.0, 125.0, 20.0),
        Outcome("node", None, note="not enough time"),
    ]
    text = "\n".join(page(SITE, faced))
    assert "The run survived 2 of 2 faults." in text
    assert "node are killed               not tried  not enough time" in text
    for name in ("KillWait", "requeue: false", "spare_nodes", "COOKBOOK_VENV"):
        assert name in text
    assert "lost steps: at most 7 with save_every_n_steps 20" in text
    ended = "\n".join(page(SITE, [Outcome("step", False, note="the run is FAILED: bad storage")]))
    assert "NO         the run is FAILED: bad storage" in ended
    assert "1 of 1 faults ended the run: see cookbook status 20261124-120000-drill-ab12" in ended


def test_only_known_faults_are_caused_and_a_node_only_if_it_is_named():
    assert chosen(None) == ("rank", "step", "checkpoint", "requeue")
    assert chosen("requeue,node") == ("node", "requeue")
    with pytest.raises(UsageFault, match="there is no fault 'power': choose from rank, step"):
        chosen("rank,power")
