"""Opening MLflow's store: SQLite beside the runs that one process writes, or a server."""

import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import venv
from launcher.errors import StoreFault, UsageFault
from runspec import lock
from runspec.keys.key import KINDS

# Several commands may wait for their turn, each of which takes seconds, or minutes to import runs.
# A killed process has no lock.
_WAIT_S = 600.0
_INSTALL = "bash setup.sh --with mlflow"


@dataclass(frozen=True)
class Store:
    """Where runs are tracked and models registered."""

    # Of the kit's own files.
    folder: Path
    # What MLflow opens.
    uri: str

    @property
    def embedded(self) -> bool:
        """Whether it is the SQLite file beside the runs."""
        return self.uri.startswith("sqlite:")

    @property
    def artifacts(self) -> Path:
        """The folder of artefacts of the embedded store."""
        return self.folder / "artifacts"

    @property
    def models(self) -> Path:
        """The folder of registered model versions."""
        return self.folder / "models"

    @property
    def history(self) -> Path:
        """Who changed the registry, when and why: one JSON line per change."""
        return self.folder / "history.jsonl"


def at(root: Path, given: str | None = None) -> Store:
    """Return the store of a site.

    Args:
        root: the site's shared folder.
        given: a tracking setting; None for mlflow, the file beside the runs.

    Raises:
        UsageFault: given is no tracking setting.
    """
    folder, where = root / "tracking", given or "mlflow"
    if not KINDS["tracker"].test(where):
        raise UsageFault(f"tracking: {given!r} is not {KINDS['tracker'].description}")
    return Store(folder, f"sqlite:///{folder / 'mlflow.db'}" if where == "mlflow" else where)


@contextmanager
def client(store: Store, write: bool = True) -> Iterator[Any]:
    """Yield an MlflowClient of the store; one command at a time writes the embedded one.

    Raises:
        StoreFault: MLflow is not installed, or the store is locked, of another version, broken or
            not reachable.
    """
    if not write and store.embedded and not (store.folder / "mlflow.db").exists():
        raise StoreFault(
            f"nothing is registered or tracked in {store.folder} yet: register a model with "
            "cookbook register RUN --as NAME, import runs with cookbook track"
        )
    needed = write and store.embedded
    # Before the lock: it takes seconds, for which others would wait.
    client_class = imported()
    with locked(store.folder) if needed else nullcontext(), _faults_in_one_line(store):
        yield client_class(tracking_uri=store.uri, registry_uri=store.uri)


def imported() -> Any:
    """Return MLflow's client class.

    Raises:
        StoreFault: MLflow is not installed.
    """
    # What MLflow would send about its use, and what it would print.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    # A server that does not answer is reported at once, not after minutes.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    warnings.filterwarnings("ignore", module="mlflow")
    try:
        # Imported late: it takes seconds, and most commands need none of it.
        from mlflow import MlflowClient
    except ImportError as error:
        raise StoreFault(f"MLflow is not installed ({error.name}): {_INSTALL}") from error
    for name in ("alembic", "mlflow", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return MlflowClient


@contextmanager
def _faults_in_one_line(store: Store) -> Iterator[None]:
    """Turn what MLflow and its database raise into one line."""
    try:
        yield
    except Exception as error:
        kind = f"{type(error).__module__}.{type(error).__name__}"
        if not kind.startswith(("mlflow.", "sqlalchemy.", "sqlite3.", "alembic.", "requests.")):
            raise
        first = (str(error).strip().splitlines() or [kind])[0]
        raise StoreFault(f"{_where(store)}: {_meaning(store, str(error), first)}") from error


def _where(store: Store) -> str:
    return str(store.folder / "mlflow.db") if store.embedded else f"the MLflow server {store.uri}"


def _meaning(store: Store, text: str, first: str) -> str:
    if "locate revision" in text or _is_newer(text):
        return (
            "a newer version of MLflow made it, which this one cannot read: use that version's "
            "server by its address (tracking: http://...), or put the copy from before back"
        )
    if "database schema" in text:
        return (
            "an older version of MLflow made it: keep a copy, and run: "
            f"{venv.python().parent / 'mlflow'} db upgrade {store.uri}"
        )
    if "locked" in text:
        return "another program has locked it: wait for it, or end it, and repeat the command"
    if "not a database" in text or "malformed" in text:
        return "it is no SQLite database: move it away, then import the runs with: cookbook track"
    if "readonly" in text or "unable to open" in text:
        return f"it cannot be written ({first}): check its permissions and the disk"
    if "Max retries" in text or "Connection" in text:
        return "it does not answer: check its address and the tunnel to it"
    return first[:300]


def _is_newer(text: str) -> bool:
    """Whether MLflow names a schema that it does not know; it calls each other one out of date."""
    import mlflow.store

    match = re.search(r"found version (\w+)", text)
    known = Path(mlflow.store.__path__[0]) / "db_migrations" / "versions"
    return match is not None and not any(known.glob(f"{match[1]}_*.py"))


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a store's folder, which is made if it is not there.

    Raises:
        StoreFault: the folder cannot be written or locked, or another command holds the lock.
    """
    path = folder / ".lock"
    wait_s = float(os.environ.get("COOKBOOK_STORE_WAIT_S", _WAIT_S))

    def waiting(holder: str) -> None:
        message = f"waiting for another cookbook command ({holder}), which writes {folder}"
        print(f"{message}: up to {wait_s:g} s", file=sys.stderr)

    try:
        folder.mkdir(mode=0o750, parents=True, exist_ok=True)
        file = lock.take(path, wait_s, waiting)
    except lock.Held as error:
        raise StoreFault(
            f"{path} is locked by another cookbook command ({error}): repeat the command once "
            "that has ended"
        ) from error
    except OSError as error:
        raise StoreFault(
            f"cannot lock {path}: {error.strerror}: its filesystem must be writable, and mounted "
            "with locks (flock); or set COOKBOOK_ROOT"
        ) from error
    with file:
        yield
