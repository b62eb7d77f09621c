"""The verbs: the functions of `import clusterrun`, which the command line also uses."""
