"""Measures of a pre-trained model: its loss and its flatness, each an `Estimate` with its error."""
