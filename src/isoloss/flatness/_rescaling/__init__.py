"""Rescalings of a model that do not change its function; private to `isoloss.flatness`."""
