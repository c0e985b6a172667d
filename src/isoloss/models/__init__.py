"""Models: architectures at named sizes, and the loading of anyone's checkpoint."""
