"""Engines: they place commands on directories; all state is in the files that the commands leave."""
