"""Our executor beside PyTorch's own parts: the same model on the same data in the same processes, step by step."""
