"""Which replica a request goes to, and why."""
