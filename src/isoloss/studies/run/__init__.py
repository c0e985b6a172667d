"""Carrying out a plan: which unit starts when (`loop`), who has it (`lease`), and where it runs."""
