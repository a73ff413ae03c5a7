"""Readers of recorded traffic in JSON: Claude Code sessions, session lines, access logs."""
