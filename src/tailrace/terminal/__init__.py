"""What people and programs read: tables, files of per-request results, traces, JSON."""
