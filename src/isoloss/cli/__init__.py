"""The command line: one module per subcommand; what it needs is imported when it runs, so that help is instant."""
