"""accelerate's stand-in starts ranks without it."""
