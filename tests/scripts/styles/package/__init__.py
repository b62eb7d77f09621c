"""A project whose training is a module of a package."""
