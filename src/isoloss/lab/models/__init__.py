"""Models: architectures in named sizes and free shapes, and function-preserving expansion."""
