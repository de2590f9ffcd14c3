"""The engines that run ibis expressions, and the tasks that Arrow functions are."""
