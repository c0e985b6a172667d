"""Training algorithms: how a batch becomes the gradient that the optimizer gets."""
