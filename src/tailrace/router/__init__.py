"""The live router: this package's policies in front of real servers that speak OpenAI's API."""
