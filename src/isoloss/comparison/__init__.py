"""Several models on the same inputs: one table, one verdict, one page."""
