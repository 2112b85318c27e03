"""A router as endpoint picker: it names the server to which Envoy sends each request."""
