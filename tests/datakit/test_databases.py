"""A SELECT on a real PostgreSQL as a source."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from datakit.errors import DataError
from tests.datakit.kit import rows, run

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (shutil.which("initdb") and shutil.which("pg_ctl")),
        reason="PostgreSQL is not installed",
    ),
]


def as_user(*command: str) -> None:
    """Run a program of PostgreSQL, which refuses root, as another user if we are root."""
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    argv = [*(other if os.getuid() == 0 else []), *command]
    done = subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/tmp")
    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The address of a server of its own, reached by its socket."""
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    if os.getuid() == 0:
        os.chown(folder, 65534, 65534)
    data = str(folder / "data")
    as_user("initdb", "-D", data, "-U", "me", "--auth=trust", "--no-sync", "-E", "UTF8")
    options = f"-c listen_addresses='' -c unix_socket_directories={folder} -c fsync=off"
    as_user("pg_ctl", "-D", data, "-w", "-l", f"{folder}/log", "-o", options, "start")
    try:
        yield f"postgres://me:secret@/postgres?host={folder}"
    finally:
        as_user("pg_ctl", "-D", data, "-m", "immediate", "stop")
        shutil.rmtree(folder)


def test_rows_of_a_query(tmp_path, duck, url):
    psycopg = pytest.importorskip("psycopg")
    address = url.replace("postgres://", "postgresql://")
    with psycopg.connect(address, autocommit=True) as con:
        con.execute("CREATE TABLE tickets (question text, answer text, quality float8)")
        con.execute(
            "INSERT INTO tickets VALUES ('Wo?', 'Hier ü', 0.5), ('x', NULL, 1), ('q', 'a', 1)"
        )
    source = {"url": url, "query": "SELECT * FROM tickets ORDER BY quality", "format": "qa"}
    source |= {"keep": {"quality": "number"}, "name": "db"}
    made = run(tmp_path, [], duck, sources=[source], max_bad_share=0.5)
    found = {(row["prompt"], row["answer"], row["quality"]) for row in rows(made, duck)}
    assert found == {("Wo?", "Hier ü", 0.5), ("q", "a", 1.0)}
    assert made.bad_count == 1 and "'answer' is null" in made.bad[0]["reason"]
    assert "secret" not in made.inputs[0].origin and "SELECT" in made.inputs[0].origin
    with pytest.raises(DataError, match="the database does not answer the query") as error:
        run(tmp_path, [], duck, sources=[{**source, "query": "SELECT * FROM none", "name": "no"}])
    assert "secret" not in str(error.value)
