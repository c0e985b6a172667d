"""Squared gradient norms of every sequence from one backward pass to activations; private to `isoloss.flatness`."""
