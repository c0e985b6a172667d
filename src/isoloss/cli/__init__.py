"""The command line: one module a verb; what a verb needs is imported when it runs, so that help is instant."""
