"""How a linear classifier is fitted to features: AdamW for some epochs, or the minimum of a convex loss."""
