"""Verbs of the command line, one module each."""

import atexit
import gc

# A seventh of a command's time went to the search for garbage among objects that all stay.
gc.set_threshold(100_000)
atexit.register(gc.freeze)
