"""Small things that several rooms use."""
