"""The study of every figure and table of the paper, from a laptop's evening to the paper's own scale."""
