"""What the verbs of the command line share: a verb imports these, and no other verb."""
