"""The paper: its theory as programs and its studies. Uses the library; the library knows nothing of it."""
