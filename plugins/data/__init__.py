"""From raw records to a training set: ibis expressions on DuckDB or Spark."""
