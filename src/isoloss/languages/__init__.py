"""Languages: where text comes from, and the truth about it."""
