"""Writing runs to where they are tracked: MLflow or W&B."""

from collections.abc import Callable, Iterable, Iterator

from launcher import site as sites
from launcher.errors import CookbookError
from launcher.look.outcome import configuration
from launcher.run.directory import Run
from plugins.registry.launcher import importer, weights_and_biases
from plugins.registry.launcher import store as stores


def import_runs(store: stores.Store, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """Write runs; yield each one's name and what was done or why not."""
    if store.wandb:
        yield from weights_and_biases.import_runs(store, runs)
        return
    with stores.client(store) as client:
        yield from importer.import_runs(client, store, runs)


def import_ended(runs: Iterable[Run], say: Callable[[str], None]) -> None:
    """Write runs that have ended where their recipe or site says, if one does."""
    for run in runs:
        site = sites.load(run.submission.get("site"))
        where = configuration(run).get("tracking") or site.tracking
        if not where:
            continue
        try:
            for name, done in import_runs(stores.at(site.root, str(where)), [run]):
                say(f"tracking: {name} {done}")
        except CookbookError as error:
            # The run's own end counts; it can be imported at any time.
            say(f"warning: not tracked: {error.faults[0]}; then: cookbook track {run.name}")
