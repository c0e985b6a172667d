"""Numbers with errors: estimates, clustered ratios, and differences that are paired; planning and tests of a study.

A study plans with `power`, takes means over `clusters` and adjusts them by their slope on the loss, tests them by
`significance`, and relates measures by `correlation` and, at the same loss, by `association`. `comparison` has
differences, paired or independent.
"""
