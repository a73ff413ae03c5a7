"""Open-loop load on any OpenAI endpoint."""
