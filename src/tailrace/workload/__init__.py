"""Traffic: arrival processes, built-in workloads, trace files, and the request table."""
