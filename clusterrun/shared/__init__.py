"""Small modules that several rooms use."""
