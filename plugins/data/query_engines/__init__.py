"""The query engines, which run ibis expressions, and the tasks that Arrow functions are."""
