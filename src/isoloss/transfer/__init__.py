"""Transfer: how much of what a language knows a pre-trained model's features give to a downstream task."""
