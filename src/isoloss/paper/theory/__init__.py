"""Theory: the paper's statements as programs, each ending with evidence and a verdict."""
