"""Ask this machine what an estimate needs: the question, a traced model, what a run really took."""
