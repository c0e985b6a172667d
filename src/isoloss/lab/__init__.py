"""The laboratory: languages whose truth is known, models, pre-training, transfer, and the measures of a checkpoint."""
