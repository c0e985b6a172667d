"""Components for isoloss, one of each kind; pyproject.toml names them as entry points."""
