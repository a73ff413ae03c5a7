"""Finds servers that come and go: a watched file, DNS names, Kubernetes."""
