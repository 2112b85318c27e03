"""The report of a benchmark, and its forms: text, JSON, PNG and HTML."""
