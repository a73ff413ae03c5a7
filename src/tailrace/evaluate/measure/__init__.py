"""One policy on one scenario and seed: the run, its metrics, and the cell that stores them."""
