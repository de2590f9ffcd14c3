"""One DuckDB for the tests of a session, which is what a run starts too."""

from collections.abc import Iterator

import pytest

from plugins.data.query_engines.duck import DuckDB


@pytest.fixture(scope="session")
def duck(tmp_path_factory) -> Iterator[DuckDB]:
    made = DuckDB(2**30, tmp_path_factory.mktemp("spill"), 1)
    yield made
    made.close()
