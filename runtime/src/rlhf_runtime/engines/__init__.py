"""What computes with a model: torch trains and scores, vLLM generates."""
