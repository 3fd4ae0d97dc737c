"""Text generation over a step function: greedy, sampling, beam search."""
