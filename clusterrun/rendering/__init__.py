"""From a Plan to the exact text of every file."""
