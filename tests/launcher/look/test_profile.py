"""cookbook profile: torch's table of the first profiled rank."""

import pytest

from launcher.errors import UsageFault
from launcher.look import profile
from launcher.run.directory import Run


def test_the_first_ranks_table_is_cut(tmp_path):
    run = Run(tmp_path / "runs" / "20260102-030405-demo-0a1b")
    (run.path / "profile").mkdir(parents=True)
    with pytest.raises(UsageFault, match="submit its recipe again with --profile"):
        list(profile.lines(run, 2))
    for rank in (2, 10):
        table = ["----", "Name  Self CPU", "----", f"rank_{rank}", "aten::\x1b[2Jmm", "aten::add"]
        (run.path / f"profile/summary_rank_{rank}.txt").write_text("\n".join(table))
    told = list(profile.lines(run, 2))
    assert told[1:6] == ["----", "Name  Self CPU", "----", "rank_2", "aten::\\x1b[2Jmm"]
    assert len(told) == 7 and told[-1].endswith(f"cookbook tensorboard {run.name}")
