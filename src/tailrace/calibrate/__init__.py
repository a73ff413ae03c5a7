"""Cost model and capacity of replicas, from live endpoints or from decision logs."""
