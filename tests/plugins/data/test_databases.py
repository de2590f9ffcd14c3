"""A SELECT on a real PostgreSQL as a source."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from plugins.data.errors import DataError
from tests.plugins.data.kit import rows, run

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
    assert len(made.bad) == 1 and "'answer' is null" in made.bad[0]["reason"]
    assert "secret" not in made.inputs[0].origin and "SELECT" in made.inputs[0].origin
    with pytest.raises(DataError, match="the database does not answer the query") as error:
        run(tmp_path, [], duck, sources=[{**source, "query": "SELECT * FROM none", "name": "no"}])
    assert "secret" not in str(error.value)


def test_ranges_of_a_query_are_read_as_they_come(tmp_path, duck, url):
    """Ranges of a key, and the rows without one; no process holds all rows of the query."""
    psycopg = pytest.importorskip("psycopg")
    with psycopg.connect(url.replace("postgres://", "postgresql://"), autocommit=True) as con:
        con.execute("CREATE TABLE many (id bigint, question text, answer text)")
        con.execute("INSERT INTO many SELECT n, 'q' || n, 'a' FROM generate_series(1, 1000) n")
        con.execute("INSERT INTO many VALUES (NULL, 'none', 'a')")
    source = {"url": url, "query": "SELECT * FROM many;", "format": "qa", "name": "db"}
    split = {**source, "partition_by": "id", "partitions": 7}
    made = run(tmp_path, [], duck, sources=[split])
    found = rows(made, duck)
    assert {row["prompt"] for row in found} == {f"q{n}" for n in range(1, 1001)} | {"none"}
    assert len(found) == 1001 == len({row["_id"] for row in found})
    ranges = [each.file for each in made.inputs]
    assert len(ranges) == 8 and ranges[0] == "rows where id >= 1 AND id < 143"
    assert ranges[-1] == "rows where id IS NULL"
    assert not list((tmp_path / "work" / "sources").rglob("*")), "no copy"
    limited = run(tmp_path, [], duck, work="limited", sources=[{**split, "max_rows": 12}])
    assert limited.rows.count == 12
    text = {**split, "partition_by": "question"}
    with pytest.raises(DataError, match="partition_by: question is not a number but str"):
        run(tmp_path, [], duck, work="text", sources=[text])
    # A query that gives other rows when its ranges are read than when they were counted.
    with psycopg.connect(url.replace("postgres://", "postgresql://"), autocommit=True) as con:
        con.execute("CREATE SEQUENCE asked")
        con.execute(
            "CREATE FUNCTION later() RETURNS bigint AS $$ SELECT nextval('asked') $$ LANGUAGE sql"
        )
    query = "SELECT * FROM many WHERE (SELECT later()) < 3"
    with pytest.raises(DataError, match=r"query had 1,001 rows and its ranges gave \d+: run it"):
        run(tmp_path, [], duck, work="other", sources=[{**split, "query": query}])
    assert not list((tmp_path / "other").glob("00-read-*"))
