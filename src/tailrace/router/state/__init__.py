"""What the router knows of its replicas and requests."""
