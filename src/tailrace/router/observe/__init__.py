"""What the router reports: metrics, status page, decision log."""
