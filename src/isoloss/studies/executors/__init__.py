"""Executors: they run commands on directories; all state is in the files that the commands leave."""
