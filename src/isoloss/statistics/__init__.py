"""Numbers with errors: estimates, clustered ratios, and differences that are paired."""
