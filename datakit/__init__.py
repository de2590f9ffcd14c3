"""From raw records to a training set: ibis expressions on DuckDB or Spark, Arrow functions beside."""
