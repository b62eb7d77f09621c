class LocalElasticAgent:
    """The stand-in for accelerate starts its ranks itself."""
