"""What a router can see, the rules that decide on it, and how to find them by name."""
