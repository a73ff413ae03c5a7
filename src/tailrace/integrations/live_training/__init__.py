"""Training on the requests of a live router."""
