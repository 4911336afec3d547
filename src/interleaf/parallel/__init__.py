"""Who holds which slice of the model, and of every adapter."""
