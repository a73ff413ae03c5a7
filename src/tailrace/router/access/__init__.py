"""Who may use the router, and how much of it."""
