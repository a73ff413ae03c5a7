"""Learning to route: demonstrations, cloning, and improvement by trying every choice."""
