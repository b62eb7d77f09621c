"""From flags, environment and YAML files to a JobSpec whose values know their origin."""
