"""`python -m isoloss` is the `isoloss` command."""

from isoloss.cli.main import entry

if __name__ == "__main__":
    entry()
