"""The page of cookbook doctor --drill: what a run survived, what it cost, and what to change."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.observe.text import duration

# From so many seconds on a part of a recovery is worth a setting.
_SLOW_S = 60

TITLES = {
    "rank": "a rank is killed",
    "step": "Slurm ends the job step",
    "checkpoint": "the same, and the newest checkpoint is damaged",
    "node": "all processes on a node are killed",
    "requeue": "the time limit is near: saved, requeued",
}


@dataclass(frozen=True)
class Outcome:
    """What came of one fault.

    survived: whether the run trained again; None if the fault was not tried. cause: the recorded
    one. noticed_s: until the attempt had ended. waited_s: until the next one began. started_s:
    until its first step. note: why it was not tried, or how the run ended.
    """

    fault: str
    survived: bool | None
    cause: str = ""
    lost_steps: int = 0
    noticed_s: float = 0.0
    waited_s: float = 0.0
    started_s: float = 0.0
    note: str = ""

    @property
    def seconds(self) -> float:
        """From the fault to the next step."""
        return self.noticed_s + self.waited_s + self.started_s


@dataclass(frozen=True)
class Site:
    """Where the drill was: what the page says in its first lines."""

    name: str
    run: str
    nodes: Sequence[str]
    ranks_per_node: int
    save_every: int
    step_s: float | None
    requeue: bool


def page(site: Site, outcomes: Sequence[Outcome]) -> list[str]:
    """Return the lines of the page."""
    step = "" if site.step_s is None else f"; a step takes {site.step_s:.3g} s"
    lines = [
        f"drill of the site {site.name}: run {site.run}",
        f"{len(site.nodes)} nodes x {site.ranks_per_node} ranks ({', '.join(site.nodes)}){step}; "
        f"a checkpoint every {site.save_every} steps",
        "",
        f"{'fault':<48} {'survived':<10} {'recorded as':<12} {'lost steps':>10} {'noticed':>9} "
        f"{'waited':>9} {'started':>9} {'in all':>9}",
    ]
    for each in outcomes:
        title = TITLES[each.fault]
        if not each.survived:
            word = "not tried" if each.survived is None else "NO"
            lines.append(f"{title:<48} {word:<10} {each.note}")
            continue
        times = (each.noticed_s, each.waited_s, each.started_s, each.seconds)
        lines.append(
            f"{title:<48} {'yes':<10} {each.cause:<12} {each.lost_steps:>10} "
            + " ".join(f"{seconds:>7.1f} s" for seconds in times)
        )
    return [*lines, "", *advice(site, outcomes)]


def advice(site: Site, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield what the outcomes come to, and which setting changes which part."""
    tried = [each for each in outcomes if each.survived is not None]
    lost = [each for each in tried if not each.survived]
    if lost:
        yield f"{len(lost)} of {len(tried)} faults ended the run: see cookbook status {site.run}"
    else:
        yield f"The run survived {len(tried)} of {len(tried)} faults."
    alive = [each for each in tried if each.survived]
    if not alive:
        return
    worst = max(alive, key=lambda each: each.seconds)
    yield (
        f"The longest recovery took {duration(worst.seconds)} ({TITLES[worst.fault]}): a fault "
        "costs this here, and the steps since the last checkpoint."
    )
    plain = [each.lost_steps for each in alive if each.fault != "checkpoint"]
    yield (
        f"lost steps: at most {max(plain, default=site.save_every)} with save_every_n_steps "
        f"{site.save_every}. Choose a value whose steps take about "
        f"{duration(max(60.0, worst.seconds))} in your recipe."
    )
    if any(each.noticed_s > _SLOW_S for each in alive):
        yield (
            "noticed: Slurm takes long to end a job's processes. Ask for KillWait and "
            "UnkillableStepTimeout; for ranks that hang, hang_timeout_s of the recipe."
        )
    if any(each.waited_s > _SLOW_S for each in alive):
        yield (
            "waited: Slurm holds a requeued job back. requeue: false in the site's file keeps a "
            "successor in the queue, expedited_requeue: true starts it at once after a lost node "
            "(Slurm 25.11), resources.spare_nodes replaces nodes in the allocation."
            if site.requeue
            else "waited: the successor waits in the queue; resources.spare_nodes avoids this for "
            "lost nodes."
        )
    if any(each.started_s > _SLOW_S for each in alive):
        yield (
            "started: Python's imports and the checkpoint's reading take long. Put the virtual "
            "environment on faster storage (COOKBOOK_VENV)."
        )
