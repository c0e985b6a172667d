"""The study optimizers: what flatness predicts of models that several optimizers have brought to one loss."""
