"""What may be rescaled in a model without changing what it computes; private to `isoloss.flatness`."""
