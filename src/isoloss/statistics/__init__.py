"""Numbers with errors: estimates, clustered ratios, and differences that are paired; planning and tests of a study.

A study plans with `power`, takes means over `clusters`, adjusts them by a `slope`, tests them by `equivalence` and
`multiple`, and relates measures by `correlation` and `granulated`. `comparison` has differences, paired or independent.
"""
