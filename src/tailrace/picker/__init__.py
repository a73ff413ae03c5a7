"""The endpoint picker: names the backend of each request for a proxy such as Envoy."""
