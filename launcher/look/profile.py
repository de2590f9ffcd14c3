"""The slowest operators of a run's profiled steps, as torch.profiler has counted them."""

from collections.abc import Iterator

from launcher.errors import UsageFault
from launcher.look.text import plain
from launcher.run.directory import Run
from runspec import files


def lines(run: Run, top: int) -> Iterator[str]:
    """Yield the first operators of the first profiled rank, and where the other figures are.

    Raises:
        UsageFault: no rank has written a profile.
    """
    tables = (run.path / files.PROFILE).glob("summary_rank_*.txt")
    # By number: rank 10 comes after rank 2.
    path = min(tables, key=lambda each: (len(each.name), each.name), default=None)
    if path is None:
        raise UsageFault(f"{run.name} has no profile: submit its recipe again with --profile")
    yield f"{run.name}: operators by torch.profiler ({path}):"
    # A rule, the heads and a rule stand before them.
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines()[: 3 + top]
    yield from (plain(row).rstrip() for row in rows)
    yield f"computation and communication of each rank: cookbook tensorboard {run.name}"
