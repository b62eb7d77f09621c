"""The verbs: what `import clusterrun` offers and the command line uses."""
