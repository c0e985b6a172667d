"""Hidden Markov models with exact inference."""
