"""What a training will need, told before it is queued: formulas, each with its source."""
