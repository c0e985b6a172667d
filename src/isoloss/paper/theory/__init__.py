"""Theory: the paper's statements as programs, each ending with what was found and a verdict."""
